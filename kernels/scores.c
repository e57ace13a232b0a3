/* Log-probabilities of given tokens from rows of logits, without a copy of the logits.
 *
 * A row is read twice, once for its highest logit and once for the sum of exponentials; the second time it
 * comes from the cache. The sum is float32 over short runs and double over these, so that it does not lose
 * digits with the size of the vocabulary.
 */
#include "vectors.h"

#define RUN 2048

INLINE float element(const void *row, int64_t at, int type) {
    if (type == FLOAT32) return ((const float *)row)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)row)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE float row_score(const void *row, int type, int64_t width, int64_t target) {
    vec most = splat(-INFINITY);
    int64_t k = 0;
    for (; k + LANES <= width; k += LANES) most = larger(most, load(row, k, type));
    float best = largest(most);
    for (; k < width; k++) best = element(row, k, type) > best ? element(row, k, type) : best;
    double total = 0.0;
    for (k = 0; k + LANES <= width;) {
        vec part = {0};
        for (int64_t end = k + RUN; k + LANES <= width && k < end; k += LANES)
            part += exp2_negative((load(row, k, type) - best) * 1.44269504f);
        total += sum(part);
    }
    for (; k < width; k++) total += expf(element(row, k, type) - best);
    return (float)((double)element(row, target, type) - best - log(total));
}

/* out[i] = log softmax(row i)[targets[i]]; rows lie one after another. */
void skv_scores(const void *logits, int64_t type, int64_t num_rows, int64_t width, const int64_t *targets,
                float *out, int64_t num_threads) {
#pragma omp parallel for num_threads((int)num_threads)
    for (int64_t i = 0; i < num_rows; i++)
        out[i] = type == FLOAT32
                     ? row_score((const float *)logits + i * width, FLOAT32, width, targets[i])
                     : row_score((const uint16_t *)logits + i * width, BFLOAT16, width, targets[i]);
}
