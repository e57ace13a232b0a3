/* Attention of many queries of one sequence over paged KV, on the CPU.
 *
 * A tile is a run of queries of one KV head; its rows are (query, query head), and a thread owns it. Its
 * keys are taken entry by entry with a running softmax (Milakov and Gimelshein 2018; FlashAttention), so
 * scores never leave the first cache and no mask is ever made: which slots a row sees is an interval.
 *
 *   near     query - start <= cap     keys turned to the first query of the step, rows by their distance to it
 *   capped   query - start >  cap     keys turned back by the cap, rows not turned
 *
 * Scores are kept in base 2. KV: float32 or bf16 (sums are float32 in both). Where the processor multiplies
 * tiles of bf16 (AMX), bf16 rows and keys go through it; otherwise they are widened. head_dim is a multiple
 * of 16; a block has 64 slots; the caller checks both.
 */
#include "attention_amx.h"
#include "attention_vector.h"

#include <stdlib.h>

/* Rows of the tile in the form that the passes multiply; float32 ones carry the factor of the scores. */
static void turn_rows(const Attention *a, const Queries *s, Tile *t, int amx, float *to, int capped) {
    const int64_t group = a->num_q_heads / a->num_kv_heads, dim = a->head_dim;
    static const float none[1];
    float row[MAX_HEAD_DIM];
    for (int64_t r = 0; r < t->padded; r++) {
        const int64_t query = t->query + r / group, head = t->head * group + r % group;
        float *place = amx ? row : to + r * dim;
        if (r >= t->num_rows) memset(place, 0, dim * sizeof(float));
        else {
            const int64_t at = query * s->token_stride + head * s->head_stride;
            const float factor = amx ? 1.0f : a->scale * 1.44269504f;
            const int64_t half = capped ? 0 : a->rotary_half;
            turn(s->q, at, (int)a->kv_type, capped ? none : s->query_cos + query * half,
                 capped ? none : s->query_sin + query * half, half, dim, factor, place);
        }
#if WITH_AMX
        if (amx) narrow_row(row, dim, (uint16_t *)to + r * dim);
#endif
    }
}

/* Slots [*low, *high) of entry e that a query sees, near or capped. */
INLINE void seen(const Queries *s, int64_t e, int64_t query, int capped, int64_t *low, int64_t *high) {
    const int64_t distance = query - s->starts[e], oldest = distance + 1 - s->window_size;
    /* A recalled entry shows what the window does not. */
    const int recalled = e >= s->num_sink_entries && e < s->num_lasting_entries;
    const int64_t after = recalled ? oldest : distance + 1;
    *low = e >= s->num_lasting_entries && oldest > s->first[e] ? oldest : s->first[e];
    *high = after < s->end[e] ? after : s->end[e];
    if ((distance > s->caps[e]) != capped || *low >= *high) *low = *high = 0;
}

/* The slots of entry e that each row of the tile sees; whether any row sees one. */
static int find_seen(const Attention *a, const Queries *s, Tile *t, int64_t e, int capped) {
    const int64_t group = a->num_q_heads / a->num_kv_heads, start = s->query_start + t->query;
    int64_t low, high, last_low, last_high, row = 0;
    int any = 0;
    seen(s, e, start, capped, &low, &high);
    seen(s, e, start + t->num_queries - 1, capped, &last_low, &last_high);
    /* Both bounds only grow with the query, and near turns to capped once. */
    t->same = low < high && low == last_low && high == last_high && t->num_rows == t->padded;
    t->all_low = low;
    t->all_high = high;
    if (t->same) return 1;
    for (int64_t query = 0; query < t->num_queries; query++) {
        seen(s, e, start + query, capped, &low, &high);
        any |= low < high;
        for (int64_t g = 0; g < group; g++, row++) {
            t->low[row] = (int32_t)low;
            t->high[row] = (int32_t)high;
        }
    }
    for (; row < t->padded; row++) t->low[row] = t->high[row] = 0;
    return any;
}

static void attend_entry(const Attention *a, const Queries *s, Tile *t, int64_t e, int capped, int amx) {
    const int64_t half = a->rotary_half, first = s->first[e], end = s->end[e];
    const float *cos = (capped ? s->capped_cos : s->near_cos) + e * half;
    const float *sin = (capped ? s->capped_sin : s->near_sin) + e * half;
    const float *rows = capped ? t->capped_rows : t->near_rows;
    const int64_t keys = plane(a, s->block_ids[e], s->layer, 0, t->head);
    const int64_t values = plane(a, s->block_ids[e], s->layer, 1, t->head);
#if WITH_AMX
    if (amx) {
        amx_pack_keys(a, keys, first, end, cos, sin, t->keys);
        amx_pack_values(a, values, first, end, t->values);
        amx_pass(a, t, rows);
        return;
    }
#endif
    (void)amx;
    pack_keys(a, keys, first, end, cos, sin, t->keys);
    vector_pass(a, t, rows, widen_values(a, values, first, end, t->values));
}

static void finish_tile(const Attention *a, const Queries *s, const Tile *t) {
    const int64_t group = a->num_q_heads / a->num_kv_heads, dim = a->head_dim;
    for (int64_t r = 0; r < t->num_rows; r++) {
        const int64_t row = (t->query + r / group) * a->num_q_heads + t->head * group + r % group;
        const float total = t->total[r], inverse = total > 0.0f ? 1.0f / total : 0.0f;
        for (int64_t k = 0; k < dim; k += LANES)
            store(s->out, row * dim + k, load_f32(t->out + r * dim + k) * inverse, (int)a->kv_type);
        s->lse[row] = total > 0.0f ? t->best[r] * 0.693147181f + logf(total) : -INFINITY;
    }
}

static void attend_tile(const Attention *a, const Queries *s, Tile *t, int amx) {
    const int64_t group = a->num_q_heads / a->num_kv_heads, unit = amx ? AMX_ROWS : ROWS;
    const int64_t last = s->query_start + t->query + t->num_queries - 1;
    int any_capped = 0;
    t->num_rows = t->num_queries * group;
    t->padded = (t->num_rows + unit - 1) / unit * unit;
    for (int64_t e = 0; e < s->num_entries; e++) any_capped |= last - s->starts[e] > s->caps[e];
    turn_rows(a, s, t, amx, t->near_rows, 0);
    if (any_capped) turn_rows(a, s, t, amx, t->capped_rows, 1);
    memset(t->out, 0, t->padded * a->head_dim * sizeof(float));
    for (int64_t r = 0; r < t->padded; r++) { t->best[r] = NEVER; t->total[r] = 0.0f; }
    for (int64_t e = 0; e < s->num_entries; e++)
        for (int capped = 0; capped <= any_capped; capped++)
            if (find_seen(a, s, t, e, capped)) attend_entry(a, s, t, e, capped, amx);
    finish_tile(a, s, t);
}

/* 1 if the vectors are as wide here as the kernel needs to be fast. */
int skv_attention_is_fast(void) {
#ifdef __AVX512F__
    return 1;
#else
    return 0;
#endif
}

/* Returns 0, or 1 when there is no memory. */
int skv_attend(const Attention *a, const Queries *s) {
    const int64_t group = a->num_q_heads / a->num_kv_heads, dim = a->head_dim;
    const int64_t num_tiles = (s->num_queries + s->tile_queries - 1) / s->tile_queries;
    const int64_t rows = s->tile_queries * group + AMX_ROWS, floats = rows * (3 * dim + 4) + 2 * BLOCK * dim + 64;
    const int amx = a->kv_type == BFLOAT16 && dim % 32 == 0 && amx_allowed();
    int failed = 0;
#pragma omp parallel num_threads((int)a->num_threads)
    {
        float *scratch = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
        if (scratch == 0) failed = 1;
#if WITH_AMX
        if (amx) amx_begin();
#endif
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < num_tiles * a->num_kv_heads; item++) {
            if (scratch == 0) continue;
            Tile t = {.head = item % a->num_kv_heads, .query = item / a->num_kv_heads * s->tile_queries};
            const int64_t left = s->num_queries - t.query;
            t.num_queries = left < s->tile_queries ? left : s->tile_queries;
            t.keys = scratch;
            t.values = t.keys + BLOCK * dim;
            t.near_rows = t.values + BLOCK * dim;
            t.capped_rows = t.near_rows + rows * dim;
            t.out = t.capped_rows + rows * dim;
            t.low = (int32_t *)(t.out + rows * dim);
            t.high = t.low + rows;
            t.best = (float *)(t.high + rows);
            t.total = t.best + rows;
            attend_tile(a, s, &t, amx);
        }
#if WITH_AMX
        if (amx) amx_end();
#endif
        free(scratch);
    }
    return failed;
}
