/* The way of a processor that multiplies tiles of bf16 (AMX): 32 rows against 32 slots at a time. */
#ifndef STREAMKV_ATTENTION_AMX_H
#define STREAMKV_ATTENTION_AMX_H

#include "attention_tile.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__linux__)
#define WITH_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define WITH_AMX 0
#endif

#define AMX_ROWS 32

#if WITH_AMX
typedef struct { uint8_t palette, start, reserved[14]; uint16_t width[16]; uint8_t rows[16]; } TileConfig;

static int amx_allowed(void) { /* the kernel hands out the tiles' state on request only */
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
static void amx_begin(void) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) { config.width[i] = 64; config.rows[i] = 16; }
    _tile_loadconfig(&config);
}
static void amx_end(void) { _tile_release(); }

INLINE __m512i narrow_pair(const float *low, const float *high) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(high), _mm512_loadu_ps(low));
}
INLINE void narrow_row(const float *from, int64_t dim, uint16_t *to) {
    for (int64_t k = 0; k < dim; k += 32) _mm512_storeu_si512(to + k, narrow_pair(from + k, from + k + 16));
}

/* Keys as pairs of elements: [dim / 2][BLOCK] of two bf16 each. */
static void amx_pack_keys(const Attention *a, int64_t base, int64_t first, int64_t end, const float *cos,
                          const float *sin, float *keys) {
    const int64_t dim = a->head_dim;
    float turned[MAX_HEAD_DIM], narrowed[16 * MAX_HEAD_DIM / 2];
    for (int64_t j = 0; j < BLOCK; j += 16) {
        for (int64_t i = 0; i < 16; i++) {
            if (j + i >= first && j + i < end) {
                turn(a->pool, base + (j + i) * dim, BFLOAT16, cos, sin, a->rotary_half, dim, 1.0f, turned);
                narrow_row(turned, dim, (uint16_t *)(narrowed + i * dim / 2));
            } else memset(narrowed + i * dim / 2, 0, dim * 2);
        }
        for (int64_t k = 0; k < dim / 2; k += 16) {
            vec r[16];
            for (int i = 0; i < 16; i++) r[i] = load_f32(narrowed + i * dim / 2 + k);
            transpose16(r);
            for (int i = 0; i < 16; i++) store_f32(keys + (k + i) * BLOCK + j, r[i]);
        }
    }
}

/* Values as pairs of slots: [BLOCK / 2][dim] of two bf16 each. */
static void amx_pack_values(const Attention *a, int64_t base, int64_t first, int64_t end, float *values) {
    const int64_t dim = a->head_dim;
    const uint16_t *from = (const uint16_t *)a->pool + base;
    const __m256i nothing = _mm256_setzero_si256();
    for (int64_t j = 0; j < BLOCK; j += 2)
        for (int64_t k = 0; k < dim; k += 16) {
            const uint16_t *at = from + j * dim + k;
            __m256i even = j >= first && j < end ? _mm256_loadu_si256((const void *)at) : nothing;
            __m256i odd = j + 1 >= first && j + 1 < end ? _mm256_loadu_si256((const void *)(at + dim)) : nothing;
            __m512i pair = _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
            _mm512_storeu_si512(values + j / 2 * dim + k, pair);
        }
}

/* The sums of 32 rows and 32 columns lie in tiles 0 to 3; each step adds 32 products to every sum. */
#define AMX_LOAD(FROM, STRIDE)                                                                               \
    _tile_loadd(0, (FROM), (STRIDE) * 4); _tile_loadd(1, (FROM) + 16, (STRIDE) * 4);                         \
    _tile_loadd(2, (FROM) + 16 * (STRIDE), (STRIDE) * 4); _tile_loadd(3, (FROM) + 16 * (STRIDE) + 16, (STRIDE) * 4)
#define AMX_STORE(TO, STRIDE)                                                                                \
    _tile_stored(0, (TO), (STRIDE) * 4); _tile_stored(1, (TO) + 16, (STRIDE) * 4);                           \
    _tile_stored(2, (TO) + 16 * (STRIDE), (STRIDE) * 4); _tile_stored(3, (TO) + 16 * (STRIDE) + 16, (STRIDE) * 4)
#define AMX_STEP(A, A_STRIDE, B, B_STRIDE)                                                                   \
    _tile_loadd(4, (A), (A_STRIDE) * 2); _tile_loadd(5, (A) + 16 * (A_STRIDE), (A_STRIDE) * 2);              \
    _tile_loadd(6, (B), (B_STRIDE) * 4); _tile_loadd(7, (B) + 16, (B_STRIDE) * 4);                           \
    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7)

static void amx_pass(const Attention *a, Tile *t, const float *tile_rows) {
    const int64_t dim = a->head_dim;
    const float factor = a->scale * 1.44269504f;
    float scores[AMX_ROWS * BLOCK] __attribute__((aligned(64))), shrink[AMX_ROWS];
    uint16_t weights[AMX_ROWS * BLOCK] __attribute__((aligned(64)));
    for (int64_t row = 0; row < t->padded; row += AMX_ROWS) {
        int64_t low, high;
        const int same = together(t, row, AMX_ROWS, &low, &high);
        if (low >= high) continue;
        const int half0 = (int)(low / 32), half1 = (int)((high + 31) / 32);
        const uint16_t *rows = (const uint16_t *)tile_rows + row * dim;
        float *out = t->out + row * dim;
        for (int h = half0; h < half1; h++) {
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
            for (int64_t k = 0; k < dim; k += 32) {
                AMX_STEP(rows + k, dim, t->keys + k / 2 * BLOCK + h * 32, (int64_t)BLOCK);
            }
            AMX_STORE(scores + h * 32, (int64_t)BLOCK);
        }
        /* `same` speaks of [low, high), and vectors are wider where that does not end on one. */
        const int whole = same && low == half0 * 32 && high == half1 * 32;
        weigh(t, row, AMX_ROWS, scores, factor, half0 * 2, half1 * 2, whole, shrink);
        for (int64_t r = 0; r < AMX_ROWS; r++) {
            narrow_row(scores + r * BLOCK + half0 * 32, (half1 - half0) * 32, weights + r * BLOCK + half0 * 32);
            if (shrink[r] == 1.0f) continue;
            for (int64_t k = 0; k < dim; k += LANES)
                store_f32(out + r * dim + k, load_f32(out + r * dim + k) * shrink[r]);
        }
        for (int64_t k = 0; k < dim; k += 32) {
            AMX_LOAD(out + k, dim);
            for (int h = half0; h < half1; h++) {
                AMX_STEP(weights + h * 32, (int64_t)BLOCK, t->values + h * 16 * dim + k, dim);
            }
            AMX_STORE(out + k, dim);
        }
    }
}
#else
static int amx_allowed(void) { return 0; }
#endif

#endif
