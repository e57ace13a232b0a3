/* What a decoder computes row by row between its products: RMS norms and gated SiLU.
 *
 * Float32 inside; a result of bf16 is rounded where transformers rounds it, after each of its operations,
 * so that both agree as closely as two orders of summation can. Widths are multiples of 16.
 */
#include "vectors.h"

/* v as it is after being stored in `type`. */
INLINE vec rounded(vec v, int type) {
    if (type == FLOAT32) return v;
    hvec h = narrow(v);
    uint16_t bits[LANES];
    memcpy(bits, &h, sizeof h);
    return load_bf16(bits);
}

INLINE void norm_row(const void *x, const float *weight, void *out, int64_t width, float eps, int type) {
    vec squares = {0};
    for (int64_t k = 0; k < width; k += LANES) { vec v = load(x, k, type); squares = more(squares, v, v); }
    const float inverse = 1.0f / sqrtf(sum(squares) / width + eps);
    for (int64_t k = 0; k < width; k += LANES)
        store(out, k, rounded(load(x, k, type) * inverse, type) * load_f32(weight + k), type);
}

/* out row i = norm(x row i) * weight; rows of x are `stride` elements apart, those of out `width`. */
void skv_rms_norm(const void *x, int64_t stride, const float *weight, void *out, int64_t num_rows,
                  int64_t width, float eps, int64_t type, int64_t num_threads) {
#pragma omp parallel for num_threads((int)num_threads)
    for (int64_t i = 0; i < num_rows; i++) {
        if (type == FLOAT32)
            norm_row((const float *)x + i * stride, weight, (float *)out + i * width, width, eps, FLOAT32);
        else
            norm_row((const uint16_t *)x + i * stride, weight, (uint16_t *)out + i * width, width, eps, BFLOAT16);
    }
}

INLINE void gate_row(const void *gate, const void *up, void *out, int64_t width, int type) {
    for (int64_t k = 0; k < width; k += LANES)
        store(out, k, rounded(silu(load(gate, k, type)), type) * load(up, k, type), type);
}

/* out row i = silu(gate row i) * up row i; rows of gate and up are `stride` elements apart. */
void skv_gated_silu(const void *gate, const void *up, int64_t stride, void *out, int64_t num_rows,
                    int64_t width, int64_t type, int64_t num_threads) {
#pragma omp parallel for num_threads((int)num_threads)
    for (int64_t i = 0; i < num_rows; i++) {
        if (type == FLOAT32)
            gate_row((const float *)gate + i * stride, (const float *)up + i * stride,
                     (float *)out + i * width, width, FLOAT32);
        else
            gate_row((const uint16_t *)gate + i * stride, (const uint16_t *)up + i * stride,
                     (uint16_t *)out + i * width, width, BFLOAT16);
    }
}
