/* The way of any processor: rows and keys of float32 in vectors, bf16 widened. */
#ifndef STREAMKV_ATTENTION_VECTOR_H
#define STREAMKV_ATTENTION_VECTOR_H

#include "attention_tile.h"

#define ROWS 6 /* 6 rows x 4 vectors of sums fill 24 of 32 registers */

/* Turned keys of one entry, transposed: keys [dim][BLOCK]; slots that do not exist are 0. */
static void pack_keys(const Attention *a, int64_t base, int64_t first, int64_t end, const float *cos,
                      const float *sin, float *keys) {
    const int64_t dim = a->head_dim;
    float turned[16 * MAX_HEAD_DIM];
    for (int64_t j = 0; j < BLOCK; j += 16) {
        if (j >= end || j + 16 <= first) continue; /* a row never sees these */
        for (int64_t i = 0; i < 16; i++) {
            if (j + i >= first && j + i < end)
                turn(a->pool, base + (j + i) * dim, (int)a->kv_type, cos, sin, a->rotary_half, dim, 1.0f,
                     turned + i * dim);
            else memset(turned + i * dim, 0, dim * sizeof(float));
        }
        for (int64_t k = 0; k < dim; k += 16) {
            vec r[16];
            for (int i = 0; i < 16; i++) r[i] = load_f32(turned + i * dim + k);
            transpose16(r);
            for (int i = 0; i < 16; i++) store_f32(keys + (k + i) * BLOCK + j, r[i]);
        }
    }
}

/* Where float32 values of an entry lie; bf16 ones are widened first. */
static const float *widen_values(const Attention *a, int64_t base, int64_t first, int64_t end,
                                 float *values) {
    if (a->kv_type == FLOAT32) return (const float *)a->pool + base;
    for (int64_t at = first * a->head_dim; at < end * a->head_dim; at += LANES)
        store_f32(values + at, load(a->pool, base + at, BFLOAT16));
    return values;
}

/* Scores of ROWS rows against slots [16 v0, 16 v1) of the packed keys. */
#define SCORE(V0, V1)                                                                                        \
    {                                                                                                        \
        vec sums[ROWS][V1 - V0];                                                                             \
        for (int r = 0; r < ROWS; r++)                                                                       \
            for (int v = 0; v < V1 - V0; v++) sums[r][v] = (vec){0};                                         \
        for (int64_t k = 0; k < dim; k++) {                                                                  \
            vec key[V1 - V0];                                                                                \
            for (int v = 0; v < V1 - V0; v++) key[v] = load_f32(keys + k * BLOCK + (v + V0) * LANES);        \
            for (int r = 0; r < ROWS; r++)                                                                   \
                for (int v = 0; v < V1 - V0; v++)                                                            \
                    sums[r][v] = more(sums[r][v], splat(rows[r * dim + k]), key[v]);                         \
        }                                                                                                    \
        for (int r = 0; r < ROWS; r++)                                                                       \
            for (int v = 0; v < V1 - V0; v++) store_f32(scores + r * BLOCK + (v + V0) * LANES, sums[r][v]);  \
    }
INLINE void score_rows(const float *rows, const float *keys, int64_t dim, int v0, int v1, float *scores) {
    if (v1 - v0 > 2) SCORE(0, 4)
    else
        for (int v = v0; v < v1; v++) switch (v) {
            case 0: SCORE(0, 1) break;
            case 1: SCORE(1, 2) break;
            case 2: SCORE(2, 3) break;
            default: SCORE(3, 4)
        }
}

/* out += weights . values over slots [low, high). */
#define MIX(VECS)                                                                                            \
    {                                                                                                        \
        vec sums[ROWS][VECS];                                                                                \
        for (int r = 0; r < ROWS; r++)                                                                       \
            for (int v = 0; v < VECS; v++)                                                                   \
                sums[r][v] = load_f32(out + r * dim + k + v * LANES) * shrink[r];                            \
        for (int64_t j = low; j < high; j++) {                                                               \
            vec value[VECS];                                                                                 \
            for (int v = 0; v < VECS; v++) value[v] = load_f32(values + j * dim + k + v * LANES);            \
            for (int r = 0; r < ROWS; r++)                                                                   \
                for (int v = 0; v < VECS; v++)                                                               \
                    sums[r][v] = more(sums[r][v], splat(weights[r * BLOCK + j]), value[v]);                  \
        }                                                                                                    \
        for (int r = 0; r < ROWS; r++)                                                                       \
            for (int v = 0; v < VECS; v++) store_f32(out + r * dim + k + v * LANES, sums[r][v]);             \
    }
INLINE void mix_rows(const float *weights, const float *values, const float *shrink, int64_t dim, int64_t low,
                     int64_t high, float *out) {
    int64_t k = 0;
    for (; k + 4 * LANES <= dim; k += 4 * LANES) MIX(4)
    for (; k + 2 * LANES <= dim; k += 2 * LANES) MIX(2)
    for (; k < dim; k += LANES) MIX(1)
}

static void vector_pass(const Attention *a, Tile *t, const float *rows, const float *values) {
    const int64_t dim = a->head_dim;
    float scores[ROWS * BLOCK], shrink[LANES];
    for (int64_t row = 0; row < t->padded; row += ROWS) {
        int64_t low, high;
        const int same = together(t, row, ROWS, &low, &high);
        if (low >= high) continue;
        const int narrow = (high + 15) / 16 - low / 16 <= 2;
        const int v0 = narrow ? (int)(low / 16) : 0, v1 = narrow ? (int)((high + 15) / 16) : 4;
        score_rows(rows + row * dim, t->keys, dim, v0, v1, scores);
        weigh(t, row, ROWS, scores, 1.0f, v0, v1, same && low == v0 * 16 && high == v1 * 16, shrink);
        mix_rows(scores, values, shrink, dim, low, high, t->out + row * dim);
    }
}

#endif
