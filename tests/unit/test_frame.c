// Frames: the layout's alignment and limits, and every field that frame_check refuses.
#include "engine/frame.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

static const frame_expect expect = {.plan_hash = 0x1122334455667788ull,
                                    .hidden = 100,
                                    .top_k = 4,
                                    .max_rows = 64,
                                    .n_layers = 6,
                                    .n_lanes = 2,
                                    .wire = DTYPE_BF16};

static frame_header good_header(int kind, uint32_t rows) {
    return (frame_header){.magic = FRAME_MAGIC,
                          .version = FRAME_VERSION,
                          .kind = (uint16_t)kind,
                          .plan_hash = expect.plan_hash,
                          .epoch = 3,
                          .step = 1,
                          .members = 1,
                          .lane = 1,
                          .layer = 5,
                          .top_k = (uint16_t)expect.top_k,
                          .rows = rows,
                          .hidden = (uint32_t)expect.hidden,
                          .dtype = (uint8_t)expect.wire};
}

static size_t payload_bytes(int kind, size_t rows) {
    frame_layout layout;
    assert_int_equal(
        frame_layout_make(kind, rows, expect.top_k, expect.hidden, expect.wire, &layout), E_OK);
    return layout.bytes;
}

static void test_layout_sections(void **state) {
    (void)state;
    static const dtype types[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    for (size_t t = 0; t < 3; t++) {
        for (size_t rows = 0; rows <= 70; rows++) {
            for (size_t top_k = 1; top_k <= 9; top_k++) {
                frame_layout l;
                assert_int_equal(frame_layout_make(FRAME_DISPATCH, rows, top_k, 33, types[t], &l),
                                 E_OK);
                assert_int_equal(l.experts_at, 0);
                assert_int_equal(l.weights_at % 64, 0);
                assert_int_equal(l.rows_at % 64, 0);
                assert_true(l.weights_at >= rows * top_k * 2);
                assert_true(l.weights_at < rows * top_k * 2 + 64);
                assert_true(l.rows_at >= l.weights_at + rows * top_k * 4);
                assert_true(l.rows_at < l.weights_at + rows * top_k * 4 + 64);
                assert_int_equal(l.bytes, l.rows_at + rows * 33 * dtype_bytes(types[t]));

                assert_int_equal(frame_layout_make(FRAME_RETURN, rows, top_k, 33, types[t], &l),
                                 E_OK);
                assert_int_equal(l.rows_at, 0);
                assert_int_equal(l.bytes, rows * 33 * dtype_bytes(types[t]));
            }
        }
    }
}

static void test_layout_limits(void **state) {
    (void)state;
    frame_layout l = {1, 2, 3, 4};
    assert_int_equal(frame_layout_make(0, 1, 1, 1, DTYPE_F32, &l), E_INVALID);
    assert_int_equal(frame_layout_make(3, 1, 1, 1, DTYPE_F32, &l), E_INVALID);
    assert_int_equal(frame_layout_make(FRAME_RETURN, 1, 1, 1, DTYPE_COUNT, &l), E_INVALID);
    // Exactly the limit, and one row of four bytes over it.
    assert_int_equal(frame_layout_make(FRAME_RETURN, FRAME_MAX_BYTES / 4 + 1, 1, 1, DTYPE_F32, &l),
                     E_TOO_LARGE);
    assert_int_equal(l.bytes, 4); // the output is written on success only
    assert_int_equal(frame_layout_make(FRAME_RETURN, FRAME_MAX_BYTES / 4, 1, 1, DTYPE_F32, &l),
                     E_OK);
    assert_int_equal(l.bytes, FRAME_MAX_BYTES);
    // The rows fit and the choices do not; neither fits; the sum of sections does not.
    assert_int_equal(frame_layout_make(FRAME_DISPATCH, (size_t)1 << 20, 1024, 1, DTYPE_BF16, &l),
                     E_TOO_LARGE);
    assert_int_equal(frame_layout_make(FRAME_DISPATCH, SIZE_MAX, SIZE_MAX, SIZE_MAX, DTYPE_F32, &l),
                     E_TOO_LARGE);
    assert_int_equal(frame_layout_make(FRAME_DISPATCH, FRAME_MAX_BYTES / 8, 1, 2, DTYPE_F32, &l),
                     E_TOO_LARGE);
    // Products that wrap to a small number in size_t.
    assert_int_equal(frame_layout_make(FRAME_RETURN, (size_t)1 << 63, 1, 2, DTYPE_F32, &l),
                     E_TOO_LARGE);
    assert_int_equal(
        frame_layout_make(FRAME_RETURN, (size_t)1 << 32, 1, (size_t)1 << 32, DTYPE_F32, &l),
        E_TOO_LARGE);
    assert_int_equal(
        frame_layout_make(FRAME_DISPATCH, (size_t)1 << 33, (size_t)1 << 31, 0, DTYPE_F32, &l),
        E_TOO_LARGE);
}

static void test_check_accepts(void **state) {
    (void)state;
    for (int kind = FRAME_DISPATCH; kind <= FRAME_RETURN; kind++) {
        for (uint32_t rows = 0; rows <= 64; rows += 16) {
            frame_header h = good_header(kind, rows);
            error err = {0};
            assert_int_equal(frame_check(&h, kind, payload_bytes(kind, rows), &expect, &err), E_OK);
        }
    }
}

typedef void (*spoiler)(frame_header *h);
static void bad_magic(frame_header *h) {
    h->magic ^= 1;
}
static void bad_version(frame_header *h) {
    h->version++;
}
static void bad_kind(frame_header *h) {
    h->kind = FRAME_RETURN;
}
static void bad_plan(frame_header *h) {
    h->plan_hash ^= (uint64_t)1 << 63;
}
static void bad_lane(frame_header *h) {
    h->lane = 2;
}
static void bad_layer(frame_header *h) {
    h->layer = 6;
}
static void bad_step(frame_header *h) {
    h->step = 0;
}
static void bad_top_k(frame_header *h) {
    h->top_k = 5;
}
static void bad_hidden(frame_header *h) {
    h->hidden = 101;
}
static void bad_rows(frame_header *h) {
    h->rows = 65;
}
static void bad_rows_huge(frame_header *h) {
    h->rows = UINT32_MAX;
}
static void bad_dtype(frame_header *h) {
    h->dtype = DTYPE_F16;
}
static void bad_flags(frame_header *h) {
    h->flags = 0x80;
}
static void bad_reserved16(frame_header *h) {
    h->reserved16 = 1;
}
static void bad_reserved64(frame_header *h) {
    h->reserved64 = 1;
}

static void test_check_refuses(void **state) {
    (void)state;
    static const struct {
        spoiler spoil;
        const char *word; // in the error's line
    } cases[] = {{bad_magic, "magic"}, {bad_version, "version"},     {bad_kind, "kind"},
                 {bad_plan, "plan"},   {bad_lane, "lane"},           {bad_layer, "layer"},
                 {bad_step, "step"},   {bad_top_k, "top_k"},         {bad_hidden, "hidden"},
                 {bad_rows, "rows"},   {bad_rows_huge, "rows"},      {bad_dtype, "dtype"},
                 {bad_flags, "flags"}, {bad_reserved16, "reserved"}, {bad_reserved64, "reserved"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        frame_header h = good_header(FRAME_DISPATCH, 8);
        cases[i].spoil(&h);
        error err = {0};
        assert_int_equal(
            frame_check(&h, FRAME_DISPATCH, payload_bytes(FRAME_DISPATCH, 8), &expect, &err),
            E_PROTOCOL);
        assert_int_equal(err.code, E_PROTOCOL);
        assert_non_null(strstr(err.text, cases[i].word));
        assert_int_equal(
            frame_check(&h, FRAME_DISPATCH, payload_bytes(FRAME_DISPATCH, 8), &expect, NULL),
            E_PROTOCOL);
    }
}

static void test_check_payload_size(void **state) {
    (void)state;
    size_t right = payload_bytes(FRAME_DISPATCH, 8);
    const size_t wrong[] = {0, 1, right - 1, right + 1, right + 64, SIZE_MAX};
    frame_header h = good_header(FRAME_DISPATCH, 8);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        error err = {0};
        assert_int_equal(frame_check(&h, FRAME_DISPATCH, wrong[i], &expect, &err), E_PROTOCOL);
        assert_non_null(strstr(err.text, "payload"));
    }
    // A limit of the caller that itself is over what a frame can hold.
    frame_expect huge = expect;
    huge.max_rows = UINT32_MAX;
    h.rows = UINT32_MAX;
    error err = {0};
    assert_int_equal(frame_check(&h, FRAME_DISPATCH, right, &huge, &err), E_PROTOCOL);
    assert_non_null(strstr(err.text, "rows"));
}

// The bytes on the wire are fixed: offsets that a peer of another build relies on.
static void test_header_offsets(void **state) {
    (void)state;
    assert_int_equal(offsetof(frame_header, version), 4);
    assert_int_equal(offsetof(frame_header, plan_hash), 8);
    assert_int_equal(offsetof(frame_header, epoch), 16);
    assert_int_equal(offsetof(frame_header, step), 20);
    assert_int_equal(offsetof(frame_header, pass), 24);
    assert_int_equal(offsetof(frame_header, members), 28);
    assert_int_equal(offsetof(frame_header, attention), 30);
    assert_int_equal(offsetof(frame_header, ffn), 32);
    assert_int_equal(offsetof(frame_header, lane), 34);
    assert_int_equal(offsetof(frame_header, layer), 36);
    assert_int_equal(offsetof(frame_header, top_k), 38);
    assert_int_equal(offsetof(frame_header, rows), 40);
    assert_int_equal(offsetof(frame_header, hidden), 44);
    assert_int_equal(offsetof(frame_header, placement), 48);
    assert_int_equal(offsetof(frame_header, dtype), 52);
    assert_int_equal(offsetof(frame_header, flags), 53);
    assert_int_equal(offsetof(frame_header, reserved16), 54);
    assert_int_equal(offsetof(frame_header, reserved64), 56);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout_sections),    cmocka_unit_test(test_layout_limits),
        cmocka_unit_test(test_check_accepts),      cmocka_unit_test(test_check_refuses),
        cmocka_unit_test(test_check_payload_size), cmocka_unit_test(test_header_offsets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
