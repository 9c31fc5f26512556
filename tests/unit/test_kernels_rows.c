// test_kernels_rows.c: conformance of the operations that walk rows (norm, route, dispatch,
// combine, convert, sort, zero), of memory and marks, and the promise that no operation allocates.
#include "tests/unit/kernels_fixture.h"

#include "engine/frame.h"

#include <stdatomic.h>

// Every allocation of the process is counted, unless a sanitizer has its own malloc.
#if defined(__has_feature)
#define HAS_FEATURE(x) __has_feature(x)
#else
#define HAS_FEATURE(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || HAS_FEATURE(address_sanitizer) ||                             \
    HAS_FEATURE(thread_sanitizer) || HAS_FEATURE(memory_sanitizer)
enum { COUNTS_ALLOCATIONS = 0 };
static atomic_size_t allocations;
#else
enum { COUNTS_ALLOCATIONS = 1 };
static atomic_size_t allocations;

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *old, size_t size);

void *malloc(size_t size) {
    allocations++;
    return __libc_malloc(size);
}

void *calloc(size_t n, size_t size) {
    allocations++;
    return __libc_calloc(n, size);
}

void *realloc(void *old, size_t size) {
    allocations++;
    return __libc_realloc(old, size);
}
#endif

static void vectors_and_memory(fixture *f) {
    float values[37];
    uint16_t halves[38];
    for (int i = 0; i < 37; i++) {
        values[i] = (float)(i - 18) / 8;
        halves[i + 1] = f32_to_bf16(values[i]);
    }
    error err;
    kernel_mem *mem = NULL;
    tensor_view view = {values, DTYPE_F32, 1, {37}};
    assert_int_equal(kernel_vector_load(f->backend, &view, &mem, &err), 0);
    assert_memory_equal(kernel_mem_host(mem), values, sizeof values);
    kernel_mem_free(mem);
    view = (tensor_view){(uint8_t *)halves + 2, DTYPE_BF16, 1, {37}};
    assert_int_equal(kernel_vector_load(f->backend, &view, &mem, &err), 0);
    assert_memory_equal(kernel_mem_host(mem), values, sizeof values);
    kernel_mem_free(mem);
    view.n_dims = 2;
    assert_int_equal(kernel_vector_load(f->backend, &view, &mem, &err), E_INVALID);

    static const size_t sizes[] = {0, 1, 4097, 3 << 20};
    for (size_t i = 0; i < 4; i++) {
        kernel_ref ref = fixture_memory(f, sizes[i]);
        const uint8_t *bytes = fixture_host(ref);
        for (size_t b = 0; b < sizes[i]; b++)
            assert_int_equal(bytes[b], 0);
        memset(fixture_host(ref), 0xff, sizes[i]);
        assert_int_equal(kernel_zero(f->queue, ref, sizes[i] / 2), 0);
        for (size_t b = 0; b < sizes[i]; b++)
            assert_int_equal(bytes[b], b < sizes[i] / 2 ? 0 : 0xff);
        assert_int_equal(kernel_zero(f->queue, ref, sizes[i] + 1), E_INVALID);
        kernel_mem_free(ref.mem);
    }
    assert_int_equal(kernel_mem_alloc(f->backend, KERNEL_MEM_HOST, SIZE_MAX - 5, &mem, &err),
                     E_NO_MEMORY);
    assert_int_equal(kernel_mem_alloc(f->backend, KERNEL_MEM_HOST, SIZE_MAX / 4, &mem, &err),
                     E_NO_MEMORY);
    kernel_mark first, second;
    assert_int_equal(kernel_queue_mark(f->queue, &first), 0);
    assert_int_equal(kernel_queue_mark(f->queue, &second), 0);
    assert_true(second > first && kernel_mark_done(f->queue, first));
    assert_true(kernel_mark_done(f->queue, second));
}

static void norms(fixture *f) {
    static const size_t sizes[][2] = {{1, 1}, {3, 15}, {2, 64}, {5, 77}, {17, 2048}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t rows = sizes[i][0], hidden = sizes[i][1];
        float *x = fixture_values(DTYPE_F32, rows * hidden, 3);
        float *w = fixture_values(DTYPE_F32, hidden, 1);
        kernel_ref x_ref = fixture_upload(f, DTYPE_F32, x, rows * hidden);
        kernel_ref w_ref = fixture_upload(f, DTYPE_F32, w, hidden);
        kernel_ref out = fixture_memory(f, rows * hidden * fixture_act(f));
        int32_t select[17];
        for (size_t r = 0; r < rows; r++)
            select[r] = (int32_t)(rows - 1 - r);
        kernel_norm_args args = {rows, hidden, i % 2 ? select : NULL, x_ref, w_ref, 1e-5f, out};
        assert_int_equal(kernel_norm(f->queue, &args), 0);
        for (size_t r = 0; r < rows; r++) {
            const float *row = x + (i % 2 ? (size_t)select[r] : r) * hidden;
            double sum = 0;
            for (size_t j = 0; j < hidden; j++)
                sum += (double)row[j] * (double)row[j];
            for (size_t j = 0; j < hidden; j++) {
                double want = (double)row[j] / sqrt(sum / (double)hidden + 1e-5) * (double)w[j];
                fixture_near("norm", (double)fixture_get(out, f->compute, r * hidden + j), want,
                             1e-6 + fixture_rounding(f->compute, want));
            }
        }
        select[0] = (int32_t)rows;
        args.select = select;
        assert_int_equal(kernel_norm(f->queue, &args), E_INVALID);
        args.rows = FIXTURE_MAX_ROWS + 1;
        assert_int_equal(kernel_norm(f->queue, &args), E_TOO_LARGE);
        kernel_mem_free(x_ref.mem);
        kernel_mem_free(w_ref.mem);
        kernel_mem_free(out.mem);
        free(x);
        free(w);
    }
}

static void check_route(fixture *f, size_t rows, size_t n, size_t k, bool norm,
                        const float *logits) {
    kernel_ref l = fixture_upload(f, DTYPE_F32, logits, rows * n);
    kernel_ref e = fixture_memory(f, rows * k * sizeof(uint16_t));
    kernel_ref w = fixture_memory(f, rows * k * sizeof(float));
    kernel_route_args args = {rows, n, k, norm, l, e, w};
    assert_int_equal(kernel_route(f->queue, &args), 0);
    const uint16_t *experts = fixture_host(e);
    const float *weights = fixture_host(w);
    for (size_t r = 0; r < rows; r++, experts += k, weights += k, logits += n) {
        bool *taken = fixture_alloc(n, sizeof *taken);
        double sum = 0, top = 0, max = -INFINITY;
        for (size_t i = 0; i < n; i++)
            max = fmax(max, (double)logits[i]);
        for (size_t i = 0; i < n; i++)
            sum += exp((double)logits[i] - max);
        for (size_t i = 0; i < k; i++) {
            size_t best = n;
            for (size_t c = 0; c < n; c++)
                if (!taken[c] && (best == n || logits[c] > logits[best]))
                    best = c;
            assert_int_equal(experts[i], best);
            taken[best] = true;
            top += exp((double)logits[best] - max);
        }
        for (size_t i = 0; i < k; i++)
            fixture_near("route", (double)weights[i],
                         exp((double)logits[experts[i]] - max) / (norm ? top : sum), 1e-6);
        free(taken);
    }
    kernel_mem_free(l.mem);
    kernel_mem_free(e.mem);
    kernel_mem_free(w.mem);
}

static void routes(fixture *f) {
    static const size_t sizes[][3] = {{1, 1, 1}, {3, 4, 2}, {5, 60, 8}, {40, 128, 8}, {2, 64, 64}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        float *logits = fixture_values(DTYPE_F32, sizes[i][0] * sizes[i][1], 5);
        check_route(f, sizes[i][0], sizes[i][1], sizes[i][2], i % 2, logits);
        for (size_t j = 0; j < sizes[i][0] * sizes[i][1]; j++)
            logits[j] = roundf(logits[j]); // ties
        check_route(f, sizes[i][0], sizes[i][1], sizes[i][2], !(i % 2), logits);
        free(logits);
    }
    // NaN and infinities: distinct experts of the range, whatever the weights.
    float logits[] = {NAN, 1, INFINITY, -INFINITY, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN};
    kernel_ref l = fixture_upload(f, DTYPE_F32, logits, 12);
    kernel_ref e = fixture_memory(f, 64), w = fixture_memory(f, 64);
    kernel_route_args args = {2, 6, 4, true, l, e, w};
    assert_int_equal(kernel_route(f->queue, &args), 0);
    const uint16_t *experts = fixture_host(e);
    assert_int_equal(experts[0], 2);
    assert_int_equal(experts[1], 1);
    for (int i = 0; i < 8; i++) {
        assert_true(experts[i] < 6);
        for (int j = i / 4 * 4; j < i; j++)
            assert_true(experts[i] != experts[j]);
    }
    args.top_k = 7;
    assert_int_equal(kernel_route(f->queue, &args), E_INVALID);
    args.top_k = KERNEL_MAX_TOP_K + 1;
    assert_int_equal(kernel_route(f->queue, &args), E_TOO_LARGE);
    kernel_mem_free(l.mem);
    kernel_mem_free(e.mem);
    kernel_mem_free(w.mem);
}

// A dispatch and the combine of what each rank would return.
typedef struct traffic {
    size_t rows, hidden, top_k, n_experts, n_ranks;
    dtype wire;
} traffic;

static void check_frames(fixture *f, const traffic *t, const kernel_dispatch_args *args,
                         const float *h) {
    const uint16_t *experts = fixture_host(args->experts);
    const float *weights = fixture_host(args->weights);
    for (size_t rank = 0; rank < t->n_ranks; rank++) {
        size_t n = (size_t)args->frame_rows[rank], at = 0;
        frame_layout layout;
        assert_int_equal(
            frame_layout_make(FRAME_DISPATCH, n, t->top_k, t->hidden, t->wire, &layout), 0);
        const uint8_t *payload = fixture_host(args->payload[rank]);
        kernel_ref rows = args->payload[rank];
        rows.offset += layout.rows_at;
        for (size_t row = 0; row < t->rows; row++) {
            bool here = false;
            for (size_t i = 0; i < t->top_k; i++)
                here |= args->expert_rank[experts[row * t->top_k + i]] == rank;
            if (!here)
                continue;
            assert_true(at < n);
            assert_int_equal(args->row_index[rank * t->rows + at], row);
            for (size_t i = 0; i < t->top_k; i++) {
                uint16_t expert;
                float weight;
                size_t entry = at * t->top_k + i;
                memcpy(&expert, payload + layout.experts_at + entry * sizeof expert, sizeof expert);
                memcpy(&weight, payload + layout.weights_at + entry * sizeof weight, sizeof weight);
                size_t from = row * t->top_k + i;
                bool ours = args->expert_rank[experts[from]] == rank;
                assert_int_equal(expert, ours ? experts[from] : FRAME_NO_EXPERT);
                assert_true(weight == (ours ? weights[from] : 0.0f));
            }
            for (size_t j = 0; j < t->hidden; j++) {
                float want = h[row * t->hidden + j];
                if (t->wire == DTYPE_BF16)
                    want = bf16_to_f32(f32_to_bf16(want));
                assert_true(fixture_get(rows, t->wire, at * t->hidden + j) == want);
            }
            at++;
        }
        assert_int_equal(at, n);
    }
    (void)f;
}

static void check_traffic(fixture *f, const traffic *t) {
    size_t cells = t->rows * t->hidden;
    float *h = fixture_values(f->compute, cells, 1), *x = fixture_values(DTYPE_F32, cells, 1);
    kernel_dispatch_args args = {.rows = t->rows,
                                 .hidden = t->hidden,
                                 .top_k = t->top_k,
                                 .n_ranks = t->n_ranks,
                                 .wire = t->wire};
    uint8_t *expert_rank = fixture_alloc(t->n_experts, 1);
    for (size_t e = 0; e < t->n_experts; e++)
        expert_rank[e] = (uint8_t)(e * t->n_ranks / t->n_experts);
    args.expert_rank = expert_rank;
    args.h = fixture_upload(f, f->compute, h, cells);
    args.experts = fixture_memory(f, t->rows * t->top_k * sizeof(uint16_t));
    args.weights = fixture_memory(f, t->rows * t->top_k * sizeof(float));
    for (size_t i = 0; i < t->rows * t->top_k; i++) {
        ((uint16_t *)fixture_host(args.experts))[i] = (uint16_t)fixture_below((int)t->n_experts);
        ((float *)fixture_host(args.weights))[i] = fixture_uniform();
    }
    frame_layout layout;
    assert_int_equal(
        frame_layout_make(FRAME_DISPATCH, t->rows, t->top_k, t->hidden, t->wire, &layout), 0);
    for (size_t rank = 0; rank < t->n_ranks; rank++) {
        args.payload[rank] = fixture_memory(f, 64 + layout.bytes);
        args.payload[rank].offset = 64;
    }
    args.frame_rows = fixture_alloc(t->n_ranks, sizeof(int32_t));
    args.row_index = fixture_alloc(t->n_ranks * t->rows, sizeof(int32_t));
    assert_int_equal(kernel_dispatch(f->queue, &args), 0);
    check_frames(f, t, &args, h);

    // Every rank returns its rows as they came.
    kernel_ref x_ref = fixture_upload(f, DTYPE_F32, x, cells);
    kernel_combine_args combine = {.hidden = t->hidden,
                                   .n_ranks = t->n_ranks,
                                   .wire = t->wire,
                                   .frame_rows = args.frame_rows,
                                   .row_index = args.row_index,
                                   .row_stride = t->rows,
                                   .x = x_ref};
    for (size_t rank = 0; rank < t->n_ranks; rank++) {
        assert_int_equal(frame_layout_make(FRAME_DISPATCH, (size_t)args.frame_rows[rank], t->top_k,
                                           t->hidden, t->wire, &layout),
                         0);
        combine.payload[rank] = (uint8_t *)fixture_host(args.payload[rank]) + layout.rows_at;
        for (int32_t i = 0; i < args.frame_rows[rank]; i++)
            for (size_t j = 0; j < t->hidden; j++) {
                size_t at = (size_t)args.row_index[rank * t->rows + (size_t)i] * t->hidden + j;
                x[at] += t->wire == DTYPE_F32 ? h[at] : bf16_to_f32(f32_to_bf16(h[at]));
            }
    }
    assert_int_equal(kernel_combine(f->queue, &combine), 0);
    assert_memory_equal(fixture_host(x_ref), x, cells * sizeof(float));
    if (args.frame_rows[0] > 0) {
        args.row_index[0] = (int32_t)t->rows;
        assert_int_equal(kernel_combine(f->queue, &combine), E_INVALID);
    }
    args.payload[0].offset += layout.bytes + 64;
    assert_int_equal(kernel_dispatch(f->queue, &args), E_INVALID);

    kernel_mem_free(x_ref.mem);
    kernel_mem_free(args.h.mem);
    kernel_mem_free(args.experts.mem);
    kernel_mem_free(args.weights.mem);
    for (size_t rank = 0; rank < t->n_ranks; rank++)
        kernel_mem_free(args.payload[rank].mem);
    free(args.frame_rows);
    free(args.row_index);
    free(expert_rank);
    free(h);
    free(x);
}

static void dispatch_and_combine(fixture *f) {
    static const traffic cases[] = {
        {1, 8, 1, 1, 1, DTYPE_F32},      {5, 33, 2, 8, 2, DTYPE_BF16},
        {17, 70, 4, 60, 3, DTYPE_F32},   {64, 512, 8, 64, 2, DTYPE_BF16},
        {30, 20, 1, 64, 64, DTYPE_BF16}, {70, 400, 2, 4, 3, DTYPE_F32}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_traffic(f, &cases[i]);
}

static void converts(fixture *f) {
    static const size_t sizes[][2] = {{1, 1}, {3, 17}, {1, 64}, {33, 1001}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int from = 0; from < DTYPE_COUNT; from++)
            for (int to = 0; to < DTYPE_COUNT; to++) {
                size_t n = sizes[i][0] * sizes[i][1];
                uint8_t *in = fixture_alloc(n, 4), *out = fixture_alloc(n, 4);
                for (size_t j = 0; j < n; j++) {
                    float value = fixture_uniform() * 100;
                    uint16_t half =
                        from == DTYPE_F16 ? (uint16_t)fixture_below(0x7c00) : f32_to_bf16(value);
                    memcpy(in + j * dtype_bytes((dtype)from),
                           from == DTYPE_F32 ? (void *)&value : (void *)&half,
                           dtype_bytes((dtype)from));
                }
                kernel_convert_args args = {sizes[i][0], sizes[i][1], in,  {0},
                                            (dtype)from, out,         {0}, (dtype)to};
                int rc = kernel_convert(f->queue, &args);
                assert_int_equal(rc, to == DTYPE_F16 ? E_UNSUPPORTED : 0);
                for (size_t j = 0; !rc && j < n; j++) {
                    float value = from == DTYPE_F32   ? ((float *)(void *)in)[j]
                                  : from == DTYPE_F16 ? f16_to_f32(((uint16_t *)(void *)in)[j])
                                                      : bf16_to_f32(((uint16_t *)(void *)in)[j]);
                    if (to == DTYPE_F32)
                        assert_true(((float *)(void *)out)[j] == value);
                    else
                        assert_int_equal(((uint16_t *)(void *)out)[j], f32_to_bf16(value));
                }
                free(in);
                free(out);
            }
    kernel_ref a = fixture_memory(f, 64), b = fixture_memory(f, 32);
    ((float *)fixture_host(a))[3] = NAN;
    kernel_convert_args args = {4, 4, NULL, a, DTYPE_F32, NULL, b, DTYPE_BF16};
    assert_int_equal(kernel_convert(f->queue, &args), 0);
    assert_true(isnan(fixture_get(b, DTYPE_BF16, 3)));
    args.rows = 5;
    assert_int_equal(kernel_convert(f->queue, &args), E_INVALID);
    kernel_mem_free(a.mem);
    kernel_mem_free(b.mem);
}

static void sorts(fixture *f) {
    enum { ROWS = 50, K = 4, EXPERTS = 16, GROUPS = 5, N = ROWS * K };
    int16_t local[EXPERTS];
    uint16_t experts[N];
    float weights[N], slot_weight[N];
    int32_t group_rows[GROUPS], slot_row[N];
    size_t n_slots = 0, slot = 0;
    for (int e = 0; e < EXPERTS; e++)
        local[e] = e % 3 ? -1 : (int16_t)(e / 3 < GROUPS ? e / 3 : -1);
    for (int i = 0; i < N; i++) {
        experts[i] = fixture_below(2) ? FRAME_NO_EXPERT : (uint16_t)(fixture_below(GROUPS - 1) * 3);
        weights[i] = fixture_uniform();
    }
    kernel_sort_args args = {ROWS,  K,          EXPERTS,  GROUPS,      experts, weights,
                             local, group_rows, slot_row, slot_weight, &n_slots};
    assert_int_equal(kernel_sort(f->queue, &args), 0);
    for (int g = 0; g < GROUPS; g++) {
        size_t first = slot;
        for (int i = 0; i < N; i++)
            if (experts[i] != FRAME_NO_EXPERT && local[experts[i]] == g) {
                assert_true(slot < n_slots);
                assert_int_equal(slot_row[slot], i / K);
                assert_true(slot_weight[slot] == weights[i]);
                slot++;
            }
        assert_int_equal(group_rows[g], slot - first);
    }
    assert_int_equal(slot, n_slots);
    static const uint16_t foreign[] = {1, EXPERTS, 0xfffe};
    for (size_t i = 0; i < 3; i++) {
        uint16_t kept = experts[77];
        experts[77] = foreign[i];
        assert_int_equal(kernel_sort(f->queue, &args), E_PROTOCOL);
        experts[77] = kept;
    }
    local[0] = GROUPS;
    experts[0] = 0;
    assert_int_equal(kernel_sort(f->queue, &args), E_PROTOCOL);
    args.rows = 0;
    assert_int_equal(kernel_sort(f->queue, &args), 0);
    assert_int_equal(n_slots, 0);
}

// A step of one layer calls malloc not once.
static void no_allocation(fixture *f) {
    size_t start = allocations;
    enum { ROWS = 40, HIDDEN = 96, HEADS = 6, DIM = 16, GROUPS = 3, TOP_K = 2 };
    float *values = fixture_values(f->compute, 3 * HIDDEN * HIDDEN, 1);
    kernel_matrix *qkv_w = fixture_matrix(f, 3 * HIDDEN, HIDDEN, false, values);
    kernel_matrix *experts_w[GROUPS];
    for (int g = 0; g < GROUPS; g++)
        experts_w[g] = fixture_matrix(f, 2 * HIDDEN, HIDDEN, true, values);
    kernel_ref x = fixture_upload(f, DTYPE_F32, values, ROWS * HIDDEN);
    kernel_ref h = fixture_memory(f, ROWS * HIDDEN * 4),
               qkv = fixture_memory(f, 3 * ROWS * HIDDEN * 4);
    kernel_ref rope = fixture_memory(f, ROWS * DIM * 4), y = fixture_memory(f, ROWS * HIDDEN * 4);
    kernel_ref chosen = fixture_memory(f, ROWS * TOP_K * 4),
               weights = fixture_memory(f, ROWS * TOP_K * 4);
    kernel_kv_args kv_args = {1, 3, HEADS, DIM};
    kernel_kv *kv = NULL;
    error err;
    assert_int_equal(kernel_kv_create(f->backend, &kv_args, &kv, &err), 0);
    assert_true(!COUNTS_ALLOCATIONS || allocations > start);
    int32_t ids[ROWS], dense = ROWS, per_group[GROUPS] = {20, 0, 20}, pages[] = {2, 0, 1};
    float frequencies[DIM / 2] = {0.5f};
    int32_t slots[ROWS];
    for (int i = 0; i < ROWS; i++) {
        ids[i] = i;
        slots[i] = pages[i / 16] * 16 + i % 16;
    }
    kernel_sequence sequence = {0, ROWS, ROWS, pages};
    const kernel_matrix *qkv_list[] = {qkv_w};
    kernel_embed_args embed = {ROWS, ids, qkv_w, x};
    kernel_norm_args norm = {ROWS, HIDDEN, NULL, x, x, 1e-5f, h};
    kernel_gemm_args gemm = {.n_groups = 1,
                             .group_rows = &dense,
                             .matrices = qkv_list,
                             .a = h,
                             .epilogue = KERNEL_EPILOGUE_F32,
                             .out = qkv};
    kernel_rope_args angles = {ROWS, DIM, ids, frequencies, rope};
    kernel_append_args append = {.rows = ROWS,
                                 .n_heads = HEADS,
                                 .n_kv_heads = HEADS,
                                 .head_dim = DIM,
                                 .qkv = qkv,
                                 .rope = rope,
                                 .kv = kv,
                                 .kv_slot = slots,
                                 .q = h};
    kernel_attention_args attention = {.n_sequences = 1,
                                       .sequences = &sequence,
                                       .n_heads = HEADS,
                                       .n_kv_heads = HEADS,
                                       .head_dim = DIM,
                                       .scale = 0.25f,
                                       .kv = kv,
                                       .q = h,
                                       .out = y};
    kernel_route_args route = {ROWS, HIDDEN, TOP_K, true, x, chosen, weights};
    kernel_gemm_args grouped = {.n_groups = GROUPS,
                                .group_rows = per_group,
                                .matrices = (const kernel_matrix *const *)experts_w,
                                .a = y,
                                .epilogue = KERNEL_EPILOGUE_SWIGLU,
                                .out = h};
    kernel_convert_args convert = {ROWS, HIDDEN, NULL, x, DTYPE_F32, NULL, y, f->compute};
    size_t before = 0;
    for (int round = 0; round < 3; round++) {
        if (round == 1) // the first round may bind symbols
            before = allocations;
        assert_int_equal(kernel_embed(f->queue, &embed), 0);
        assert_int_equal(kernel_norm(f->queue, &norm), 0);
        assert_int_equal(kernel_gemm(f->queue, &gemm), 0);
        assert_int_equal(kernel_rope(f->queue, &angles), 0);
        assert_int_equal(kernel_append(f->queue, &append), 0);
        assert_int_equal(kernel_attention(f->queue, &attention), 0);
        assert_int_equal(kernel_route(f->queue, &route), 0);
        assert_int_equal(kernel_gemm(f->queue, &grouped), 0);
        assert_int_equal(kernel_convert(f->queue, &convert), 0);
        assert_int_equal(kernel_zero(f->queue, h, ROWS), 0);
    }
    assert_int_equal(allocations, before);
    kernel_kv_free(kv);
    kernel_matrix_free(qkv_w);
    for (int g = 0; g < GROUPS; g++)
        kernel_matrix_free(experts_w[g]);
    kernel_ref refs[] = {x, h, qkv, rope, y, chosen, weights};
    for (size_t i = 0; i < sizeof refs / sizeof *refs; i++)
        kernel_mem_free(refs[i].mem);
    free(values);
}

#define EACH(test)                                                                                 \
    static void test_##test(void **state) {                                                        \
        (void)state;                                                                               \
        fixture_each(test);                                                                        \
    }
EACH(vectors_and_memory)
EACH(norms)
EACH(routes)
EACH(dispatch_and_combine)
EACH(converts)
EACH(sorts)

static void test_no_allocation(void **state) {
    (void)state;
    if (!COUNTS_ALLOCATIONS)
        printf("SKIPPED: a sanitizer owns malloc\n");
    fixture_each(no_allocation);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vectors_and_memory),
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_routes),
        cmocka_unit_test(test_dispatch_and_combine),
        cmocka_unit_test(test_converts),
        cmocka_unit_test(test_sorts),
        cmocka_unit_test(test_no_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
