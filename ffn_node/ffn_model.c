#include "ffn_node/ffn_model.h"

#include "engine/weights.h"

#include <stdlib.h>

// One tensor of an expert into (a part of) a matrix; its pages go back at once.
static int load_part(weights *files, const plan *p, model_tensor which, size_t layer, size_t expert,
                     kernel_matrix_part part, kernel_matrix *matrix, error *err) {
    model_tensor_spec spec;
    tensor_view view;
    model_tensor_describe(&p->model, which, layer, expert, &spec);
    int code = weights_get(files, &spec, &view, err);
    if (code)
        return code;
    code = kernel_matrix_load(matrix, &view, 0, part, err);
    weights_release(files, &view);
    return code;
}

static int load_expert(kernel_backend *backend, weights *files, const plan *p, size_t layer,
                       size_t expert, kernel_matrix **gate_up, kernel_matrix **down, error *err) {
    size_t inter = p->model.expert_intermediate, hidden = p->model.hidden;
    int code = kernel_matrix_create(backend, 2 * inter, hidden, true, gate_up, err);
    if (!code)
        code =
            load_part(files, p, MODEL_EXPERT_GATE, layer, expert, KERNEL_PART_GATE, *gate_up, err);
    if (!code)
        code = load_part(files, p, MODEL_EXPERT_UP, layer, expert, KERNEL_PART_UP, *gate_up, err);
    if (!code)
        code = kernel_matrix_create(backend, hidden, inter, false, down, err);
    if (!code)
        code = load_part(files, p, MODEL_EXPERT_DOWN, layer, expert, KERNEL_PART_WHOLE, *down, err);
    return code;
}

static int load_all(kernel_backend *backend, weights *files, const plan *p, const int16_t *experts,
                    void (*progress)(void *user, size_t bytes), void *user, ffn_model *m,
                    error *err) {
    size_t expert_bytes =
        3 * p->model.hidden * p->model.expert_intermediate * dtype_bytes(p->model.checkpoint);
    size_t n = 0;
    for (size_t layer = 0; layer < m->n_layers; layer++) {
        for (size_t i = 0; i < m->n_local; i++, n++) {
            int code = load_expert(backend, files, p, layer, (size_t)experts[i], &m->gate_up[n],
                                   &m->down[n], err);
            if (code)
                return code;
            m->weight_bytes += kernel_matrix_bytes(m->gate_up[n]) + kernel_matrix_bytes(m->down[n]);
            progress(user, expert_bytes);
        }
    }
    return E_OK;
}

int ffn_model_load(kernel_backend *backend, const plan *p, size_t rank, const char *dir,
                   void (*progress)(void *user, size_t bytes), void *user, ffn_model *out,
                   error *err) {
    int16_t experts[MODEL_MAX_EXPERTS];
    weights *files = NULL;
    ffn_model m = {.n_layers = p->model.n_layers, .n_local = plan_experts_of(p, rank, experts)};
    int code = weights_open(dir, &files, err);
    if (code)
        return code;
    m.local_group = malloc(p->model.n_experts * sizeof *m.local_group);
    m.gate_up = calloc(m.n_layers * m.n_local, sizeof *m.gate_up);
    m.down = calloc(m.n_layers * m.n_local, sizeof *m.down);
    if (!m.local_group || !m.gate_up || !m.down) {
        code = error_set(err, E_NO_MEMORY, "no memory for a table of experts");
        goto done;
    }
    for (size_t e = 0; e < p->model.n_experts; e++)
        m.local_group[e] = -1;
    for (size_t i = 0; i < m.n_local; i++)
        m.local_group[experts[i]] = (int16_t)i;
    code = load_all(backend, files, p, experts, progress, user, &m, err);
done:
    weights_close(files);
    if (code)
        ffn_model_free(&m);
    else
        *out = m;
    return code;
}

void ffn_model_free(ffn_model *m) {
    for (size_t i = 0; i < m->n_layers * m->n_local; i++) {
        if (m->gate_up)
            kernel_matrix_free(m->gate_up[i]);
        if (m->down)
            kernel_matrix_free(m->down[i]);
    }
    free(m->local_group);
    free(m->gate_up);
    free(m->down);
    *m = (ffn_model){0};
}
