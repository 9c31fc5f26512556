// test_kernels_gemm.c: conformance of matrices, the embedding and the matrix product, against sums
// in double from the unpacked weights.
#include "tests/unit/kernels_fixture.h"

enum { MAX_SLOTS = 64 };

// One product: its sizes, its inputs as f32 and its place on the device.
typedef struct product {
    const fixture *f;
    kernel_epilogue epilogue;
    size_t n, k, n_groups, slots, a_rows, out_rows, out_columns;
    int32_t group_rows[FIXTURE_MAX_GROUPS];
    int32_t a_index[MAX_SLOTS], out_index[MAX_SLOTS];
    float scale[MAX_SLOTS];
    bool gather, scatter, scaled;
    float *a, *bias, *before;
    float *w[FIXTURE_MAX_GROUPS];
    kernel_matrix *matrices[FIXTURE_MAX_GROUPS];
    kernel_ref a_ref, bias_ref, out_ref;
} product;

static dtype output_type(const product *p) {
    bool act = p->epilogue == KERNEL_EPILOGUE_ACT || p->epilogue == KERNEL_EPILOGUE_SWIGLU;
    return act ? p->f->compute : DTYPE_F32;
}

static void shuffle(int32_t *list, size_t n) {
    for (size_t i = n; i > 1; i--) {
        size_t j = (size_t)fixture_below((int)i);
        int32_t swap = list[i - 1];
        list[i - 1] = list[j];
        list[j] = swap;
    }
}

static void make_product(product *p) {
    const fixture *f = p->f;
    bool swiglu = p->epilogue == KERNEL_EPILOGUE_SWIGLU;
    p->slots = 0;
    for (size_t g = 0; g < p->n_groups; g++)
        p->slots += (size_t)p->group_rows[g];
    assert_true(p->slots <= MAX_SLOTS);
    p->a_rows = p->gather ? 7 : p->slots;
    p->out_rows = p->slots + (p->scatter ? 3 : 0);
    p->out_columns = swiglu ? p->n / 2 : p->n;
    int32_t rows[MAX_SLOTS + 3];
    for (size_t i = 0; i < p->out_rows; i++)
        rows[i] = (int32_t)i;
    shuffle(rows, p->out_rows);
    for (size_t s = 0; s < p->slots; s++) {
        p->a_index[s] = fixture_below((int)p->a_rows);
        // Only ADD may name one row twice.
        p->out_index[s] = p->epilogue == KERNEL_EPILOGUE_ADD ? fixture_below(3) : rows[s];
        p->scale[s] = fixture_uniform();
    }
    p->a = fixture_values(f->compute, p->a_rows * p->k, 1);
    p->bias = fixture_values(DTYPE_F32, p->n, 1);
    p->before = fixture_values(DTYPE_F32, p->out_rows * p->out_columns, 1);
    p->a_ref = fixture_upload(f, f->compute, p->a, p->a_rows * p->k);
    p->out_ref = fixture_upload(f, output_type(p), p->before, p->out_rows * p->out_columns);
    if (p->n_groups == 1 && !swiglu)
        p->bias_ref = fixture_upload(f, DTYPE_F32, p->bias, p->n);
    for (size_t g = 0; g < p->n_groups; g++) {
        p->w[g] = fixture_values(f->compute, p->n * p->k, 1);
        p->matrices[g] = fixture_matrix(f, p->n, p->k, swiglu, p->w[g]);
    }
}

static void free_product(product *p) {
    for (size_t g = 0; g < p->n_groups; g++) {
        kernel_matrix_free(p->matrices[g]);
        free(p->w[g]);
    }
    kernel_mem_free(p->a_ref.mem);
    kernel_mem_free(p->bias_ref.mem);
    kernel_mem_free(p->out_ref.mem);
    free(p->a);
    free(p->bias);
    free(p->before);
}

static kernel_gemm_args args_of(const product *p, kernel_gemm_report *report) {
    return (kernel_gemm_args){
        .n_groups = p->n_groups,
        .group_rows = p->group_rows,
        .matrices = (const kernel_matrix *const *)p->matrices,
        .a = p->a_ref,
        .a_index = p->gather ? p->a_index : NULL,
        .bias = p->bias_ref,
        .scale = p->scaled ? p->scale : NULL,
        .epilogue = p->epilogue,
        .out = p->out_ref,
        .out_index = p->scatter ? p->out_index : NULL,
        .report = report,
    };
}

// The sum of one output feature, and the sum of its terms' sizes for the tolerance.
static double sum_of(const product *p, size_t g, size_t slot, size_t feature, double *size) {
    size_t row = p->gather ? (size_t)p->a_index[slot] : slot;
    double sum = 0;
    *size = 1e-6;
    for (size_t j = 0; j < p->k; j++) {
        double term = (double)p->a[row * p->k + j] * (double)p->w[g][feature * p->k + j];
        sum += term;
        *size += fabs(term);
    }
    if (p->bias_ref.mem)
        sum += (double)p->bias[feature];
    return sum;
}

static void check_product(const product *p) {
    size_t cells = p->out_rows * p->out_columns, slot = 0;
    double *want = fixture_alloc(cells, sizeof *want), *slack = fixture_alloc(cells, sizeof *slack);
    bool *written = fixture_alloc(cells, sizeof *written);
    bool adds = p->epilogue == KERNEL_EPILOGUE_ADD;
    for (size_t i = 0; adds && i < cells; i++)
        want[i] = (double)p->before[i];
    for (size_t g = 0; g < p->n_groups; g++)
        for (int r = 0; r < p->group_rows[g]; r++, slot++) {
            size_t row = p->scatter ? (size_t)p->out_index[slot] : slot;
            for (size_t c = 0; c < p->out_columns; c++) {
                double size, up_size, y = sum_of(p, g, slot, c, &size);
                size_t at = row * p->out_columns + c;
                written[at] = true;
                if (p->epilogue == KERNEL_EPILOGUE_SWIGLU) {
                    double up = sum_of(p, g, slot, p->n / 2 + c, &up_size);
                    slack[at] = 2e-6 * (size * fabs(up) + up_size * fabs(y) + 1);
                    y = y / (1 + exp(-y)) * up;
                } else if (p->epilogue == KERNEL_EPILOGUE_SIGMOID) {
                    slack[at] = 1e-6 * (size + 1);
                    y = 1 / (1 + exp(-y));
                } else {
                    slack[at] += 1e-6 * size;
                }
                want[at] = adds ? want[at] + (p->scaled ? (double)p->scale[slot] : 1) * y : y;
            }
        }
    for (size_t i = 0; i < cells; i++) {
        double got = (double)fixture_get(p->out_ref, output_type(p), i);
        if (!written[i] && !adds)
            continue;
        fixture_near("product", got, want[i], slack[i] + fixture_rounding(output_type(p), want[i]));
    }
    for (size_t i = 0; i < cells; i++)
        if (!written[i]) {
            float kept = p->before[i];
            if (output_type(p) == DTYPE_BF16)
                kept = bf16_to_f32(f32_to_bf16(kept));
            assert_true(fixture_get(p->out_ref, output_type(p), i) == kept);
        }
    free(want);
    free(slack);
    free(written);
}

static const kernel_epilogue epilogues[] = {KERNEL_EPILOGUE_F32, KERNEL_EPILOGUE_ACT,
                                            KERNEL_EPILOGUE_ADD, KERNEL_EPILOGUE_SWIGLU,
                                            KERNEL_EPILOGUE_SIGMOID};
enum { N_EPILOGUES = sizeof epilogues / sizeof *epilogues };

static void run_product(product *p) {
    kernel_gemm_report report = {99, 99, 99};
    size_t active = 0;
    make_product(p);
    kernel_gemm_args args = args_of(p, &report);
    assert_int_equal(kernel_gemm(p->f->queue, &args), 0);
    check_product(p);
    for (size_t g = 0; g < p->n_groups; g++)
        active += p->group_rows[g] > 0;
    assert_int_equal(report.active_groups, active);
    assert_true(report.tiles >= active && report.tiles <= p->slots);
    assert_true(report.padded_rows < report.tiles * 32);
    free_product(p);
}

static void dense_shapes(fixture *f) {
    static const size_t sizes[][3] = {{1, 1, 1},     {2, 16, 2},   {3, 17, 3},   {4, 64, 5},
                                      {5, 65, 32},   {6, 100, 33}, {7, 130, 64}, {8, 48, 129},
                                      {9, 200, 96},  {13, 34, 31}, {33, 66, 70}, {64, 32, 16},
                                      {11, 333, 257}}; // the last is worth several threads
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t e = 0; e < N_EPILOGUES; e++) {
            bool swiglu = epilogues[e] == KERNEL_EPILOGUE_SWIGLU;
            product p = {.f = f,
                         .epilogue = epilogues[e],
                         .n_groups = 1,
                         .group_rows = {(int32_t)sizes[i][0]},
                         .n = swiglu ? 2 * sizes[i][1] : sizes[i][1],
                         .k = sizes[i][2],
                         .gather = i % 2,
                         .scatter = i % 3 == 1};
            run_product(&p);
        }
}

static void grouped_shapes(fixture *f) {
    static const int32_t histograms[][6] = {{0, 3, 0, 1, 7, 0},  {1, 1, 1, 1, 1, 1},
                                            {40, 0, 0, 2, 0, 1}, {0, 0, 0, 0, 0, 5},
                                            {5, 6, 7, 8, 9, 10}, {0, 13, 2, 0, 17, 4}};
    for (size_t i = 0; i < sizeof histograms / sizeof *histograms; i++)
        for (size_t e = 0; e < N_EPILOGUES; e++) {
            product p = {.f = f,
                         .epilogue = epilogues[e],
                         .n_groups = 6,
                         .n = i % 2 ? 74 : 226,
                         .k = i % 2 ? 40 : 137,
                         .gather = true,
                         .scatter = true,
                         .scaled = epilogues[e] == KERNEL_EPILOGUE_ADD};
            memcpy(p.group_rows, histograms[i], sizeof histograms[i]);
            run_product(&p);
        }
}

// A row's result has the same bits alone and among others, whatever the tiles.
static void batch_invariance(fixture *f) {
    for (size_t e = 0; e < N_EPILOGUES; e++)
        for (int32_t rows = 2; rows <= 19; rows += e == 0 ? 1 : 5) {
            product p = {.f = f,
                         .epilogue = epilogues[e],
                         .n_groups = 1,
                         .group_rows = {rows},
                         .n = rows % 2 ? 98 : 290,
                         .k = rows % 2 ? 67 : 181};
            make_product(&p);
            kernel_gemm_args args = args_of(&p, NULL);
            assert_int_equal(kernel_gemm(f->queue, &args), 0);
            size_t bytes = p.out_columns * dtype_bytes(output_type(&p));
            int32_t one = 1;
            for (int32_t r = 0; r < rows; r++) {
                kernel_ref alone = fixture_upload(
                    f, output_type(&p), p.before + (size_t)r * p.out_columns, p.out_columns);
                args.group_rows = &one;
                args.a_index = &r;
                args.out = alone;
                assert_int_equal(kernel_gemm(f->queue, &args), 0);
                assert_memory_equal(fixture_host(alone),
                                    (uint8_t *)fixture_host(p.out_ref) + (size_t)r * bytes, bytes);
                kernel_mem_free(alone.mem);
            }
            free_product(&p);
        }
}

static uint16_t f32_to_f16_exact(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (!(bits & 0x7fffffffu))
        return 0;
    return (uint16_t)((bits >> 16 & 0x8000u) | ((bits >> 23 & 0xffu) - 112) << 10 |
                      (bits >> 13 & 0x3ffu));
}

// Sources of every type, in pieces at odd rows and unaligned addresses, read back by the embedding.
static void sources_and_embed(fixture *f) {
    enum { N = 83, K = 45 };
    float values[N * K], rounded[N * K];
    uint8_t bytes[N * K * 4 + 1];
    for (int type = 0; type < DTYPE_COUNT; type++) {
        size_t size = dtype_bytes((dtype)type);
        for (size_t i = 0; i < N * K; i++) {
            // 9 bits: exact in f16, a tie or more in bf16.
            values[i] = (float)(fixture_below(1023) - 511) / 256;
            rounded[i] = f->compute == DTYPE_BF16 ? bf16_to_f32(f32_to_bf16(values[i])) : values[i];
            uint16_t half =
                type == DTYPE_F16 ? f32_to_f16_exact(values[i]) : f32_to_bf16(values[i]);
            if (type == DTYPE_BF16)
                rounded[i] = bf16_to_f32(half);
            memcpy(bytes + 1 + i * size, type == DTYPE_F32 ? (void *)&values[i] : (void *)&half,
                   size);
        }
        kernel_matrix *m = NULL;
        error err;
        assert_int_equal(kernel_matrix_create(f->backend, N, K, false, &m, &err), 0);
        for (size_t row = 0, rows; row < N; row += rows) {
            rows = row + 19 < N ? 19 : N - row;
            tensor_view view = {bytes + 1 + row * K * size, (dtype)type, 2, {rows, K}};
            assert_int_equal(kernel_matrix_load(m, &view, row, KERNEL_PART_WHOLE, &err), 0);
        }
        int32_t ids[N];
        for (int32_t i = 0; i < N; i++)
            ids[i] = i * 7 % N;
        kernel_ref x = fixture_memory(f, sizeof values);
        kernel_embed_args args = {N, ids, m, x};
        assert_int_equal(kernel_embed(f->queue, &args), 0);
        for (int32_t i = 0; i < N; i++)
            assert_memory_equal((float *)fixture_host(x) + i * K, rounded + ids[i] * K,
                                K * sizeof(float));
        ids[3] = N;
        assert_int_equal(kernel_embed(f->queue, &args), E_INVALID);
        ids[3] = -1;
        assert_int_equal(kernel_embed(f->queue, &args), E_INVALID);
        kernel_mem_free(x.mem);
        kernel_matrix_free(m);
    }
}

// Numbers that overflow or are none stay in their row and crash nothing.
static void strange_numbers(fixture *f) {
    product p = {.f = f,
                 .epilogue = KERNEL_EPILOGUE_SWIGLU,
                 .n_groups = 1,
                 .group_rows = {5},
                 .n = 64,
                 .k = 33};
    make_product(&p);
    static const float strange[] = {NAN, INFINITY, -INFINITY, 3e38f};
    for (size_t i = 0; i < 4; i++)
        for (size_t j = 0; j < p.k; j++)
            if (f->compute == DTYPE_F32)
                ((float *)fixture_host(p.a_ref))[i * p.k + j] = strange[i];
            else
                ((uint16_t *)fixture_host(p.a_ref))[i * p.k + j] = f32_to_bf16(strange[i]);
    kernel_gemm_args args = args_of(&p, NULL);
    assert_int_equal(kernel_gemm(f->queue, &args), 0);
    for (size_t c = 0; c < p.out_columns; c++) {
        assert_true(isnan(fixture_get(p.out_ref, f->compute, c)));
        assert_true(isfinite(fixture_get(p.out_ref, f->compute, 4 * p.out_columns + c)));
    }
    free_product(&p);
}

static void refused_arguments(fixture *f) {
    product p = {.f = f,
                 .epilogue = KERNEL_EPILOGUE_F32,
                 .n_groups = 2,
                 .group_rows = {2, 3},
                 .n = 20,
                 .k = 10};
    make_product(&p);
    kernel_gemm_args good = args_of(&p, NULL), args = good;
    args.out.offset = 8;
    assert_int_equal(kernel_gemm(f->queue, &args), E_INVALID);
    args = good;
    args.a_index = (const int32_t[]){0, 1, 2, 5, 0};
    assert_int_equal(kernel_gemm(f->queue, &args), E_INVALID);
    args = good;
    args.out_index = (const int32_t[]){0, 1, 2, -3, 0};
    assert_int_equal(kernel_gemm(f->queue, &args), E_INVALID);
    args = good;
    args.epilogue = KERNEL_EPILOGUE_SWIGLU;
    assert_int_equal(kernel_gemm(f->queue, &args), E_INVALID);
    args = good;
    args.group_rows = (const int32_t[]){2, -1};
    assert_int_equal(kernel_gemm(f->queue, &args), E_INVALID);
    args.group_rows = (const int32_t[]){2, FIXTURE_MAX_ROWS};
    assert_int_equal(kernel_gemm(f->queue, &args), E_TOO_LARGE);
    args = good;
    args.n_groups = FIXTURE_MAX_GROUPS + 1;
    assert_int_equal(kernel_gemm(f->queue, &args), E_TOO_LARGE);
    args = good;
    args.group_rows = (const int32_t[]){0, 0};
    assert_int_equal(kernel_gemm(f->queue, &args), 0);
    free_product(&p);

    error err;
    kernel_matrix *m = NULL;
    assert_int_equal(kernel_matrix_create(f->backend, 33, 4, true, &m, &err), E_INVALID);
    assert_int_equal(kernel_matrix_create(f->backend, 0, 4, false, &m, &err), E_INVALID);
    assert_int_equal(kernel_matrix_create(f->backend, 34, 4, true, &m, &err), 0);
    float source[34 * 4] = {0};
    tensor_view view = {source, DTYPE_F32, 2, {17, 4}};
    assert_int_equal(kernel_matrix_load(m, &view, 0, KERNEL_PART_WHOLE, &err), E_INVALID);
    assert_int_equal(kernel_matrix_load(m, &view, 1, KERNEL_PART_UP, &err), E_INVALID);
    view.dims[1] = 3;
    assert_int_equal(kernel_matrix_load(m, &view, 0, KERNEL_PART_UP, &err), E_INVALID);
    kernel_matrix_free(m);
}

#define EACH(test)                                                                                 \
    static void test_##test(void **state) {                                                        \
        (void)state;                                                                               \
        fixture_each(test);                                                                        \
    }
EACH(dense_shapes)
EACH(grouped_shapes)
EACH(batch_invariance)
EACH(sources_and_embed)
EACH(strange_numbers)
EACH(refused_arguments)

static void test_devices(void **state) {
    (void)state;
    static const struct {
        const char *device;
        int code;
    } cases[] = {{"cpu", 0},
                 {"cpu:ref", 0},
                 {"cpu:sse9", E_INVALID},
                 {"gpu", E_INVALID},
                 {"", E_INVALID},
                 {"cuda:0", E_UNSUPPORTED},
                 {"emulated", E_UNSUPPORTED}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kernel_backend_args args = {cases[i].device, 1, DTYPE_BF16, 8, 8};
        kernel_backend *backend = NULL;
        error err = {0};
        assert_int_equal(kernel_backend_open(&args, &backend, &err), cases[i].code);
        if (cases[i].code)
            assert_non_null(strstr(err.text, "attention.device"));
        else
            printf("%s: %s\n", cases[i].device, kernel_backend_describe(backend));
        kernel_backend_close(backend);
        args.threads = 0;
        assert_int_equal(kernel_backend_open(&args, &backend, &err), E_INVALID);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_devices),           cmocka_unit_test(test_dense_shapes),
        cmocka_unit_test(test_grouped_shapes),    cmocka_unit_test(test_batch_invariance),
        cmocka_unit_test(test_sources_and_embed), cmocka_unit_test(test_strange_numbers),
        cmocka_unit_test(test_refused_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
