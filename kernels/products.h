/* Products of a few rows with a matrix whose rows lie in memory one after another.
 *
 * Reading the matrix is what costs, so what is read of it meets all inputs while it is in registers, and
 * the rows behind are asked for: loops that do so read 25-28 GB/s on two cores where others read 14. Every
 * pair of an input and a row has one sum of 16 lanes, over the width in order: a result has the same bits
 * whatever else is multiplied in the same call, and however the work is cut into tiles.
 *
 * Where weights and inputs are bf16, and the processor multiplies pairs of them (AVX512_BF16), the inputs
 * are rounded to bf16, as torch's are between two operations, and nothing is widened: eight rows take half
 * the time.
 */
#ifndef STREAMKV_PRODUCTS_H
#define STREAMKV_PRODUCTS_H

#include "vectors.h"

/* The sums of a tile must fit the registers: 24 of 32 where one holds a vector; elsewhere it takes several. */
#ifdef __AVX512F__
#define TILE_INPUTS 8
#define TILE_ROWS 3
#define IN_REGISTER(v) __asm__("" : "+v"(v)) /* or it is loaded again for every product: a third slower */
#else
#define TILE_INPUTS 2
#define TILE_ROWS 2
#define IN_REGISTER(v)
#endif
#define ROWS_OF_ONE 4 /* of a tile with one input */
#define PAIRS_OF_BFLOAT16 2 /* beside the types of `vectors.h`: both factors are bf16 */

typedef struct {
    const float *x; /* [num_inputs] rows, each `stride` behind the one before */
    const uint16_t *narrow; /* the same as bf16 bits [num_inputs, width], or NULL; see `narrowed` */
    int64_t num_inputs, stride, width;
    const void *weights; /* [rows, width] */
    const float *bias;   /* [rows] or NULL */
    float *out;          /* result r of input i is at i * out_stride + r */
    int64_t out_stride;
    int add; /* to what is in `out` */
} Product;

INLINE void put(const Product *p, int64_t input, int64_t row, float dot) {
    float *out = p->out + input * p->out_stride + row;
    const float y = dot + (p->bias ? p->bias[row] : 0.0f);
    *out = p->add ? *out + y : y;
}

/* What a tile has summed, by fours: one at a time, adding up lanes takes an eighth of a tile's time. */
INLINE void put_tile(const Product *p, int64_t input, int64_t row, vec (*sums)[ROWS_OF_ONE], int num_inputs,
                     int num_rows) {
    const int count = num_inputs * num_rows;
#define SUM(at) sums[(at) / num_rows][(at) % num_rows]
#pragma GCC unroll 6
    for (int at = 0; at + 4 <= count; at += 4) {
        float dots[4];
        sum4(SUM(at), SUM(at + 1), SUM(at + 2), SUM(at + 3), dots);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) put(p, input + (at + i) / num_rows, row + (at + i) % num_rows, dots[i]);
    }
#pragma GCC unroll 3
    for (int at = count / 4 * 4; at < count; at++)
        put(p, input + at / num_rows, row + at % num_rows, sum(SUM(at)));
#undef SUM
}

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define PAIRS (2 * LANES) /* elements of a vector of bf16 */
#define HAS_PAIRS 1
#else
#define PAIRS 0
#define HAS_PAIRS 0
#endif

/* Inputs as `Product.narrow` has them, in `out`; NULL where there is no use for them. */
INLINE const uint16_t *narrowed(const float *x, int64_t num_inputs, int64_t stride, int64_t width,
                                uint16_t *out) {
#if HAS_PAIRS
    if (width % PAIRS) return NULL;
    for (int64_t i = 0; i < num_inputs; i++)
        for (int64_t k = 0; k < width; k += LANES)
            store(out, i * width + k, load_f32(x + i * stride + k), BFLOAT16);
    return out;
#else
    (void)x, (void)num_inputs, (void)stride, (void)width, (void)out;
    return NULL;
#endif
}

/* The inputs from `input` on with the rows from `row` on, both bf16. */
INLINE void tile_of_pairs(const Product *p, int64_t input, int64_t row, int prefetch, int num_inputs,
                          int num_rows) {
#if HAS_PAIRS
    const int64_t width = p->width;
    const uint16_t *weights = (const uint16_t *)p->weights + row * width, *ahead = weights + num_rows * width;
    const uint16_t *x = p->narrow + input * width;
    vec sums[TILE_INPUTS][ROWS_OF_ONE];
    for (int i = 0; i < num_inputs; i++)
        for (int r = 0; r < num_rows; r++) sums[i][r] = (vec){0};
    for (int64_t k = 0; k < width; k += PAIRS) {
        __m512bh rows[ROWS_OF_ONE];
        if (prefetch)
            for (int r = 0; r < num_rows; r++) ask(ahead + r * width + k);
        for (int r = 0; r < num_rows; r++) memcpy(&rows[r], weights + r * width + k, sizeof rows[r]);
        for (int i = 0; i < num_inputs; i++) {
            __m512i xk;
            memcpy(&xk, x + i * width + k, sizeof xk);
            IN_REGISTER(xk);
            for (int r = 0; r < num_rows; r++)
                sums[i][r] = (vec)_mm512_dpbf16_ps((__m512)sums[i][r], (__m512bh)xk, rows[r]);
        }
    }
    put_tile(p, input, row, sums, num_inputs, num_rows);
#else
    (void)p, (void)input, (void)row, (void)prefetch, (void)num_inputs, (void)num_rows;
#endif
}

/* The inputs from `input` on with the rows from `row` on. */
INLINE void tile(const Product *p, int64_t input, int64_t row, int type, int prefetch, int num_inputs,
                 int num_rows) {
    if (type == PAIRS_OF_BFLOAT16) {
        tile_of_pairs(p, input, row, prefetch, num_inputs, num_rows);
        return;
    }
    const int64_t bytes = type == BFLOAT16 ? 2 : 4, width = p->width, at = row * width;
    const char *ahead = (const char *)p->weights + (at + num_rows * width) * bytes;
    const float *x = p->x + input * p->stride;
    vec sums[TILE_INPUTS][ROWS_OF_ONE];
    for (int i = 0; i < num_inputs; i++)
        for (int r = 0; r < num_rows; r++) sums[i][r] = (vec){0};
    for (int64_t k = 0; k < width; k += LANES) {
        vec rows[ROWS_OF_ONE];
        if (prefetch)
            for (int r = 0; r < num_rows; r++) ask(ahead + (r * width + k) * bytes);
        for (int r = 0; r < num_rows; r++) rows[r] = load(p->weights, at + r * width + k, type);
        for (int i = 0; i < num_inputs; i++) {
            vec xk = load_f32(x + i * p->stride + k);
            IN_REGISTER(xk);
            for (int r = 0; r < num_rows; r++) sums[i][r] = more(sums[i][r], xk, rows[r]);
        }
    }
    put_tile(p, input, row, sums, num_inputs, num_rows);
}

/* All inputs with TILE_ROWS rows, which are read from memory once. */
INLINE void tiles(const Product *p, int64_t row, int type, int prefetch) {
    int64_t input = 0;
    for (; input + TILE_INPUTS <= p->num_inputs; input += TILE_INPUTS)
        tile(p, input, row, type, prefetch && input == 0, TILE_INPUTS, TILE_ROWS);
    prefetch = prefetch && input == 0;
    switch (p->num_inputs - input) { /* loops of known lengths keep their sums in registers */
        case 1: tile(p, input, row, type, prefetch, 1, TILE_ROWS); break;
#if TILE_INPUTS > 2
        case 2: tile(p, input, row, type, prefetch, 2, TILE_ROWS); break;
        case 3: tile(p, input, row, type, prefetch, 3, TILE_ROWS); break;
        case 4: tile(p, input, row, type, prefetch, 4, TILE_ROWS); break;
        case 5: tile(p, input, row, type, prefetch, 5, TILE_ROWS); break;
        case 6: tile(p, input, row, type, prefetch, 6, TILE_ROWS); break;
        case 7: tile(p, input, row, type, prefetch, 7, TILE_ROWS); break;
#endif
    }
}

INLINE void product_typed(const Product *p, int64_t first, int64_t end, int type) {
    int64_t row = first;
    if (p->num_inputs == 1)
        for (; row + ROWS_OF_ONE <= end; row += ROWS_OF_ONE)
            tile(p, 0, row, type, row + 2 * ROWS_OF_ONE <= end, 1, ROWS_OF_ONE);
    else
        for (; row + TILE_ROWS <= end; row += TILE_ROWS) tiles(p, row, type, row + 2 * TILE_ROWS <= end);
    for (; row < end; row++)
        for (int64_t input = 0; input < p->num_inputs; input++) tile(p, input, row, type, 0, 1, 1);
}

/* Results [first, end) of all inputs: W[r] . x (+ bias) (+ what is there). Compiled once, for all calls. */
__attribute__((noinline)) static void product(const Product *p, int64_t first, int64_t end, int64_t type) {
    if (type == BFLOAT16 && p->narrow) product_typed(p, first, end, PAIRS_OF_BFLOAT16);
    else if (type == BFLOAT16) product_typed(p, first, end, BFLOAT16);
    else product_typed(p, first, end, FLOAT32);
}

#endif
