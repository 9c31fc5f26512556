#include "engine/plan.h"

_Static_assert(CONFIG_MAX_WORKERS <= UINT8_MAX, "expert_rank holds a rank in a byte");

// Contiguous blocks that differ by one expert at most.
static void place_experts(plan *p) {
    for (size_t e = 0; e < p->model.n_experts; e++)
        p->expert_rank[e] = (uint8_t)(e * p->n_ffn / p->model.n_experts);
}

static uint64_t hash_value(uint64_t hash, uint64_t value) {
    for (int i = 0; i < 8; i++) {
        hash ^= (value >> (8 * i)) & 0xff;
        hash *= 0x100000001b3ull;
    }
    return hash;
}

static uint64_t hash_plan(const plan *p) {
    const uint64_t fields[] = {
        (uint64_t)p->compute, (uint64_t)p->wire, p->n_attention, p->n_ffn,
        p->n_lanes,           p->max_rows,       p->placement,   FRAME_VERSION};
    uint64_t hash = model_config_hash(&p->model);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        hash = hash_value(hash, fields[i]);
    for (size_t e = 0; e < p->model.n_experts; e++)
        hash = hash_value(hash, p->expert_rank[e]);
    return hash;
}

static int check_plan(const plan *p, const config *c, error *err) {
    if (p->n_ffn > p->model.n_experts)
        return error_set(err, E_INVALID,
                         "ffn.workers: %zu workers but the model has %zu experts; use at most one "
                         "worker for each expert",
                         p->n_ffn, p->model.n_experts);
    if ((size_t)c->max_model_len > p->model.max_positions)
        return error_set(err, E_INVALID,
                         "max_model_len: %lld is beyond the model's %zu positions; lower it",
                         (long long)c->max_model_len, p->model.max_positions);
    frame_layout layout;
    if (frame_layout_make(FRAME_DISPATCH, p->max_rows, p->model.top_k, p->model.hidden, p->wire,
                          &layout))
        return error_set(err, E_TOO_LARGE,
                         "attention.token_budget: a frame of %zu rows is too large; lower it",
                         p->max_rows);
    return E_OK;
}

int plan_make(const config *c, plan *out, error *err) {
    plan p = {.placement = 1};
    int code = model_config_load(c->model, &p.model, err);
    if (code)
        return code;
    p.compute = config_compute_dtype(c, p.model.checkpoint);
    p.wire = config_wire_dtype(c, p.model.checkpoint);
    p.n_attention = (size_t)c->attention.workers;
    p.n_ffn = c->mode == CONFIG_MODE_COLOCATED ? 1 : (size_t)c->ffn.workers;
    p.n_lanes = (size_t)c->attention.lanes;
    p.max_rows = (size_t)c->attention.token_budget;
    p.max_sequences = (size_t)c->attention.max_seqs;
    p.max_tokens = c->max_model_len ? (size_t)c->max_model_len : p.model.max_positions;
    code = check_plan(&p, c, err);
    if (code)
        return code;
    place_experts(&p);
    p.hash = hash_plan(&p);
    *out = p;
    return E_OK;
}

size_t plan_experts_of(const plan *p, size_t rank, int16_t *list) {
    size_t n = 0;
    for (size_t e = 0; e < p->model.n_experts; e++)
        if (p->expert_rank[e] == rank)
            list[n++] = (int16_t)e;
    return n;
}

static size_t tensor_bytes(const model_config *c, model_tensor which) {
    size_t n_layers, n_experts;
    model_tensor_spec spec;
    model_tensor_counts(c, which, &n_layers, &n_experts);
    if (!n_layers)
        return 0;
    model_tensor_describe(c, which, 0, 0, &spec);
    size_t n = n_layers * dtype_bytes(c->checkpoint);
    for (int i = 0; i < spec.n_dims; i++)
        n *= spec.dims[i];
    return n; // of one expert in every layer, where it is an expert's
}

static bool is_expert(model_tensor which) {
    return which == MODEL_EXPERT_GATE || which == MODEL_EXPERT_UP || which == MODEL_EXPERT_DOWN;
}

size_t plan_attention_bytes(const plan *p) {
    size_t n = 0;
    for (int which = 0; which < MODEL_TENSOR_COUNT; which++)
        if (!is_expert((model_tensor)which))
            n += tensor_bytes(&p->model, (model_tensor)which);
    return n;
}

size_t plan_ffn_bytes(const plan *p, size_t rank) {
    int16_t experts[MODEL_MAX_EXPERTS];
    size_t n = 0;
    for (int which = 0; which < MODEL_TENSOR_COUNT; which++)
        if (is_expert((model_tensor)which))
            n += tensor_bytes(&p->model, (model_tensor)which);
    return n * plan_experts_of(p, rank, experts);
}

frame_expect plan_frame_expect(const plan *p) {
    return (frame_expect){
        .plan_hash = p->hash,
        .hidden = p->model.hidden,
        .top_k = p->model.top_k,
        .max_rows = p->max_rows,
        .n_layers = p->model.n_layers,
        .n_lanes = p->n_lanes,
        .wire = p->wire,
    };
}
