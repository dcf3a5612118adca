// Vectors of sixteen floats. Sums are always taken in the same order, so the results of a token do
// not depend on the other tokens of its pass.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

typedef float Floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Quarter __attribute__((vector_size(16), aligned(4)));
constexpr int LANES = 16;

inline Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }

inline Floats load(const int8_t* p) {
#ifdef __AVX512F__
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return reinterpret_cast<Floats>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#else
    Floats values;
    for (int i = 0; i < LANES; i++) values[i] = p[i];
    return values;
#endif
}

// The first n < LANES, then zeros.
template <typename T>
inline Floats load_some(const T* p, int64_t n) {
    Floats values = {};
    for (int64_t i = 0; i < n; i++) values[i] = p[i];
    return values;
}

template <typename Value>
inline Value load_as(const float* p) {
    Value value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

template <typename Value>
inline void store(float* p, Value value) {
    std::memcpy(p, &value, sizeof value);
}

// total + a * b, rounded once if the CPU has such an instruction. Explicit, because the compiler
// would decide it separately for each use.
inline Floats plus_product(Floats total, Floats a, Floats b) {
#ifdef __AVX512F__
    return reinterpret_cast<Floats>(_mm512_fmadd_ps(
        reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(total)));
#else
    return total + a * b;
#endif
}

// Within quarters first, then over quarters, in the order of `sums`.
inline float sum(Floats v) {
    float part[4];
    for (int q = 0; q < 4; q++) part[q] = (v[4 * q] + v[4 * q + 2]) + (v[4 * q + 1] + v[4 * q + 3]);
    return (part[0] + part[2]) + (part[1] + part[3]);
}

// The sums of four vectors at once, in a third of the instructions.
inline Quarter sums(Floats a, Floats b, Floats c, Floats d) {
#ifdef __AVX512F__
    auto fold = [](__m512 low, __m512 high) { return _mm512_add_ps(low, high); };
    auto pairs = [&](Floats one, Floats two) {
        auto x = reinterpret_cast<__m512>(one), y = reinterpret_cast<__m512>(two);
        return _mm512_castps_pd(fold(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y)));
    };
    __m512d ab = pairs(a, b), cd = pairs(c, d);
    __m512 all = fold(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                      _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm256_castpd_ps(_mm512_extractf64x4_pd(
                                                                 _mm512_castps_pd(all), 1)));
    return reinterpret_cast<Quarter>(
        _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
    return Quarter{sum(a), sum(b), sum(c), sum(d)};
#endif
}

inline float dot(const float* a, const float* b, int64_t n) {
    Floats total = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) total = plus_product(total, load(a + i), load(b + i));
    if (i < n) total = plus_product(total, load_some(a + i, n - i), load_some(b + i, n - i));
    return sum(total);
}

// e^x for x <= 0, to seven digits: 2^n times a polynomial on [-log(2)/2, log(2)/2].
inline Floats exp_of_negative(Floats x) {
    constexpr float to_whole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer n
    x = x < -87.0f ? -87.0f - Floats{} : x;
    Floats shifted = x * 1.44269504f + to_whole, whole = shifted - to_whole;
    Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Floats p = r * 1.9875691e-4f + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 5.0000001e-1f;
    p = p * r * r + r + 1.0f;
    Ints power = reinterpret_cast<Ints>(shifted) << 23;
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(p) + power);
}

}  // namespace
