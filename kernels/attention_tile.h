/* What a tile of attention.c is, and the softmax that both of its ways share. */
#ifndef STREAMKV_ATTENTION_TILE_H
#define STREAMKV_ATTENTION_TILE_H

#include "vectors.h"

#define BLOCK 64
#define MAX_HEAD_DIM 256
#define MAX_ROWS 32 /* that are weighed at once */
#define NEVER (-1e30f) /* lower than any score, and finite, so that differences stay numbers */

typedef struct {
    int64_t num_layers, num_q_heads, num_kv_heads, head_dim, rotary_half, kv_type, num_threads;
    float scale;
    void *pool;
} Attention;

typedef struct {
    int64_t layer, num_queries, query_start, window_size, num_entries, num_sink_entries;
    int64_t num_lasting_entries;
    int64_t token_stride, head_stride, tile_queries; /* strides of q, in elements */
    const int64_t *block_ids, *starts, *caps, *first, *end;       /* of each entry */
    const float *near_cos, *near_sin, *capped_cos, *capped_sin;   /* [num_entries, rotary_half] */
    const float *query_cos, *query_sin;                           /* [num_queries, rotary_half] */
    const void *q;
    void *out;  /* [num_queries, num_q_heads, head_dim] */
    float *lse; /* [num_queries, num_q_heads] */
} Queries;

/* What one thread works on. Rows are padded to whole groups; padded rows see nothing. */
typedef struct {
    int64_t head, query, num_queries, num_rows, padded;
    float *near_rows, *capped_rows, *out, *best, *total; /* rows of float32, or of bf16 under AMX */
    float *keys, *values;                                /* packed keys; packed or widened values */
    int32_t *low, *high;                                 /* slots of this entry that a row sees */
    int64_t all_low, all_high;                           /* those of every row, */
    int same;                                            /* if they are the same for all */
} Tile;

INLINE int64_t plane(const Attention *a, int64_t block_id, int64_t layer, int64_t kv, int64_t head) {
    return (((block_id * a->num_layers + layer) * 2 + kv) * a->num_kv_heads + head) * BLOCK * a->head_dim;
}

/* `dim` elements turned by one angle; pairs are (i, i + half). */
INLINE void turn(const void *from, int64_t at, int type, const float *cos, const float *sin, int64_t half,
                 int64_t dim, float factor, float *to) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec x = load(from, at + i, type), y = load(from, at + i + half, type);
        vec c = load_f32(cos + i), s = load_f32(sin + i);
        store_f32(to + i, (x * c - y * s) * factor);
        store_f32(to + i + half, (y * c + x * s) * factor);
    }
    float x[MAX_HEAD_DIM];
    if (i < half || 2 * half < dim)
        for (int64_t k = 0; k < dim; k += LANES) store_f32(x + k, load(from, at + k, type));
    for (; i < half; i++) {
        to[i] = (x[i] * cos[i] - x[i + half] * sin[i]) * factor;
        to[i + half] = (x[i + half] * cos[i] + x[i] * sin[i]) * factor;
    }
    for (i = 2 * half; i < dim; i++) to[i] = x[i] * factor;
}

INLINE void transpose16(vec r[16]) {
#if __has_builtin(__builtin_shufflevector)
#define STEP(DISTANCE, LOW, HIGH)                                                                            \
    for (int i = 0; i < 16; i++)                                                                             \
        if (!(i & DISTANCE)) {                                                                               \
            vec a = r[i], b = r[i + DISTANCE];                                                               \
            r[i] = __builtin_shufflevector(a, b, LOW);                                                       \
            r[i + DISTANCE] = __builtin_shufflevector(a, b, HIGH);                                           \
        }
#define L1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define H1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define L2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define H2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define L4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define H4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define L8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define H8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
    STEP(1, L1, H1) STEP(2, L2, H2) STEP(4, L4, H4) STEP(8, L8, H8)
#else
    float x[16][16];
    memcpy(x, r, sizeof x);
    for (int i = 0; i < 16; i++) {
        float y[16];
        for (int j = 0; j < 16; j++) y[j] = x[j][i];
        r[i] = load_f32(y);
    }
#endif
}

INLINE vec masked(vec scores, int64_t at, int64_t low, int64_t high) {
    static const int32_t count[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ivec lane, bits;
    memcpy(&lane, count, sizeof lane);
    lane += (int32_t)at;
    const ivec seen = (lane >= (int32_t)low) & (lane < (int32_t)high);
    const vec never = splat(-INFINITY);
    ivec other;
    memcpy(&bits, &scores, sizeof bits);
    memcpy(&other, &never, sizeof other);
    bits = (bits & seen) | (other & ~seen);
    memcpy(&scores, &bits, sizeof scores);
    return scores;
}

/* Slots that rows [row, row + count) see, together; whether each of them sees all of that. */
INLINE int together(const Tile *t, int64_t row, int64_t count, int64_t *low, int64_t *high) {
    int32_t least = BLOCK, most = 0, last_low = 0, first_high = BLOCK;
    if (t->same) {
        *low = t->all_low;
        *high = t->all_high;
        return 1;
    }
    for (int64_t r = row; r < row + count; r++) {
        const int32_t from = t->low[r] < t->high[r] ? t->low[r] : BLOCK;
        least = from < least ? from : least;
        most = t->high[r] > most ? t->high[r] : most;
        last_low = t->low[r] > last_low ? t->low[r] : last_low;
        first_high = t->high[r] < first_high ? t->high[r] : first_high;
    }
    *low = least;
    *high = most;
    return last_low <= least && first_high >= most;
}

/* One row of scores becomes weights relative to its new highest score, in registers throughout. */
INLINE float weigh_row(Tile *t, int64_t row, float *scores, float factor, int v0, int v1, int same) {
    const int64_t low = t->same ? t->all_low : t->low[row], high = t->same ? t->all_high : t->high[row];
    vec s[4], most = splat(t->best[row]), total = {0};
    for (int v = 0; v < v1 - v0; v++) {
        s[v] = load_f32(scores + (v0 + v) * LANES) * factor;
        if (!same) s[v] = masked(s[v], (v0 + v) * LANES, low, high);
        most = larger(most, s[v]);
    }
    const float best = largest(most);
    for (int v = 0; v < v1 - v0; v++) {
        s[v] = exp2_negative(s[v] - best);
        store_f32(scores + (v0 + v) * LANES, s[v]);
        total += s[v];
    }
    t->best[row] = best;
    return sum(total);
}

/* Weights of `count` rows; `shrink` is what their older sums are worth. */
INLINE void weigh(Tile *t, int64_t row, int64_t count, float *scores, float factor, int v0, int v1, int same,
                  float *shrink) {
    float before[MAX_ROWS], totals[MAX_ROWS];
    memcpy(before, t->best + row, count * sizeof(float));
    if (v0 == 0 && v1 == 4 && same) /* whole blocks, nearly always: the loops unroll */
        for (int64_t r = 0; r < count; r++)
            totals[r] = weigh_row(t, row + r, scores + r * BLOCK, factor, 0, 4, 1);
    else
        for (int64_t r = 0; r < count; r++)
            totals[r] = weigh_row(t, row + r, scores + r * BLOCK, factor, v0, v1, same);
    for (int64_t r = 0; r < count; r += LANES) { /* lanes beyond count are not used */
        vec older, newer;
        memcpy(&older, before + r, sizeof older);
        memcpy(&newer, t->best + row + r, sizeof newer);
        store_f32(shrink + r, exp2_negative(older - newer));
    }
    for (int64_t r = 0; r < count; r++) t->total[row + r] = t->total[row + r] * shrink[r] + totals[r];
}

#endif
