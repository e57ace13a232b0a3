/* One decode step of a Llama-shaped decoder on the CPU: one token of each of several sequences.
 *
 * A step reads every weight once, whatever the number of its rows, and the whole window of each of them,
 * so it runs at the speed of memory, and memory is only fast when it is asked for early. Everything here
 * serves that: one parallel region for the whole step, no copies, weights that may be narrower than the
 * arithmetic (bf16 bits widen exactly). What a row computes does not depend on the others, to the bit.
 *
 *   pool     [blocks, layers, 2, kv_heads, block_size, head_dim]; K is rotated by its offset in the block
 *   score    (query, slot j of an entry) = rotate(q, distance of the entry) . K[j] * scale
 *
 * All sums are float32. Weights: float32 or bf16; KV: float32 or bf16; norms and biases: float32.
 * Widths (hidden, intermediate, head_dim) are multiples of 16; the caller checks.
 */
#include "products.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#define MAX_GROUP 16
#define MAX_DIM 256

typedef struct {
    const float *input_norm, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o_bias, *mlp_norm;
    const void *q, *k, *v, *o, *gate, *up, *down;
} Layer;

typedef struct {
    int64_t num_layers, hidden, intermediate, num_q_heads, num_kv_heads, head_dim, rotary_half;
    int64_t vocab_size, block_size, weight_type, kv_type, num_threads;
    int64_t in_pairs; /* products of bf16 weights round their inputs to bf16, if the processor multiplies pairs */
    float eps, scale;
    const Layer *layers;
    const void *embed, *head;
    const float *norm, *cos, *sin;
    void *pool;
} Model;

typedef struct {
    int64_t token_id, block_id, offset, num_entries, num_splits;
    int64_t first_split;                                /* splits of the rows before */
    const int64_t *block_ids, *distances, *first, *end; /* of each entry: slots [first, end) are seen */
    float *queries;                                     /* [layers, q_heads, head_dim], un-rotated, or NULL */
} Row;

typedef struct {
    int64_t num_rows, num_splits, num_logits; /* of all rows; logits of the first num_logits */
    const Row *rows;
    float *state, *logits; /* see skv_state_floats; [num_logits, vocab_size] */
} Step;

static void rms_norm(const float *x, const float *weight, float *out, int64_t width, float eps) {
    vec squares = {0};
    for (int64_t k = 0; k < width; k += LANES) { vec v = load_f32(x + k); squares = more(squares, v, v); }
    float inverse = 1.0f / sqrtf(sum(squares) / width + eps);
    for (int64_t k = 0; k < width; k += LANES)
        store_f32(out + k, load_f32(x + k) * inverse * load_f32(weight + k));
}

/* x turned by the angle of a row of the tables; pairs are (i, i + half). */
static void rotate(const float *x, float *out, const float *cos, const float *sin, int64_t half,
                   int64_t dim) {
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
    }
    for (int64_t i = 2 * half; i < dim; i++) out[i] = x[i];
}

static void write_head(const Model *m, const Row *s, int64_t layer, int64_t head, const float *k,
                       const float *v) {
    const int64_t plane = m->block_size * m->head_dim;
    const int64_t at = ((s->block_id * m->num_layers + layer) * 2 * m->num_kv_heads + head) * plane +
                       s->offset * m->head_dim;
    for (int64_t i = 0; i < m->head_dim; i++) {
        if (m->kv_type == BFLOAT16) {
            ((uint16_t *)m->pool)[at + i] = to_bf16(k[i]);
            ((uint16_t *)m->pool)[at + m->num_kv_heads * plane + i] = to_bf16(v[i]);
        } else {
            ((float *)m->pool)[at + i] = k[i];
            ((float *)m->pool)[at + m->num_kv_heads * plane + i] = v[i];
        }
    }
}

/* scores[g][j] of `count` slots from j on: 1 or 4, of which the sums are made together. */
INLINE void score_slots(const Model *m, int64_t base, int64_t value_base, int64_t j, const float *turned,
                        float (*scores)[64 + LANES], int count, int group, int dim, int type) {
    const int64_t bytes = type == BFLOAT16 ? 2 : 4;
    vec dots[4][MAX_GROUP];
    for (int i = 0; i < count; i++)
        for (int g = 0; g < group; g++) dots[i][g] = (vec){0};
    for (int k = 0; k < dim; k += LANES)
        for (int i = 0; i < count; i++) {
            const vec key = load(m->pool, base + (j + i) * dim + k, type);
            ask((const char *)m->pool + (value_base + (j + i) * dim + k) * bytes);
            for (int g = 0; g < group; g++) dots[i][g] = more(dots[i][g], load_f32(turned + g * dim + k), key);
        }
    for (int g = 0; g < group; g++) {
        float sums[4];
        if (count == 4) sum4(dots[0][g], dots[1][g], dots[2][g], dots[3][g], sums);
        else sums[0] = sum(dots[0][g]);
        for (int i = 0; i < count; i++) scores[g][j + i] = sums[i] * m->scale;
    }
}

/* A split's partial attention of one KV head: for each query head [max, sum, out[head_dim]]. Values are
 * summed `wide` vectors at a time: as many as the registers have room for. */
INLINE void attend_typed(const Model *m, const Row *s, int64_t layer, int64_t head, int64_t from, int64_t to,
                         const float *q, float *partial, int group, int dim, int type, int wide) {
    const int64_t plane = m->block_size * dim, bytes = type == BFLOAT16 ? 2 : 4;
    float turned[MAX_GROUP * MAX_DIM], scores[MAX_GROUP][64 + LANES];
    for (int g = 0; g < group; g++) {
        partial[g * (dim + 2)] = -INFINITY;
        memset(partial + g * (dim + 2) + 1, 0, (dim + 1) * sizeof(float));
    }
    for (int64_t e = from; e < to; e++) {
        const int64_t first = s->first[e], end = s->end[e], slots = end - first;
        if (slots <= 0) continue;
        const int64_t base =
            ((s->block_ids[e] * m->num_layers + layer) * 2 * m->num_kv_heads + head) * plane + first * dim;
        const int64_t value_base = base + m->num_kv_heads * plane;
        const float *cos = m->cos + s->distances[e] * m->rotary_half;
        const float *sin = m->sin + s->distances[e] * m->rotary_half;
        for (int g = 0; g < group; g++)
            rotate(q + g * dim, turned + g * dim, cos, sin, m->rotary_half, dim);
        int64_t slot = 0;
        if (group <= 4)
            for (; slot + 4 <= slots; slot += 4)
                score_slots(m, base, value_base, slot, turned, scores, 4, group, dim, type);
        for (; slot < slots; slot++)
            score_slots(m, base, value_base, slot, turned, scores, 1, group, dim, type);
        for (int g = 0; g < group; g++) {
            float *state = partial + g * (dim + 2);
            store_f32(scores[g] + slots, splat(-INFINITY));
            vec most = splat(state[0]), total = {0};
            for (int64_t j = 0; j < slots; j += LANES) most = larger(most, load_f32(scores[g] + j));
            const float best = largest(most);
            for (int64_t j = 0; j < slots; j += LANES) {
                vec weight = exp_negative(load_f32(scores[g] + j) - best);
                store_f32(scores[g] + j, weight);
                total += weight;
            }
            float shrink = expf(state[0] - best);
            state[0] = best;
            state[1] = state[1] * shrink + sum(total);
            for (int k = 0; k < dim; k += LANES)
                store_f32(state + 2 + k, load_f32(state + 2 + k) * shrink);
        }
        /* The next entry's keys are asked for while this one's values are summed. */
        const int64_t next = e + 1 < to ? e + 1 : e;
        const char *ahead = (const char *)m->pool +
            (((s->block_ids[next] * m->num_layers + layer) * 2 * m->num_kv_heads + head) * plane) * bytes;
        for (int k = 0; k < dim; k += wide * LANES) {
            vec sums[MAX_GROUP][4];
            for (int g = 0; g < group; g++)
                for (int w = 0; w < wide; w++) sums[g][w] = load_f32(partial + g * (dim + 2) + 2 + k + w * LANES);
            for (int64_t j = 0; j < slots; j++)
                for (int w = 0; w < wide; w++) {
                    const int64_t at = j * dim + k + w * LANES;
                    const vec value = load(m->pool, value_base + at, type);
                    ask(ahead + at * bytes);
                    for (int g = 0; g < group; g++) sums[g][w] = more(sums[g][w], splat(scores[g][j]), value);
                }
            for (int g = 0; g < group; g++)
                for (int w = 0; w < wide; w++) store_f32(partial + g * (dim + 2) + 2 + k + w * LANES, sums[g][w]);
        }
    }
}
#define ATTEND(GROUP, DIM, WIDE)                                                                     \
    if (group == GROUP && dim == DIM) {                                                              \
        if (m->kv_type == BFLOAT16)                                                                  \
            attend_typed(m, s, layer, head, from, to, q, partial, GROUP, DIM, BFLOAT16, WIDE);       \
        else attend_typed(m, s, layer, head, from, to, q, partial, GROUP, DIM, FLOAT32, WIDE);       \
        return;                                                                                      \
    }
static void attend(const Model *m, const Row *s, int64_t layer, int64_t head, int64_t from, int64_t to,
                   const float *q, float *partial) {
    const int group = (int)(m->num_q_heads / m->num_kv_heads), dim = (int)m->head_dim;
    /* Shapes known when this is compiled keep the sums in registers; any other shape works, slower. */
    ATTEND(3, 64, 4) ATTEND(7, 64, 2) ATTEND(4, 128, 4) ATTEND(2, 128, 4)
    if (m->kv_type == BFLOAT16)
        attend_typed(m, s, layer, head, from, to, q, partial, group, dim, BFLOAT16, 1);
    else attend_typed(m, s, layer, head, from, to, q, partial, group, dim, FLOAT32, 1);
}

/* The splits' partial results of all query heads, merged: out [num_q_heads * head_dim]. */
static void merge(const Model *m, const Row *s, const float *partials, float *out) {
    const int64_t dim = m->head_dim, stride = dim + 2, heads = m->num_q_heads;
    for (int64_t h = 0; h < heads; h++) {
        float best = -INFINITY, total = 0.0f;
        for (int64_t p = 0; p < s->num_splits; p++)
            best = fmaxf(best, partials[(p * heads + h) * stride]);
        memset(out + h * dim, 0, dim * sizeof(float));
        for (int64_t p = 0; p < s->num_splits; p++) {
            const float *part = partials + (p * heads + h) * stride;
            if (part[1] == 0.0f) continue;
            float weight = expf(part[0] - best);
            total += weight * part[1];
            for (int64_t k = 0; k < dim; k++) out[h * dim + k] += weight * part[2 + k];
        }
        float inverse = total > 0.0f ? 1.0f / total : 0.0f;
        for (int64_t k = 0; k < dim; k++) out[h * dim + k] *= inverse;
    }
}

typedef struct { int64_t first, end; } Share;
static Share share(int64_t total, int64_t thread, int64_t threads, int64_t unit) {
    int64_t step = (total + threads - 1) / threads;
    step = (step + unit - 1) / unit * unit;
    Share part = {thread * step < total ? thread * step : total,
                  (thread + 1) * step < total ? (thread + 1) * step : total};
    return part;
}

#define BARRIER _Pragma("omp barrier")

static int64_t qkv_floats(const Model *m) { return (m->num_q_heads + 2 * m->num_kv_heads) * m->head_dim; }
static int64_t partial_floats(const Model *m) { return m->num_q_heads * (m->head_dim + 2); }

static void embed(const Model *m, int64_t token_id, float *x) {
    for (int64_t k = 0; k < m->hidden; k += LANES)
        store_f32(x + k, load(m->embed, token_id * m->hidden + k, (int)m->weight_type));
}

static void norm_rows(const Model *m, int64_t num_rows, const float *h, const float *weight, float *x) {
    for (int64_t i = 0; i < num_rows; i++)
        rms_norm(h + i * m->hidden, weight, x + i * m->hidden, m->hidden, m->eps);
}

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Inputs of a product as bf16, in `scratch`, if they are to be; NULL: they stay as they are. */
static const uint16_t *as_pairs(const Model *m, int64_t num_rows, const float *x, int64_t width,
                                uint16_t *scratch) {
    if (m->weight_type != BFLOAT16 || !m->in_pairs) return NULL;
    return narrowed(x, num_rows, width, width, scratch);
}

/* Rows of q, k and v as one range, so that the threads' shares are even. */
static void project_qkv(const Model *m, const Layer *w, int64_t num_rows, const float *x,
                        const uint16_t *narrow, float *qkv, Share part) {
    const int64_t q_rows = m->num_q_heads * m->head_dim, kv_rows = m->num_kv_heads * m->head_dim;
    const void *weights[3] = {w->q, w->k, w->v};
    const float *biases[3] = {w->q_bias, w->k_bias, w->v_bias};
    const int64_t starts[4] = {0, q_rows, q_rows + kv_rows, q_rows + 2 * kv_rows};
    for (int i = 0; i < 3; i++) {
        int64_t first = part.first > starts[i] ? part.first : starts[i];
        int64_t end = part.end < starts[i + 1] ? part.end : starts[i + 1];
        const Product p = {x, narrow, num_rows, m->hidden, m->hidden, weights[i], biases[i],
                           qkv + starts[i], starts[3], 0};
        if (first < end) product(&p, first - starts[i], end - starts[i], m->weight_type);
    }
}

/* A thread's part of the attention of all rows: tasks of one KV head and one split of a row. */
static void attend_layer(const Model *m, const Step *s, int64_t layer, const float *qkv, float *partials,
                         int64_t thread, int64_t threads) {
    const int64_t dim = m->head_dim, group = m->num_q_heads / m->num_kv_heads;
    for (const Row *row = s->rows; row < s->rows + s->num_rows; row++, qkv += qkv_floats(m)) {
        const int64_t before = m->num_kv_heads * row->first_split, tasks = m->num_kv_heads * row->num_splits;
        const int64_t per_split = (row->num_entries + row->num_splits - 1) / row->num_splits;
        /* Counted over all rows, so that rows of few tasks are spread, too. */
        for (int64_t task = (thread + threads - before % threads) % threads; task < tasks; task += threads) {
            const int64_t head = task % m->num_kv_heads, split = task / m->num_kv_heads;
            int64_t from = split * per_split, to = from + per_split;
            from = from < row->num_entries ? from : row->num_entries;
            to = to < row->num_entries ? to : row->num_entries;
            attend(m, row, layer, head, from, to, qkv + head * group * dim,
                   partials + (row->first_split + split) * partial_floats(m) + head * group * (dim + 2));
        }
    }
}

static void merge_rows(const Model *m, const Step *s, const float *partials, float *mixed) {
    for (int64_t i = 0; i < s->num_rows; i++)
        merge(m, s->rows + i, partials + s->rows[i].first_split * partial_floats(m),
              mixed + i * m->num_q_heads * m->head_dim);
}

static void norm_heads(const Model *m, const float *weight, float *heads, int64_t num_heads) {
    if (weight)
        for (int64_t h = 0; h < num_heads; h++)
            rms_norm(heads + h * m->head_dim, weight, heads + h * m->head_dim, m->head_dim, m->eps);
}

/* q and k get their norms, k its rotation; K and V go into the pool. A row is one thread's: it is little. */
static void place_kv(const Model *m, const Row *s, const Layer *w, int64_t layer, float *qkv) {
    const int64_t dim = m->head_dim;
    float *k = qkv + m->num_q_heads * dim, *v = k + m->num_kv_heads * dim, turned[MAX_DIM];
    norm_heads(m, w->q_norm, qkv, m->num_q_heads);
    if (s->queries) {
        const int64_t size = m->num_q_heads * dim;
        memcpy(s->queries + layer * size, qkv, size * sizeof(float));
    }
    norm_heads(m, w->k_norm, k, m->num_kv_heads);
    for (int64_t h = 0; h < m->num_kv_heads; h++) {
        rotate(k + h * dim, turned, m->cos + s->offset * m->rotary_half,
               m->sin + s->offset * m->rotary_half, m->rotary_half, dim);
        write_head(m, s, layer, h, turned, v + h * dim);
    }
}

/* act = silu(gate) * up; `part` begins and ends at multiples of LANES. */
static void gate_up(const Model *m, const Layer *w, int64_t num_rows, const float *x,
                    const uint16_t *narrow, float *act, float *up, Share part) {
    const int64_t wide = m->intermediate;
    const Product gates = {x, narrow, num_rows, m->hidden, m->hidden, w->gate, 0, act, wide, 0};
    const Product ups = {x, narrow, num_rows, m->hidden, m->hidden, w->up, 0, up, wide, 0};
    product(&gates, part.first, part.end, m->weight_type);
    product(&ups, part.first, part.end, m->weight_type);
    for (int64_t i = 0; i < num_rows; i++, act += wide, up += wide)
        for (int64_t k = part.first; k < part.end; k += LANES)
            store_f32(act + k, silu(load_f32(act + k)) * load_f32(up + k));
}

/* Floats of one thread for each row: x, mixed, and the inputs of a product as bf16. */
static int64_t own_floats(const Model *m) {
    const int64_t q_size = m->num_q_heads * m->head_dim;
    const int64_t widest = larger_of(larger_of(m->hidden, m->intermediate), q_size);
    return m->hidden + q_size + widest / 2;
}

/* Floats of scratch that a step needs: shared buffers, then those of each thread. */
int64_t skv_state_floats(const Model *m, int64_t num_rows, int64_t num_splits) {
    const int64_t own = own_floats(m);
    return num_rows * (m->hidden + qkv_floats(m) + 2 * m->intermediate + m->num_threads * own) +
           num_splits * partial_floats(m) + 8 * LANES;
}

/* Products that are made in pairs have widths that are multiples of this; 0: this processor makes none. */
int64_t skv_pairs(void) { return PAIRS; }

void skv_decode(const Model *m, const Step *s) {
    const int64_t n = s->num_rows, q_size = m->num_q_heads * m->head_dim, qkv_size = qkv_floats(m);
    float *h = s->state, *qkv = h + n * m->hidden, *act = qkv + n * qkv_size, *up = act + n * m->intermediate;
    float *partials = up + n * m->intermediate, *owned = partials + s->num_splits * partial_floats(m);
    for (int64_t i = 0; i < n; i++) embed(m, s->rows[i].token_id, h + i * m->hidden);
#pragma omp parallel num_threads((int)m->num_threads)
    {
        int64_t thread = 0, threads = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num();
        threads = omp_get_num_threads();
#endif
        float *x = owned + thread * n * own_floats(m), *mixed = x + n * m->hidden;
        uint16_t *scratch = (uint16_t *)(mixed + n * q_size);
        const Share hidden = share(m->hidden, thread, threads, 4);
        for (int64_t layer = 0; layer < m->num_layers; layer++) {
            const Layer *w = m->layers + layer;
            norm_rows(m, n, h, w->input_norm, x);
            project_qkv(m, w, n, x, as_pairs(m, n, x, m->hidden, scratch), qkv, share(qkv_size, thread, threads, 4));
            BARRIER
            for (int64_t i = thread; i < n; i += threads)
                place_kv(m, s->rows + i, w, layer, qkv + i * qkv_size);
            BARRIER
            attend_layer(m, s, layer, qkv, partials, thread, threads);
            BARRIER
            merge_rows(m, s, partials, mixed);
            const uint16_t *narrow_mixed = as_pairs(m, n, mixed, q_size, scratch);
            const Product outs = {mixed, narrow_mixed, n, q_size, q_size, w->o, w->o_bias, h, m->hidden, 1};
            product(&outs, hidden.first, hidden.end, m->weight_type);
            BARRIER
            norm_rows(m, n, h, w->mlp_norm, x);
            gate_up(m, w, n, x, as_pairs(m, n, x, m->hidden, scratch), act, up,
                    share(m->intermediate, thread, threads, LANES));
            BARRIER
            const uint16_t *narrow_act = as_pairs(m, n, act, m->intermediate, scratch);
            const Product downs = {act, narrow_act, n, m->intermediate, m->intermediate, w->down, 0, h, m->hidden, 1};
            product(&downs, hidden.first, hidden.end, m->weight_type);
            BARRIER
        }
        if (s->num_logits) {
            const Share rows = share(m->vocab_size, thread, threads, 4);
            norm_rows(m, s->num_logits, h, m->norm, x);
            const uint16_t *narrow_x = as_pairs(m, s->num_logits, x, m->hidden, scratch);
            const Product heads = {x, narrow_x, s->num_logits, m->hidden, m->hidden, m->head, 0, s->logits,
                                   m->vocab_size, 0};
            product(&heads, rows.first, rows.end, m->weight_type);
        }
    }
}
