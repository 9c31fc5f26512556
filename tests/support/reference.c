#include "tests/support/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct reference {
    const model_config *config;
    weights *weights;
    size_t n_tokens, max_tokens;
    double *k, *v;     // (layers, max_tokens, kv heads * head_dim)
    double *x, *h, *y; // (hidden) residual, normed, what a layer adds
    double *q, *mixed; // (heads * head_dim)
    double *gate, *up; // (larger intermediate)
    double *scores;    // (max_tokens)
    double *chances;   // (experts)
    error *err;
    int rc; // the first failure of a step
};

static double element(const tensor_view *view, size_t i) {
    const char *data = view->data;
    uint16_t half;
    float value;
    if (view->type == DTYPE_F32) {
        memcpy(&value, data + i * sizeof value, sizeof value);
        return (double)value;
    }
    memcpy(&half, data + i * sizeof half, sizeof half);
    return (double)(view->type == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half));
}

// False when the model has no such tensor.
static bool get(reference *r, model_tensor which, size_t layer, size_t expert, tensor_view *out) {
    model_tensor_spec spec;
    model_tensor_describe(r->config, which, layer, expert, &spec);
    if (!spec.n_dims || r->rc != E_OK)
        return false;
    r->rc = weights_get(r->weights, &spec, out, r->err);
    return r->rc == E_OK;
}

// out = W in, plus the bias where there is one.
static void multiply(reference *r, model_tensor which, model_tensor bias, size_t layer,
                     size_t expert, const double *in, double *out) {
    tensor_view w, b;
    if (!get(r, which, layer, expert, &w))
        return;
    bool has_bias = bias != which && get(r, bias, layer, expert, &b);
    for (size_t i = 0; i < w.dims[0]; i++) {
        double sum = has_bias ? element(&b, i) : 0;
        for (size_t j = 0; j < w.dims[1]; j++)
            sum += element(&w, i * w.dims[1] + j) * in[j];
        out[i] = sum;
    }
}

// Normalises n values in place with the weights of a norm.
static void normalise(reference *r, model_tensor which, size_t layer, double *values, size_t n) {
    tensor_view w;
    double squares = 0;
    if (!get(r, which, layer, 0, &w))
        return;
    for (size_t i = 0; i < n; i++)
        squares += values[i] * values[i];
    double scale = 1 / sqrt(squares / (double)n + (double)r->config->rms_epsilon);
    for (size_t i = 0; i < n; i++)
        values[i] *= scale * element(&w, i);
}

static void normalise_heads(reference *r, model_tensor which, size_t layer, double *values,
                            size_t n_heads) {
    size_t dim = r->config->head_dim;
    if (r->config->qk_norm == MODEL_QK_NORM_FULL)
        normalise(r, which, layer, values, n_heads * dim);
    for (size_t i = 0; r->config->qk_norm == MODEL_QK_NORM_HEAD && i < n_heads; i++)
        normalise(r, which, layer, values + i * dim, dim);
}

static void clip(const model_config *c, double *values, size_t n) {
    double most = (double)c->clip_qkv;
    for (size_t i = 0; c->clip_qkv > 0 && i < n; i++)
        values[i] = fmax(-most, fmin(most, values[i]));
}

static void rotate(const model_config *c, double *values, size_t n_heads, size_t position) {
    size_t half = c->head_dim / 2;
    for (size_t head = 0; head < n_heads; head++, values += c->head_dim) {
        for (size_t i = 0; i < half; i++) {
            double angle = (double)((float)position * c->inverse_frequencies[i]);
            double a = values[i], b = values[i + half];
            values[i] = a * cos(angle) - b * sin(angle);
            values[i + half] = b * cos(angle) + a * sin(angle);
        }
    }
}

// mixed = attention of q over the cache of a layer, this token included.
static void attend(reference *r, const double *k, const double *v) {
    const model_config *c = r->config;
    size_t n = r->n_tokens + 1, dim = c->head_dim, width = c->n_kv_heads * dim;
    size_t first = c->sliding_window && n > c->sliding_window ? n - c->sliding_window : 0;
    memset(r->mixed, 0, c->n_heads * dim * sizeof *r->mixed);
    for (size_t head = 0; head < c->n_heads; head++) {
        size_t at = head / (c->n_heads / c->n_kv_heads) * dim;
        double largest = -INFINITY, sum = 0;
        for (size_t t = first; t < n; t++) {
            r->scores[t] = 0;
            for (size_t i = 0; i < dim; i++)
                r->scores[t] += r->q[head * dim + i] * k[t * width + at + i];
            r->scores[t] /= sqrt((double)dim);
            largest = fmax(largest, r->scores[t]);
        }
        for (size_t t = first; t < n; t++)
            sum += r->scores[t] = exp(r->scores[t] - largest);
        for (size_t t = first; t < n; t++)
            for (size_t i = 0; i < dim; i++)
                r->mixed[head * dim + i] += r->scores[t] / sum * v[t * width + at + i];
    }
}

static void attention(reference *r, size_t layer) {
    const model_config *c = r->config;
    size_t width = c->n_kv_heads * c->head_dim;
    double *k = r->k + layer * r->max_tokens * width, *v = r->v + layer * r->max_tokens * width;
    double *own_k = k + r->n_tokens * width, *own_v = v + r->n_tokens * width;
    multiply(r, MODEL_Q, MODEL_Q_BIAS, layer, 0, r->h, r->q);
    multiply(r, MODEL_K, MODEL_K_BIAS, layer, 0, r->h, own_k);
    multiply(r, MODEL_V, MODEL_V_BIAS, layer, 0, r->h, own_v);
    normalise_heads(r, MODEL_Q_NORM, layer, r->q, c->n_heads);
    normalise_heads(r, MODEL_K_NORM, layer, own_k, c->n_kv_heads);
    clip(c, r->q, c->n_heads * c->head_dim);
    clip(c, own_k, width);
    clip(c, own_v, width);
    rotate(c, r->q, c->n_heads, r->n_tokens);
    rotate(c, own_k, c->n_kv_heads, r->n_tokens);
    attend(r, k, v);
    multiply(r, MODEL_O, MODEL_O, layer, 0, r->mixed, r->y);
}

// y = down(silu(gate(h)) * up(h)); which is the first of the three.
static void expert(reference *r, model_tensor which, size_t layer, size_t index, size_t width) {
    model_tensor up = (model_tensor)(which + 1), down = (model_tensor)(which + 2);
    multiply(r, which, which, layer, index, r->h, r->gate);
    multiply(r, up, up, layer, index, r->h, r->up);
    for (size_t i = 0; i < width; i++)
        r->gate[i] = r->gate[i] / (1 + exp(-r->gate[i])) * r->up[i];
    multiply(r, down, down, layer, index, r->gate, r->y);
}

static void add(reference *r, double scale) {
    for (size_t i = 0; i < r->config->hidden; i++)
        r->x[i] += scale * r->y[i];
}

static void feed_forward(reference *r, size_t layer) {
    const model_config *c = r->config;
    double largest = -INFINITY, all = 0, taken = 0, shared = 0;
    size_t chosen[MODEL_MAX_TOP_K];
    multiply(r, MODEL_ROUTER, MODEL_ROUTER, layer, 0, r->h, r->chances);
    for (size_t e = 0; e < c->n_experts; e++)
        largest = fmax(largest, r->chances[e]);
    for (size_t e = 0; e < c->n_experts; e++)
        all += r->chances[e] = exp(r->chances[e] - largest);
    double weight[MODEL_MAX_TOP_K];
    for (size_t i = 0; i < c->top_k; i++) {
        chosen[i] = 0;
        for (size_t e = 1; e < c->n_experts; e++)
            if (r->chances[e] > r->chances[chosen[i]])
                chosen[i] = e;
        weight[i] = r->chances[chosen[i]];
        taken += weight[i];
        r->chances[chosen[i]] = -1;
    }
    for (size_t i = 0; i < c->top_k; i++) {
        expert(r, MODEL_EXPERT_GATE, layer, chosen[i], c->expert_intermediate);
        add(r, weight[i] / (c->norm_top_k ? taken : all));
    }
    if (c->shared_intermediate) {
        multiply(r, MODEL_SHARED_ROUTER, MODEL_SHARED_ROUTER, layer, 0, r->h, &shared);
        expert(r, MODEL_SHARED_GATE, layer, 0, c->shared_intermediate);
        add(r, 1 / (1 + exp(-shared)));
    }
}

int reference_step(reference *r, int32_t id, float *logits, error *err) {
    const model_config *c = r->config;
    tensor_view embed, head;
    r->err = err;
    r->rc = E_OK;
    if (r->n_tokens == r->max_tokens || id < 0 || (size_t)id >= c->vocab)
        return error_set(err, E_INVALID, "reference: no room, or token %d is out of range", id);
    if (!get(r, MODEL_EMBED, 0, 0, &embed))
        return r->rc;
    for (size_t i = 0; i < c->hidden; i++)
        r->x[i] = element(&embed, (size_t)id * c->hidden + i);
    for (size_t layer = 0; layer < c->n_layers; layer++) {
        memcpy(r->h, r->x, c->hidden * sizeof *r->h);
        normalise(r, MODEL_ATTN_NORM, layer, r->h, c->hidden);
        attention(r, layer);
        add(r, 1);
        memcpy(r->h, r->x, c->hidden * sizeof *r->h);
        normalise(r, MODEL_FFN_NORM, layer, r->h, c->hidden);
        feed_forward(r, layer);
    }
    normalise(r, MODEL_FINAL_NORM, 0, r->x, c->hidden);
    if (c->tie_embeddings)
        head = embed;
    else if (!get(r, MODEL_HEAD, 0, 0, &head))
        return r->rc;
    for (size_t i = 0; i < c->vocab; i++) {
        double sum = 0;
        for (size_t j = 0; j < c->hidden; j++)
            sum += element(&head, i * c->hidden + j) * r->x[j];
        logits[i] = (float)sum;
    }
    r->n_tokens++;
    return r->rc;
}

int reference_open(const model_config *config, weights *w, size_t max_tokens, reference **out,
                   error *err) {
    size_t q = config->n_heads * config->head_dim;
    size_t cache = config->n_layers * max_tokens * config->n_kv_heads * config->head_dim;
    size_t inner = config->expert_intermediate > config->shared_intermediate
                       ? config->expert_intermediate
                       : config->shared_intermediate;
    reference *r = calloc(1, sizeof *r);
    if (!r)
        return error_set(err, E_NO_MEMORY, "reference: out of memory");
    *r = (reference){.config = config, .weights = w, .max_tokens = max_tokens};
    const struct {
        double **at;
        size_t n;
    } parts[] = {{&r->k, cache},
                 {&r->v, cache},
                 {&r->x, config->hidden},
                 {&r->h, config->hidden},
                 {&r->y, config->hidden},
                 {&r->q, q},
                 {&r->mixed, q},
                 {&r->gate, inner},
                 {&r->up, inner},
                 {&r->scores, max_tokens},
                 {&r->chances, config->n_experts}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].at = calloc(parts[i].n, sizeof(double));
        if (!*parts[i].at) {
            reference_close(r);
            return error_set(err, E_NO_MEMORY, "reference: out of memory");
        }
    }
    *out = r;
    return E_OK;
}

void reference_reset(reference *r) {
    r->n_tokens = 0;
}

void reference_close(reference *r) {
    if (!r)
        return;
    double *const parts[] = {r->k,     r->v,    r->x,  r->h,      r->y,      r->q,
                             r->mixed, r->gate, r->up, r->scores, r->chances};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
    free(r);
}
