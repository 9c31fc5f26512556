#include "attn_node/attn_model.h"

#include "engine/weights.h"

#include <stdlib.h>

enum { SLICE_BYTES = 4 << 20 };

typedef struct loader {
    kernel_backend *backend;
    const model_config *config;
    weights *files;
    size_t layer;
    void (*progress)(void *user, size_t bytes);
    void *user;
    attn_model *model;
} loader;

static size_t view_bytes(const tensor_view *view) {
    size_t n = dtype_bytes(view->type);
    for (int i = 0; i < view->n_dims; i++)
        n *= view->dims[i];
    return n;
}

static int get(loader *l, model_tensor which, tensor_view *out, error *err) {
    model_tensor_spec spec;
    model_tensor_describe(l->config, which, l->layer, 0, &spec);
    return weights_get(l->files, &spec, out, err);
}

static void release(loader *l, const tensor_view *view) {
    weights_release(l->files, view);
    l->progress(l->user, view_bytes(view));
}

// Packs a tensor in slices and gives the pages of each back, so that a large one is never resident
// twice.
static int load_rows(loader *l, kernel_matrix *matrix, const tensor_view *view, size_t row0,
                     kernel_matrix_part part, error *err) {
    size_t row_bytes = dtype_bytes(view->type) * view->dims[1];
    size_t step = row_bytes < SLICE_BYTES ? SLICE_BYTES / row_bytes : 1;
    int code = E_OK;
    for (size_t at = 0; at < view->dims[0] && !code; at += step) {
        tensor_view slice = *view;
        slice.data = (const char *)view->data + at * row_bytes;
        slice.dims[0] = view->dims[0] - at < step ? view->dims[0] - at : step;
        code = kernel_matrix_load(matrix, &slice, row0 + at, part, err);
        release(l, &slice);
    }
    return code;
}

// Stacks the rows of n tensors into one matrix, or loads the two halves of a swiglu matrix.
static int load_matrix(loader *l, const model_tensor *which, size_t n, bool swiglu,
                       kernel_matrix **out, error *err) {
    tensor_view views[3];
    size_t rows = 0;
    for (size_t i = 0; i < n; i++) {
        int code = get(l, which[i], &views[i], err);
        if (code)
            return code;
        rows += views[i].dims[0];
    }
    int code = kernel_matrix_create(l->backend, rows, views[0].dims[1], swiglu, out, err);
    size_t row0 = 0;
    for (size_t i = 0; i < n && !code; i++) {
        kernel_matrix_part part = !swiglu  ? KERNEL_PART_WHOLE
                                  : i == 0 ? KERNEL_PART_GATE
                                           : KERNEL_PART_UP;
        code = load_rows(l, *out, &views[i], swiglu ? 0 : row0, part, err);
        row0 += views[i].dims[0];
    }
    if (!code)
        l->model->weight_bytes += kernel_matrix_bytes(*out);
    return code;
}

static int load_one(loader *l, model_tensor which, kernel_matrix **out, error *err) {
    return load_matrix(l, &which, 1, false, out, err);
}

static int load_vector(loader *l, model_tensor which, kernel_mem **out, error *err) {
    tensor_view view;
    int code = get(l, which, &view, err);
    if (code)
        return code;
    code = kernel_vector_load(l->backend, &view, out, err);
    release(l, &view);
    l->model->weight_bytes += view.dims[0] * sizeof(float);
    return code;
}

static float element(const tensor_view *view, size_t i) {
    const char *at = (const char *)view->data + i * dtype_bytes(view->type);
    float f;
    uint16_t h;
    if (view->type == DTYPE_F32) {
        memcpy(&f, at, sizeof f);
        return f;
    }
    memcpy(&h, at, sizeof h);
    return view->type == DTYPE_BF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

// The three biases become one vector beside the stacked matrix.
static int load_qkv_bias(loader *l, kernel_mem **out, error *err) {
    const model_tensor which[] = {MODEL_Q_BIAS, MODEL_K_BIAS, MODEL_V_BIAS};
    const model_config *c = l->config;
    size_t total = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim, n = 0;
    float *joined = malloc(total * sizeof *joined);
    if (!joined)
        return error_set(err, E_NO_MEMORY, "no memory for a bias of %zu", total);
    int code = E_OK;
    for (size_t i = 0; i < 3 && !code; i++) {
        tensor_view view;
        code = get(l, which[i], &view, err);
        for (size_t j = 0; !code && j < view.dims[0]; j++)
            joined[n++] = element(&view, j);
        if (!code)
            release(l, &view);
    }
    tensor_view all = {.data = joined, .type = DTYPE_F32, .n_dims = 1, .dims = {total}};
    if (!code)
        code = kernel_vector_load(l->backend, &all, out, err);
    free(joined);
    return code;
}

static int load_attention(loader *l, attn_layer *layer, error *err) {
    const model_tensor qkv[] = {MODEL_Q, MODEL_K, MODEL_V};
    int code = load_vector(l, MODEL_ATTN_NORM, &layer->attn_norm, err);
    if (!code)
        code = load_matrix(l, qkv, 3, false, &layer->qkv, err);
    if (!code && l->config->qkv_bias)
        code = load_qkv_bias(l, &layer->qkv_bias, err);
    if (!code && l->config->qk_norm != MODEL_QK_NORM_NONE)
        code = load_vector(l, MODEL_Q_NORM, &layer->q_norm, err);
    if (!code && l->config->qk_norm != MODEL_QK_NORM_NONE)
        code = load_vector(l, MODEL_K_NORM, &layer->k_norm, err);
    if (!code)
        code = load_one(l, MODEL_O, &layer->o, err);
    return code;
}

static int load_ffn_side(loader *l, attn_layer *layer, error *err) {
    const model_tensor gate_up[] = {MODEL_SHARED_GATE, MODEL_SHARED_UP};
    int code = load_vector(l, MODEL_FFN_NORM, &layer->ffn_norm, err);
    if (!code)
        code = load_one(l, MODEL_ROUTER, &layer->router, err);
    if (code || !l->config->shared_intermediate)
        return code;
    code = load_matrix(l, gate_up, 2, true, &layer->shared_gate_up, err);
    if (!code)
        code = load_one(l, MODEL_SHARED_DOWN, &layer->shared_down, err);
    if (!code)
        code = load_one(l, MODEL_SHARED_ROUTER, &layer->shared_router, err);
    return code;
}

static int load_all(loader *l, error *err) {
    attn_model *m = l->model;
    int code = load_one(l, MODEL_EMBED, &m->embed, err);
    for (l->layer = 0; l->layer < m->n_layers && !code; l->layer++) {
        code = load_attention(l, &m->layers[l->layer], err);
        if (!code)
            code = load_ffn_side(l, &m->layers[l->layer], err);
    }
    if (!code)
        code = load_vector(l, MODEL_FINAL_NORM, &m->final_norm, err);
    if (!code && l->config->tie_embeddings)
        m->head = m->embed;
    else if (!code)
        code = load_one(l, MODEL_HEAD, &m->head, err);
    return code;
}

int attn_model_load(kernel_backend *backend, const plan *p, const char *dir,
                    void (*progress)(void *user, size_t bytes), void *user, attn_model *out,
                    error *err) {
    attn_model m = {.n_layers = p->model.n_layers};
    loader l = {
        .backend = backend, .config = &p->model, .progress = progress, .user = user, .model = &m};
    int code = weights_open(dir, &l.files, err);
    if (code)
        return code;
    m.layers = calloc(m.n_layers, sizeof *m.layers);
    if (!m.layers)
        code = error_set(err, E_NO_MEMORY, "no memory for %zu layers", m.n_layers);
    else
        code = load_all(&l, err);
    weights_close(l.files);
    if (code) {
        attn_model_free(&m);
        return code;
    }
    *out = m;
    return E_OK;
}

void attn_model_free(attn_model *m) {
    for (size_t i = 0; m->layers && i < m->n_layers; i++) {
        attn_layer *layer = &m->layers[i];
        kernel_mem_free(layer->attn_norm);
        kernel_mem_free(layer->ffn_norm);
        kernel_mem_free(layer->qkv_bias);
        kernel_mem_free(layer->q_norm);
        kernel_mem_free(layer->k_norm);
        kernel_matrix_free(layer->qkv);
        kernel_matrix_free(layer->o);
        kernel_matrix_free(layer->router);
        kernel_matrix_free(layer->shared_gate_up);
        kernel_matrix_free(layer->shared_down);
        kernel_matrix_free(layer->shared_router);
    }
    if (m->head != m->embed)
        kernel_matrix_free(m->head);
    kernel_matrix_free(m->embed);
    kernel_mem_free(m->final_norm);
    free(m->layers);
    *m = (attn_model){0};
}
