// isa_amx.c: the bf16 matrix product on AMX tiles; everything else is that of isa_avx512.c.
//
// TDPBF16PS multiplies 16 rows of 32 activations with a tile of 32 weights by 16 columns; a panel's
// (k / 2, width, 2) layout is already that of such tiles, 16 pairs of k high. Every row count goes
// through the same instructions in the same order of k, so the bits of a row do not depend on the
// tile. Rows are gathered into a block of tiles in the nearest cache, a few chunks of k at a time;
// missing rows are zero, and their results are dropped by the caller.
#include "kernels/cpu/cpu.h"

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    TILE_ROWS = 16,
    TILE_BYTES = 1024,
    ROW_BYTES = 64,
    CHUNK_K = 32,     // of one tile product
    BLOCK_CHUNKS = 4, // chunks that are gathered at a time
    Y_BYTES = CPU_PANEL * sizeof(float),
};

// Tiles 0..3 hold sums, 4..7 operands; all are full.
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

static const tile_config full_tiles = {
    .palette = 1,
    .row_bytes = {ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES,
                  ROW_BYTES},
    .rows = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS,
             TILE_ROWS},
};

static void enter(void) {
    _tile_loadconfig(&full_tiles);
}

// Tile registers in their initial state make context switches cheap.
static void leave(void) {
    _tile_release();
}

// Activations of up to 32 rows: chunk c of rows 0..15 in tiles[c][0], of 16..31 in tiles[c][1].
typedef struct gathered {
    _Alignas(64) uint8_t tiles[BLOCK_CHUNKS][2][TILE_BYTES];
    _Alignas(64) uint8_t tail[TILE_ROWS][Y_BYTES]; // the last weights of a k that is no multiple
} gathered;

// The tile intrinsics do not tell the compiler what memory they read: what was written for them
// must be in memory first.
static inline void publish(void) {
    __asm__ volatile("" ::: "memory");
}

static void gather_rows(const void *const *a, int rows, size_t k0, size_t k_end, gathered *g) {
    for (int r = 0; r < rows; r++) {
        const uint16_t *row = a[r];
        uint8_t *to = g->tiles[0][r / TILE_ROWS] + r % TILE_ROWS * ROW_BYTES;
        for (size_t j = k0; j < k_end; j += CHUNK_K, to += 2 * TILE_BYTES) {
            __mmask32 mask = k_end - j < CHUNK_K ? (1u << (k_end - j)) - 1 : ~0u;
            _mm512_store_si512(to, _mm512_maskz_loadu_epi16(mask, row + j));
        }
    }
    publish();
}

// The weights of the chunk at k0, and their stride; those beyond k are zero.
static const uint8_t *chunk_weights(const uint8_t *weights, size_t k0, size_t k, size_t *stride,
                                    int vectors, gathered *g) {
    const uint8_t *at = weights + k0 / 2 * *stride;
    if (k0 + CHUNK_K <= k)
        return at;
    size_t pairs = (k - k0 + 1) / 2;
    memset(g->tail, 0, sizeof g->tail);
    for (size_t p = 0; p < pairs; p++)
        memcpy(g->tail[p], at + p * *stride, (size_t)vectors * ROW_BYTES);
    publish();
    *stride = Y_BYTES;
    return g->tail[0];
}

// Weights come from memory once and in order: fetching them this far ahead reaches the bandwidth
// that the hardware's prefetchers alone do not (76 against 92% of it).
static void fetch_ahead(const uint8_t *w, size_t stride, int vectors) {
    for (size_t p = 0; p < TILE_ROWS; p++)
        for (int v = 0; v < vectors; v++)
            _mm_prefetch((const char *)w + CPU_FETCH_AHEAD + p * stride + v * ROW_BYTES,
                         _MM_HINT_T0);
}

static void multiply_16(const uint8_t *a, const uint8_t *w, size_t stride, int vectors) {
    _tile_loadd(4, a, ROW_BYTES);
    _tile_loadd(5, w, stride);
    _tile_dpbf16ps(0, 4, 5);
    if (vectors > 1) {
        _tile_loadd(6, w + ROW_BYTES, stride);
        _tile_dpbf16ps(1, 4, 6);
    }
    if (vectors > 2) {
        _tile_loadd(7, w + 2 * ROW_BYTES, stride);
        _tile_dpbf16ps(2, 4, 7);
    }
    if (vectors > 3) {
        _tile_loadd(5, w + 3 * ROW_BYTES, stride);
        _tile_dpbf16ps(3, 4, 5);
    }
}

static void multiply_32(const uint8_t *a, const uint8_t *w, size_t stride, int vectors) {
    _tile_loadd(4, a, ROW_BYTES);
    _tile_loadd(5, a + TILE_BYTES, ROW_BYTES);
    _tile_loadd(6, w, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (vectors > 1) {
        _tile_loadd(7, w + ROW_BYTES, stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
}

static void clear_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// The next panel comes into the second cache while this one is multiplied, a few lines per chunk.
typedef struct fetcher {
    const char *at, *end;
    size_t bytes; // per chunk
} fetcher;

static fetcher fetch_next(const gemm_tile *t, size_t columns_of_chunks) {
    size_t chunks = (t->k + CHUNK_K - 1) / CHUNK_K * columns_of_chunks;
    const char *at = t->next;
    if (!at)
        return (fetcher){0};
    return (fetcher){at, at + t->next_bytes, round_up(t->next_bytes / chunks + 1, ROW_BYTES)};
}

static void fetch_lines(fetcher *f) {
    const char *end = (size_t)(f->end - f->at) <= f->bytes ? f->end : f->at + f->bytes;
    for (; f->at < end; f->at += ROW_BYTES)
        _mm_prefetch(f->at, _MM_HINT_T1);
}

static void tile_16(const gemm_tile *t, gathered *g) {
    size_t stride = t->width * 2 * sizeof(uint16_t);
    fetcher next = fetch_next(t, 1);
    clear_sums();
    for (size_t block = 0; block < t->k; block += BLOCK_CHUNKS * CHUNK_K) {
        size_t end = block + BLOCK_CHUNKS * CHUNK_K < t->k ? block + BLOCK_CHUNKS * CHUNK_K : t->k;
        gather_rows(t->a, t->rows, block, end, g);
        for (size_t j = block, c = 0; j < end; j += CHUNK_K, c++) {
            size_t chunk_stride = stride;
            const uint8_t *w = chunk_weights(t->weights, j, t->k, &chunk_stride, t->vectors, g);
            fetch_lines(&next);
            fetch_ahead(w, chunk_stride, t->vectors);
            multiply_16(g->tiles[c][0], w, chunk_stride, t->vectors);
        }
    }
    _tile_stored(0, t->y, Y_BYTES);
    if (t->vectors > 1)
        _tile_stored(1, t->y + CPU_VECTOR, Y_BYTES);
    if (t->vectors > 2)
        _tile_stored(2, t->y + 2 * CPU_VECTOR, Y_BYTES);
    if (t->vectors > 3)
        _tile_stored(3, t->y + 3 * CPU_VECTOR, Y_BYTES);
}

// Sums of 32 rows and two vectors of columns, kept in y between blocks of k: the gathered rows
// serve all columns of the tile, and the weights are read in order.
static void load_sums(const float *y, int vectors) {
    _tile_loadd(0, y, Y_BYTES);
    _tile_loadd(2, y + TILE_ROWS * CPU_PANEL, Y_BYTES);
    if (vectors > 1) {
        _tile_loadd(1, y + CPU_VECTOR, Y_BYTES);
        _tile_loadd(3, y + TILE_ROWS * CPU_PANEL + CPU_VECTOR, Y_BYTES);
    }
}

static void store_sums(float *y, int vectors) {
    _tile_stored(0, y, Y_BYTES);
    _tile_stored(2, y + TILE_ROWS * CPU_PANEL, Y_BYTES);
    if (vectors > 1) {
        _tile_stored(1, y + CPU_VECTOR, Y_BYTES);
        _tile_stored(3, y + TILE_ROWS * CPU_PANEL + CPU_VECTOR, Y_BYTES);
    }
}

static void tile_32(const gemm_tile *t, gathered *g) {
    size_t stride = t->width * 2 * sizeof(uint16_t);
    fetcher next = fetch_next(t, (size_t)(t->vectors + 1) / 2);
    for (size_t block = 0; block < t->k; block += BLOCK_CHUNKS * CHUNK_K) {
        size_t end = block + BLOCK_CHUNKS * CHUNK_K < t->k ? block + BLOCK_CHUNKS * CHUNK_K : t->k;
        gather_rows(t->a, t->rows, block, end, g);
        for (int v = 0; v < t->vectors; v += 2) {
            const uint8_t *weights = (const uint8_t *)t->weights + v * ROW_BYTES;
            int n = t->vectors - v < 2 ? 1 : 2;
            if (block)
                load_sums(t->y + v * CPU_VECTOR, n);
            else
                clear_sums();
            for (size_t j = block, c = 0; j < end; j += CHUNK_K, c++) {
                size_t chunk_stride = stride;
                const uint8_t *w = chunk_weights(weights, j, t->k, &chunk_stride, n, g);
                fetch_lines(&next);
                multiply_32(g->tiles[c][0], w, chunk_stride, n);
            }
            store_sums(t->y + v * CPU_VECTOR, n);
        }
    }
}

static void multiply(const gemm_tile *t) {
    gathered g;
    if (t->rows % TILE_ROWS)
        memset(g.tiles, 0, sizeof g.tiles);
    if (t->rows <= TILE_ROWS)
        tile_16(t, &g);
    else
        tile_32(t, &g);
}

// Measured on one core (tests/bench/NOTES.md): 16 GB/s from memory, about 1 TFLOP/s from the cache.
static const tile_shape shapes[] = {{16, 125, 32}, {32, 130, 61}};

// By CPUID itself: not every compiler's __builtin_cpu_supports knows these names.
static bool has_tiles(void) {
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & AMX_BF16 && d & AMX_TILE;
}

// The kernel grants tile registers to a process that asks; it refuses where they are missing or a
// signal stack is too small for them.
static bool ask_for_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

bool cpu_isa_amx(dtype compute, cpu_isa *out) {
    if (compute != DTYPE_BF16 || !cpu_isa_avx512(compute, out))
        return false;
    if (!has_tiles() || !ask_for_tiles())
        return false;
    out->name = "amx";
    out->n_shapes = sizeof shapes / sizeof *shapes;
    out->shapes = shapes;
    out->gemm_tile = multiply;
    out->enter = enter;
    out->leave = leave;
    return true;
}
