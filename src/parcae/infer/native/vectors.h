// Vectors of floats, as wide as the CPU's registers. Sums are always taken in the same order, so
// the results of a token do not depend on the other tokens of its pass.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
#define ISA "AVX-512"
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
#define ISA "AVX2"
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
#define ISA "NEON"
constexpr int LANES = 4, REGISTERS = 32;
#else
#define ISA "128-bit vectors"
constexpr int LANES = 4, REGISTERS = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef float Quad __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

struct BFloat16 {  // the upper half of a float
    uint16_t bits;
};

template <typename Vector>
inline Vector load_as(const void* p) {
    Vector value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

inline Floats load(const float* p) { return load_as<Floats>(p); }

inline Floats load(const BFloat16* p) {
#if defined(__AVX512F__)  // GCC would convert in two halves
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(p)), 16);
#else
    return (Floats)(__builtin_convertvector(load_as<Halves>(p), Words) << 16);
#endif
}

template <typename Vector>
inline void store(void* p, Vector value) {
    std::memcpy(p, &value, sizeof value);
}

inline Floats broadcast(float x) { return x - Floats{}; }

// The same value, which the compiler then does not read from memory again for every use.
template <typename Vector>
inline Vector in_register(Vector value) {
#if defined(__x86_64__)
    asm("" : "+x"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
    return value;
}

// The first n < LANES, then zeros.
template <typename Element>
inline Floats load_some(const Element* p, int64_t n) {
    Element values[LANES] = {};
    std::memcpy(values, p, n * sizeof(Element));
    return load(values);
}

inline void convert(const float* from, int64_t n, float* to) {
    std::memcpy(to, from, n * sizeof(float));
}

// To the nearest, ties to even, as PyTorch rounds.
inline void convert(const float* from, int64_t n, BFloat16* to) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = load_as<uint32_t>(from + i);
        const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
        to[i].bits = std::isnan(from[i]) ? 0x7fc0 : rounded >> 16;
    }
}

// a * b + total, rounded once if the CPU has such an instruction. Explicit, because a compiler
// would decide it separately for each use.
inline Floats multiply_add(Floats a, Floats b, Floats total) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)total);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)total, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + total;
#endif
}

// The sum of the vector's quads.
inline Quad fold(Floats v) {
    Quad part[LANES / 4];
    std::memcpy(part, &v, sizeof part);
    for (int width = LANES / 8; width > 0; width /= 2)
        for (int q = 0; q < width; q++) part[q] += part[q + width];
    return part[0];
}

inline float sum(Floats v) {
    Quad q = fold(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

// The sums of four vectors at once, in the order of `sum`.
inline Quad sums(Floats v0, Floats v1, Floats v2, Floats v3) {
    Quad a = fold(v0), b = fold(v1), c = fold(v2), d = fold(v3);
    Quad ab = Quad{a[0], b[0], a[1], b[1]} + Quad{a[2], b[2], a[3], b[3]};
    Quad cd = Quad{c[0], d[0], c[1], d[1]} + Quad{c[2], d[2], c[3], d[3]};
    return Quad{ab[0], ab[1], cd[0], cd[1]} + Quad{ab[2], ab[3], cd[2], cd[3]};
}

template <typename Element>
inline float dot(const float* a, const Element* b, int64_t n) {
    Floats total = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) total = multiply_add(load(a + i), load(b + i), total);
    if (i < n) total = multiply_add(load_some(a + i, n - i), load_some(b + i, n - i), total);
    return sum(total);
}

// The largest of n values, or of n rounded up to a multiple of LANES.
inline float largest_of(const float* values, int64_t n) {
    Floats largest = load(values);
    for (int64_t i = LANES; i < n; i += LANES) {
        const Floats next = load(values + i);
        largest = next > largest ? next : largest;
    }
    float result = largest[0];
    for (int lane = 1; lane < LANES; lane++) result = largest[lane] > result ? largest[lane] : result;
    return result;
}

// e^x for x <= 0, to seven digits: 2^n times a polynomial on [-log(2)/2, log(2)/2].
inline Floats exp_of_negative(Floats x) {
    constexpr float to_whole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer n
    auto plus = [](Floats product, Floats r, float c) {
        return multiply_add(product, r, broadcast(c));
    };
    x = x < -87.0f ? broadcast(-87.0f) : x;
    Floats shifted = plus(x, broadcast(1.44269504f), to_whole), whole = shifted - to_whole;
    Floats r = multiply_add(whole, broadcast(-0.693359375f), x);
    r = multiply_add(whole, broadcast(2.12194440e-4f), r);
    Floats p = plus(r, broadcast(1.9875691e-4f), 1.3981999e-3f);
    p = plus(p, r, 8.3334519e-3f);
    p = plus(p, r, 4.1665796e-2f);
    p = plus(p, r, 1.6666665e-1f);
    p = plus(p, r, 5.0000001e-1f);
    p = multiply_add(p * r, r, r + 1.0f);
    Ints power = (Ints)shifted << 23;
    return (Floats)((Ints)p + power);
}

}  // namespace
