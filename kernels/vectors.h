/* Vectors of 16 floats, bf16 bits, and exponentials: what the native kernels share. */
#ifndef STREAMKV_VECTORS_H
#define STREAMKV_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));

enum { FLOAT32 = 0, BFLOAT16 = 1 };

/* sum + a * b, rounded once where the processor can. It is said here and not left to the compiler (which is
 * told -ffp-contract=off): that one fuses in one loop and not in another, as GCC 13 does in long chains, and
 * a row would have other bits in a batch than alone. */
#ifdef __AVX512F__
INLINE vec more(vec sum, vec a, vec b) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
#elif defined(__FMA__)
INLINE vec more(vec sum, vec a, vec b) {
    __m256 s[2], x[2], y[2];
    memcpy(s, &sum, sizeof s);
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 2; i++) s[i] = _mm256_fmadd_ps(x[i], y[i], s[i]);
    memcpy(&sum, s, sizeof sum);
    return sum;
}
#elif defined(__aarch64__)
INLINE vec more(vec sum, vec a, vec b) {
    float32x4_t s[4], x[4], y[4];
    memcpy(s, &sum, sizeof s);
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 4; i++) s[i] = vfmaq_f32(s[i], x[i], y[i]);
    memcpy(&sum, s, sizeof sum);
    return sum;
}
#else
INLINE vec more(vec sum, vec a, vec b) { return sum + a * b; }
#endif

INLINE vec splat(float x) { return (vec){0} + x; }
INLINE vec load_f32(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f32(float *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE vec load_bf16(const uint16_t *p) {
    hvec h; vec v;
    memcpy(&h, p, sizeof h);
    uvec u = __builtin_convertvector(h, uvec) << 16;
    memcpy(&v, &u, sizeof v);
    return v;
}
INLINE vec load(const void *base, int64_t at, int type) {
    return type == BFLOAT16 ? load_bf16((const uint16_t *)base + at)
                            : load_f32((const float *)base + at);
}
/* Asks for what lies at p, into the second cache, which has room for more requests than the first: a core
 * of a Zen 4 reads weights at 18 GB/s where it read 11. */
INLINE void ask(const void *p) { __builtin_prefetch(p, 0, 2); }
INLINE uint16_t to_bf16(float x) { /* round to nearest, ties to even; NaN stays NaN */
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE hvec narrow(vec v) { /* to_bf16 of each lane */
    uvec u;
    memcpy(&u, &v, sizeof v);
    uvec is_nan = (uvec)((u & 0x7fffffff) > 0x7f800000);
    uvec rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    uvec quiet = (u >> 16) | 0x40;
    return __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), hvec);
}
INLINE void store(void *base, int64_t at, vec v, int type) {
    if (type == BFLOAT16) {
        hvec h = narrow(v);
        memcpy((uint16_t *)base + at, &h, sizeof h);
    } else store_f32((float *)base + at, v);
}

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif
#if __has_builtin(__builtin_shufflevector)
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
/* Halves stay in registers: a decode step takes a tenth less time than by memory. */
INLINE vec8 low_half(vec v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE vec8 high_half(vec v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE float sum(vec v) {
    vec8 eight = low_half(v) + high_half(v);
    vec4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
                __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    four += __builtin_shufflevector(four, four, 2, 3, 0, 1);
    return four[0] + four[1];
}
/* The same sums of four vectors, side by side: half the operations. */
INLINE void sum4(vec a, vec b, vec c, vec d, float *out) {
#define HALVES(x, y, at)                                                                                     \
    __builtin_shufflevector(x, y, at, at + 1, at + 2, at + 3, at + 4, at + 5, at + 6, at + 7, at + 16,       \
                            at + 17, at + 18, at + 19, at + 20, at + 21, at + 22, at + 23)
#define QUARTERS(x, y, at)                                                                                   \
    __builtin_shufflevector(x, y, at, at + 1, at + 2, at + 3, at + 8, at + 9, at + 10, at + 11, at + 16,     \
                            at + 17, at + 18, at + 19, at + 24, at + 25, at + 26, at + 27)
    const vec ab = HALVES(a, b, 0) + HALVES(a, b, 8), cd = HALVES(c, d, 0) + HALVES(c, d, 8);
    vec four = QUARTERS(ab, cd, 0) + QUARTERS(ab, cd, 4);
    four += __builtin_shufflevector(four, four, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    four += __builtin_shufflevector(four, four, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    const vec4 sums = __builtin_shufflevector(four, four, 0, 4, 8, 12);
    memcpy(out, &sums, sizeof sums);
#undef HALVES
#undef QUARTERS
}
#else
INLINE float sum(vec v) {
    float part[LANES], total[4] = {0, 0, 0, 0};
    memcpy(part, &v, sizeof v);
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 4; j++) total[j] += part[i + j];
    return (total[0] + total[2]) + (total[1] + total[3]);
}
INLINE void sum4(vec a, vec b, vec c, vec d, float *out) {
    out[0] = sum(a);
    out[1] = sum(b);
    out[2] = sum(c);
    out[3] = sum(d);
}
#endif

#ifdef __AVX512F__
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE float largest(vec v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINE vec larger(vec a, vec b) {
    const ivec first = a > b;
    ivec x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    x = (x & first) | (y & ~first);
    memcpy(&a, &x, sizeof a);
    return a;
}
INLINE float largest(vec v) {
    float part[LANES], best;
    memcpy(part, &v, sizeof v);
    best = part[0];
    for (int i = 1; i < LANES; i++) best = part[i] > best ? part[i] : best;
    return best;
}
#endif

/* 2^n times a polynomial in r, where x = n ln 2 + r; exactly 0 where `low` is set. */
INLINE vec scale_polynomial(vec r, ivec n, ivec low) {
    vec p = more(splat(1.3981999507e-3f), splat(1.9875691500e-4f), r);
    p = more(splat(8.3334519073e-3f), p, r);
    p = more(splat(4.1665795894e-2f), p, r);
    p = more(splat(1.6666665459e-1f), p, r);
    p = more(splat(5.0000001201e-1f), p, r);
    p = more(r, p * r, r) + 1.0f;
    ivec bits;
    memcpy(&bits, &p, sizeof p);
    bits += n << 23;
    bits &= ~low;
    memcpy(&p, &bits, sizeof p);
    return p;
}

/* exp for x <= 0; relative error below 2e-7, exactly 0 far below. */
INLINE vec exp_negative(vec x) {
    ivec low = x < -87.0f;
    ivec n = __builtin_convertvector(more(splat(-0.5f), x, splat(1.44269504f)), ivec);
    vec whole = __builtin_convertvector(n, vec);
    vec r = more(x, whole, splat(-0.693359375f));
    return scale_polynomial(more(r, whole, splat(2.12194440e-4f)), n, low);
}

/* x / (1 + exp(-x)), by the exponential that is at most 1. */
INLINE vec silu(vec x) {
    const ivec is_negative = x < 0.0f;
    ivec bits, mask = {0};
    memcpy(&bits, &x, sizeof bits);
    mask += INT32_MIN;
    bits |= mask; /* -|x| */
    vec below;
    memcpy(&below, &bits, sizeof below);
    const vec e = exp_negative(below), one = splat(1.0f);
    ivec up, down, chosen;
    memcpy(&up, &one, sizeof up);
    memcpy(&down, &e, sizeof down);
    chosen = (down & is_negative) | (up & ~is_negative);
    vec top;
    memcpy(&top, &chosen, sizeof top);
    return x * top / (one + e);
}

/* 2^x for x <= 0, as exp_negative. */
INLINE vec exp2_negative(vec x) {
#ifdef __AVX512F__
    const __m512 whole = _mm512_roundscale_ps((__m512)x, 8);
    const vec r = (x - (vec)whole) * 0.693147181f;
    vec p = more(splat(8.3334519073e-3f), splat(1.3981999507e-3f), r);
    p = more(splat(4.1665795894e-2f), p, r);
    p = more(splat(1.6666665459e-1f), p, r);
    p = more(splat(5.0000001201e-1f), p, r);
    p = more(r, p * r, r) + 1.0f;
    return (vec)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125.0f), 29), (__m512)p, whole);
#else
    ivec low = x < -125.0f;
    ivec n = __builtin_convertvector(x - 0.5f, ivec);
    return scale_polynomial((x - __builtin_convertvector(n, vec)) * 0.693147181f, n, low);
#endif
}

#endif
