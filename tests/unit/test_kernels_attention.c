// test_kernels_attention.c: conformance of rope, append and attention, against double arithmetic on
// the unpacked keys and values.
#include "tests/unit/kernels_fixture.h"

enum { MAX_TOKENS = 300, N_LAYERS = 2 };

// A sequence with its unpacked q, k, v after rotary embedding, and its pages in random order.
typedef struct story {
    const fixture *f;
    size_t n_heads, n_kv_heads, dim, window;
    int tokens;
    float *q, *k, *v; // (tokens, heads, dim)
    int32_t pages[MAX_TOKENS / KERNEL_PAGE_TOKENS + 1];
    float scale;
} story;

typedef struct device {
    kernel_kv *kv;
    kernel_ref qkv, rope, q, out;
} device;

static device open_device(const story *s, size_t n_pages) {
    device d = {0};
    error err;
    kernel_kv_args args = {N_LAYERS, n_pages, s->n_kv_heads, s->dim};
    assert_int_equal(kernel_kv_create(s->f->backend, &args, &d.kv, &err), 0);
    assert_true(kernel_kv_page_bytes(s->f->backend, &args) >=
                2 * N_LAYERS * s->n_kv_heads * s->dim * KERNEL_PAGE_TOKENS * fixture_act(s->f));
    size_t heads = s->n_heads + 2 * s->n_kv_heads;
    d.qkv = fixture_memory(s->f, FIXTURE_MAX_ROWS * heads * s->dim * sizeof(float));
    d.rope = fixture_memory(s->f, FIXTURE_MAX_ROWS * s->dim * sizeof(float));
    d.q = fixture_memory(s->f, FIXTURE_MAX_ROWS * s->n_heads * s->dim * fixture_act(s->f));
    d.out = fixture_memory(s->f, FIXTURE_MAX_ROWS * s->n_heads * s->dim * fixture_act(s->f));
    return d;
}

static void close_device(device *d) {
    kernel_kv_free(d->kv);
    kernel_mem_free(d->qkv.mem);
    kernel_mem_free(d->rope.mem);
    kernel_mem_free(d->q.mem);
    kernel_mem_free(d->out.mem);
}

static void make_story(story *s, size_t n_pages) {
    s->q = fixture_values(s->f->compute, (size_t)s->tokens * s->n_heads * s->dim, 2);
    s->k = fixture_values(s->f->compute, (size_t)s->tokens * s->n_kv_heads * s->dim, 2);
    s->v = fixture_values(s->f->compute, (size_t)s->tokens * s->n_kv_heads * s->dim, 2);
    s->scale = 1 / sqrtf((float)s->dim);
    // A walk with a step prime to n_pages visits every page once.
    for (size_t i = 0; i < sizeof s->pages / sizeof *s->pages; i++)
        s->pages[i] = (int32_t)((i * 7 + 3) % n_pages);
}

static void free_story(story *s) {
    free(s->q);
    free(s->k);
    free(s->v);
}

// Appends tokens from..from+n as rows row0.. of the step; no rotation, so that the story's values
// are what the cache holds.
static void append_tokens(const story *s, const device *d, int from, int n, int row0) {
    size_t dim = s->dim, width = (s->n_heads + 2 * s->n_kv_heads) * dim;
    int32_t slots[FIXTURE_MAX_ROWS];
    for (int i = 0; i < n; i++) {
        float *row = (float *)fixture_host(d->qkv) + (size_t)i * width;
        size_t token = (size_t)(from + i);
        memcpy(row, s->q + token * s->n_heads * dim, s->n_heads * dim * sizeof(float));
        row += s->n_heads * dim;
        memcpy(row, s->k + token * s->n_kv_heads * dim, s->n_kv_heads * dim * sizeof(float));
        row += s->n_kv_heads * dim;
        memcpy(row, s->v + token * s->n_kv_heads * dim, s->n_kv_heads * dim * sizeof(float));
        float *rope = (float *)fixture_host(d->rope) + (size_t)i * dim;
        for (size_t j = 0; j < dim; j++)
            rope[j] = j < dim / 2 ? 1 : 0;
        slots[i] = s->pages[token / KERNEL_PAGE_TOKENS] * KERNEL_PAGE_TOKENS +
                   (int32_t)(token % KERNEL_PAGE_TOKENS);
    }
    kernel_ref q = d->q;
    q.offset = (size_t)row0 * s->n_heads * dim * fixture_act(s->f);
    kernel_append_args args = {.rows = (size_t)n,
                               .n_heads = s->n_heads,
                               .n_kv_heads = s->n_kv_heads,
                               .head_dim = dim,
                               .qkv = d->qkv,
                               .rope = d->rope,
                               .kv = d->kv,
                               .layer = 1,
                               .kv_slot = slots,
                               .q = q};
    assert_int_equal(kernel_append(s->f->queue, &args), 0);
}

static kernel_attention_args attention_args(const story *s, const device *d,
                                            const kernel_sequence *sequences, size_t n) {
    return (kernel_attention_args){.n_sequences = n,
                                   .sequences = sequences,
                                   .n_heads = s->n_heads,
                                   .n_kv_heads = s->n_kv_heads,
                                   .head_dim = s->dim,
                                   .scale = s->scale,
                                   .window = s->window,
                                   .kv = d->kv,
                                   .layer = 1,
                                   .q = d->q,
                                   .out = d->out};
}

// One (query, head) in double.
static void check_head(const story *s, const device *d, int position, int row, size_t head) {
    size_t dim = s->dim, kv_head = head / (s->n_heads / s->n_kv_heads);
    int first = s->window && position >= (int)s->window ? position + 1 - (int)s->window : 0;
    const float *q = s->q + ((size_t)position * s->n_heads + head) * dim;
    double p[MAX_TOKENS], max = -INFINITY, sum = 0;
    for (int t = first; t <= position; t++) {
        const float *k = s->k + ((size_t)t * s->n_kv_heads + kv_head) * dim;
        p[t] = 0;
        for (size_t j = 0; j < dim; j++)
            p[t] += (double)q[j] * (double)k[j];
        p[t] *= (double)s->scale;
        max = p[t] > max ? p[t] : max;
    }
    for (int t = first; t <= position; t++)
        sum += p[t] = exp(p[t] - max);
    for (size_t j = 0; j < dim; j++) {
        double want = 0, size = 0;
        for (int t = first; t <= position; t++) {
            double term =
                p[t] / sum * (double)s->v[((size_t)t * s->n_kv_heads + kv_head) * dim + j];
            want += term;
            size += fabs(term);
        }
        // In bf16 every probability is rounded to 8 bits; those errors are independent.
        double slack = s->f->compute == DTYPE_BF16 ? size / 256 : 4e-6 * (size + 1);
        size_t at = ((size_t)row * s->n_heads + head) * dim + j;
        fixture_near("attention", (double)fixture_get(d->out, s->f->compute, at), want,
                     slack + fixture_rounding(s->f->compute, want));
    }
}

static void check_rows(const story *s, const device *d, int first_position, int rows, int row0) {
    for (int i = 0; i < rows; i++)
        for (size_t h = 0; h < s->n_heads; h++)
            check_head(s, d, first_position + i, row0 + i, h);
}

static const struct {
    size_t n_heads, n_kv_heads, dim, window;
    int tokens;
} shapes[] = {{2, 2, 16, 0, 5},    {4, 1, 10, 0, 70},  {6, 2, 64, 0, 131},
              {5, 1, 32, 40, 150}, {3, 3, 128, 7, 66}, {16, 2, 8, 1, 33},
              {2, 1, 256, 0, 65},  {40, 1, 16, 0, 20}, {4, 4, 24, 100, 230}};

static story story_of(const fixture *f, size_t i) {
    return (story){.f = f,
                   .n_heads = shapes[i].n_heads,
                   .n_kv_heads = shapes[i].n_kv_heads,
                   .dim = shapes[i].dim,
                   .window = shapes[i].window,
                   .tokens = shapes[i].tokens};
}

// The prompt in one piece against double; then in pieces and token by token: the same bits.
static void whole_chunks_and_decode(fixture *f) {
    enum { PAGES = 23 };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        story s = story_of(f, i);
        make_story(&s, PAGES);
        device d = open_device(&s, PAGES);
        append_tokens(&s, &d, 0, s.tokens, 0);
        kernel_sequence whole = {0, s.tokens, s.tokens, s.pages};
        kernel_attention_args args = attention_args(&s, &d, &whole, 1);
        assert_int_equal(kernel_attention(f->queue, &args), 0);
        check_rows(&s, &d, 0, s.tokens, 0);
        size_t row = s.n_heads * s.dim * fixture_act(f);
        uint8_t *want = fixture_alloc((size_t)s.tokens, row);
        memcpy(want, fixture_host(d.out), (size_t)s.tokens * row);
        close_device(&d);
        for (int chunk = 1; chunk <= 50; chunk += chunk < 2 ? 12 : 36) {
            device piece = open_device(&s, PAGES);
            args = attention_args(&s, &piece, &whole, 1);
            for (int from = 0; from < s.tokens; from += chunk) {
                int n = from + chunk < s.tokens ? chunk : s.tokens - from;
                append_tokens(&s, &piece, from, n, 0);
                kernel_sequence part = {0, n, from + n, s.pages};
                args.sequences = &part;
                assert_int_equal(kernel_attention(f->queue, &args), 0);
                assert_memory_equal(fixture_host(piece.out), want + (size_t)from * row,
                                    (size_t)n * row);
            }
            close_device(&piece);
        }
        free(want);
        free_story(&s);
    }
}

// Prefill chunks and decodes of several sequences in one call give the bits of each alone.
static void mixed_batch(fixture *f) {
    enum { N = 4, PAGES = 64 };
    static const int tokens[N] = {1, 97, 40, 130}, rows[N] = {1, 50, 1, 3};
    story s[N];
    device d = {0};
    kernel_sequence sequences[N];
    int row0 = 0;
    for (int i = 0; i < N; i++) {
        s[i] = (story){.f = f, .n_heads = 4, .n_kv_heads = 2, .dim = 32, .tokens = tokens[i]};
        make_story(&s[i], PAGES);
        for (size_t page = 0; page < 9; page++)
            s[i].pages[page] = (int32_t)((page * (size_t)N + (size_t)i) * 5 % PAGES);
        if (!i)
            d = open_device(&s[0], PAGES);
        append_tokens(&s[i], &d, 0, tokens[i] - rows[i], 0);
    }
    for (int i = 0; i < N; i++) {
        append_tokens(&s[i], &d, tokens[i] - rows[i], rows[i], row0);
        sequences[i] = (kernel_sequence){row0, rows[i], tokens[i], s[i].pages};
        row0 += rows[i];
    }
    kernel_attention_args args = attention_args(&s[0], &d, sequences, N);
    assert_int_equal(kernel_attention(f->queue, &args), 0);
    size_t row = s[0].n_heads * s[0].dim * fixture_act(f);
    uint8_t *want = fixture_alloc((size_t)row0, row);
    memcpy(want, fixture_host(d.out), (size_t)row0 * row);
    for (int i = 0; i < N; i++) {
        check_rows(&s[i], &d, tokens[i] - rows[i], rows[i], sequences[i].q_row0);
        args = attention_args(&s[i], &d, &sequences[i], 1);
        assert_int_equal(kernel_attention(f->queue, &args), 0);
        size_t at = (size_t)sequences[i].q_row0 * row;
        assert_memory_equal((uint8_t *)fixture_host(d.out) + at, want + at, (size_t)rows[i] * row);
        free_story(&s[i]);
    }
    free(want);
    close_device(&d);
}

// What an earlier owner left in a page, NaN included, does not reach the next one.
static void reused_pages(fixture *f) {
    enum { PAGES = 2, TOKENS = 21 };
    story s = {.f = f, .n_heads = 2, .n_kv_heads = 1, .dim = 16, .tokens = 32};
    make_story(&s, PAGES);
    device d = open_device(&s, PAGES);
    story poison = s;
    poison.k = fixture_alloc(32 * s.dim, sizeof(float));
    poison.v = fixture_alloc(32 * s.dim, sizeof(float));
    for (size_t i = 0; i < 32 * s.dim; i++)
        poison.k[i] = poison.v[i] = i % 2 ? NAN : INFINITY;
    append_tokens(&poison, &d, 0, 32, 0);
    append_tokens(&s, &d, 0, TOKENS, 0);
    kernel_sequence sequence = {0, TOKENS, TOKENS, s.pages};
    kernel_attention_args args = attention_args(&s, &d, &sequence, 1);
    assert_int_equal(kernel_attention(f->queue, &args), 0);
    check_rows(&s, &d, 0, TOKENS, 0);
    free(poison.k);
    free(poison.v);
    close_device(&d);
    free_story(&s);
}

static void rope_angles(fixture *f) {
    enum { ROWS = 7, DIM = 20 };
    static const int32_t positions[ROWS] = {0, 1, 2, 77, 4095, 32767, 131071};
    float frequencies[DIM / 2];
    for (int i = 0; i < DIM / 2; i++)
        frequencies[i] = powf(10000, -(float)i / (DIM / 2));
    kernel_ref out = fixture_memory(f, ROWS * DIM * sizeof(float));
    kernel_rope_args args = {ROWS, DIM, positions, frequencies, out};
    assert_int_equal(kernel_rope(f->queue, &args), 0);
    for (size_t r = 0; r < ROWS; r++)
        for (size_t i = 0; i < DIM / 2; i++) {
            float angle = (float)positions[r] * frequencies[i];
            fixture_near("cos", (double)fixture_get(out, DTYPE_F32, r * DIM + i),
                         cos((double)angle), 2e-7);
            fixture_near("sin", (double)fixture_get(out, DTYPE_F32, r * DIM + DIM / 2 + i),
                         sin((double)angle), 2e-7);
        }
    kernel_mem_free(out.mem);
}

typedef struct append_case {
    kernel_qk_norm norm;
    float clip;
} append_case;

// A head of q or k after norm, clip and rotation, in double.
static void turn(const append_case *c, const float *row, size_t heads, size_t head, size_t dim,
                 const float *weight, const float *rope, double *out) {
    double x[KERNEL_MAX_HEAD_DIM], sum = 0;
    bool full = c->norm == KERNEL_QK_NORM_FULL;
    const float *in = row + head * dim;
    for (size_t i = 0; i < (full ? heads * dim : dim); i++)
        sum += pow((double)(full ? row : in)[i], 2);
    double scale = 1 / sqrt(sum / (double)(full ? heads * dim : dim) + 1e-5);
    for (size_t i = 0; i < dim; i++) {
        x[i] = (double)in[i];
        if (c->norm != KERNEL_QK_NORM_NONE)
            x[i] *= scale * (double)weight[full ? head * dim + i : i];
        if (c->clip > 0)
            x[i] = fmin(fmax(x[i], -(double)c->clip), (double)c->clip);
    }
    for (size_t i = 0; i < dim / 2; i++) {
        double cosine = (double)rope[i], sine = (double)rope[dim / 2 + i];
        out[i] = x[i] * cosine - x[dim / 2 + i] * sine;
        out[dim / 2 + i] = x[dim / 2 + i] * cosine + x[i] * sine;
    }
}

// The cache is opaque: k and v are read back by attention. With one token in a sequence the output
// is its v; q . k is seen through two tokens whose values are 0 and 1.
static void check_append(fixture *f, const append_case *c) {
    enum { HEADS = 4, KV = 2, DIM = 48, ROWS = 5, WIDTH = (HEADS + 2 * KV) * DIM };
    float *qkv = fixture_values(DTYPE_F32, ROWS * WIDTH, 2);
    float *qw = fixture_values(DTYPE_F32, HEADS * DIM, 1);
    float *kw = fixture_values(DTYPE_F32, KV * DIM, 1);
    float *rope = fixture_values(DTYPE_F32, ROWS * DIM, 1);
    kernel_ref qkv_ref = fixture_upload(f, DTYPE_F32, qkv, ROWS * WIDTH);
    kernel_ref qw_ref = fixture_upload(f, DTYPE_F32, qw, HEADS * DIM);
    kernel_ref kw_ref = fixture_upload(f, DTYPE_F32, kw, KV * DIM);
    kernel_ref rope_ref = fixture_upload(f, DTYPE_F32, rope, ROWS * DIM);
    kernel_ref q = fixture_memory(f, ROWS * HEADS * DIM * fixture_act(f));
    kernel_ref out = fixture_memory(f, ROWS * HEADS * DIM * fixture_act(f));
    static const int32_t slots[ROWS] = {5, 16, 33, 50, 79};
    error err;
    kernel_kv *kv = NULL;
    kernel_kv_args kv_args = {1, 5, KV, DIM};
    assert_int_equal(kernel_kv_create(f->backend, &kv_args, &kv, &err), 0);
    kernel_append_args args = {.rows = ROWS,
                               .n_heads = HEADS,
                               .n_kv_heads = KV,
                               .head_dim = DIM,
                               .qkv = qkv_ref,
                               .rope = rope_ref,
                               .qk_norm = c->norm,
                               .q_norm = qw_ref,
                               .k_norm = kw_ref,
                               .epsilon = 1e-5f,
                               .clip = c->clip,
                               .kv = kv,
                               .kv_slot = slots,
                               .q = q};
    assert_int_equal(kernel_append(f->queue, &args), 0);
    double want[DIM];
    for (size_t r = 0; r < ROWS; r++)
        for (size_t h = 0; h < HEADS; h++) {
            turn(c, qkv + r * WIDTH, HEADS, h, DIM, qw, rope + r * DIM, want);
            for (size_t i = 0; i < DIM; i++)
                fixture_near("q", (double)fixture_get(q, f->compute, (r * HEADS + h) * DIM + i),
                             want[i], 1e-5 + fixture_rounding(f->compute, want[i]));
        }
    // Row 1 wrote token 0 of page 1: alone in a sequence, its output is v.
    kernel_sequence sequence = {1, 1, 1, (const int32_t[]){1}};
    kernel_attention_args attention = {.n_sequences = 1,
                                       .sequences = &sequence,
                                       .n_heads = HEADS,
                                       .n_kv_heads = KV,
                                       .head_dim = DIM,
                                       .scale = 1,
                                       .kv = kv,
                                       .q = q,
                                       .out = out};
    assert_int_equal(kernel_attention(f->queue, &attention), 0);
    for (size_t h = 0; h < HEADS; h++)
        for (size_t i = 0; i < DIM; i++) {
            double v = (double)qkv[WIDTH + (HEADS + KV + h / 2) * DIM + i];
            if (c->clip > 0)
                v = fmin(fmax(v, -(double)c->clip), (double)c->clip);
            fixture_near("v", (double)fixture_get(out, f->compute, (HEADS + h) * DIM + i), v,
                         1e-6 + fixture_rounding(f->compute, v));
        }
    args.kv_slot = (const int32_t[]){5, 16, 33, 50, 80};
    assert_int_equal(kernel_append(f->queue, &args), E_INVALID);
    args.kv_slot = (const int32_t[]){5, 16, -33, 50, 79};
    assert_int_equal(kernel_append(f->queue, &args), E_INVALID);
    kernel_kv_free(kv);
    kernel_ref refs[] = {qkv_ref, qw_ref, kw_ref, rope_ref, q, out};
    for (size_t i = 0; i < sizeof refs / sizeof *refs; i++)
        kernel_mem_free(refs[i].mem);
    free(qkv);
    free(qw);
    free(kw);
    free(rope);
}

static void append_norms(fixture *f) {
    static const append_case cases[] = {{KERNEL_QK_NORM_NONE, 0},
                                        {KERNEL_QK_NORM_HEAD, 0},
                                        {KERNEL_QK_NORM_FULL, 0},
                                        {KERNEL_QK_NORM_NONE, 0.7f},
                                        {KERNEL_QK_NORM_FULL, 0.3f}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_append(f, &cases[i]);
}

static void refused_sequences(fixture *f) {
    enum { PAGES = 4 };
    story s = {.f = f, .n_heads = 2, .n_kv_heads = 1, .dim = 8, .tokens = 20};
    make_story(&s, PAGES);
    device d = open_device(&s, PAGES);
    const int32_t bad[] = {0, PAGES};
    const kernel_sequence refused[] = {{0, 5, 20, bad},
                                       {0, 5, 4, s.pages},
                                       {-1, 1, 4, s.pages},
                                       {FIXTURE_MAX_ROWS, 1, 4, s.pages},
                                       {0, -1, 4, s.pages}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        kernel_attention_args args = attention_args(&s, &d, &refused[i], 1);
        assert_int_equal(kernel_attention(f->queue, &args), E_INVALID);
    }
    kernel_sequence none = {0, 0, 0, NULL};
    kernel_attention_args args = attention_args(&s, &d, &none, 1);
    assert_int_equal(kernel_attention(f->queue, &args), 0);
    args.layer = N_LAYERS;
    assert_int_equal(kernel_attention(f->queue, &args), E_INVALID);
    close_device(&d);
    free_story(&s);
    error err;
    kernel_kv *kv = NULL;
    kernel_kv_args odd = {1, 1, 1, 7}, wide = {1, 1, 1, KERNEL_MAX_HEAD_DIM + 2};
    assert_int_equal(kernel_kv_create(f->backend, &odd, &kv, &err), E_UNSUPPORTED);
    assert_int_equal(kernel_kv_create(f->backend, &wide, &kv, &err), E_UNSUPPORTED);
}

#define EACH(test)                                                                                 \
    static void test_##test(void **state) {                                                        \
        (void)state;                                                                               \
        fixture_each(test);                                                                        \
    }
EACH(rope_angles)
EACH(append_norms)
EACH(whole_chunks_and_decode)
EACH(mixed_batch)
EACH(reused_pages)
EACH(refused_sequences)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rope_angles),
        cmocka_unit_test(test_append_norms),
        cmocka_unit_test(test_whole_chunks_and_decode),
        cmocka_unit_test(test_mixed_batch),
        cmocka_unit_test(test_reused_pages),
        cmocka_unit_test(test_refused_sequences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
