// Products of a weight matrix with the tokens of a pass.
//
// Weights are stored in panels of PANEL rows: the first weight of each of these rows, then the
// second of each, and so on. A tile multiplies panels with several tokens, whose sums fill the
// registers; a panel is read from memory once, and for further tokens from the cache. Each sum is
// taken in the order of the inputs, in every tile.

#pragma once

#include <type_traits>
#include <utility>

#include "team.h"
#include "vectors.h"

extern "C" {

struct Matrix {          // [out, in]
    const void* panels;  // null: no matrix
    const float* scale;  // one per row of int8 weights; null: the weights are floats
    int64_t out, in;
};

}  // extern "C"

namespace {

// A tile of M tokens and P panels needs (M + 1) P VECTORS + 1 registers.
constexpr int VECTORS = LANES == 4 && REGISTERS == 32 ? 4 : 2;
constexpr int PANEL = VECTORS * LANES;
constexpr int FLOAT_TOKENS = (REGISTERS - VECTORS - 1) / VECTORS;
constexpr int64_t QUAD = 4;  // int8 weights of a row that are stored side by side

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// --- int8: integer dot products of four weights and four inputs ---------------------------------

typedef int8_t Bytes __attribute__((vector_size(4 * LANES)));

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int INT8_TOKENS = FLOAT_TOKENS;
constexpr int INPUT_OFFSET = 128;  // VNNI multiplies unsigned inputs with signed weights
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int INT8_TOKENS = FLOAT_TOKENS;
constexpr int INPUT_OFFSET = 0;
#else
constexpr int INT8_TOKENS = (REGISTERS - 7) / VECTORS;
constexpr int INPUT_OFFSET = 0;
#endif

// total[lane] + the product of four weights of each lane with the same four inputs.
inline Ints multiply_add_bytes(Bytes w, int32_t inputs, Ints total) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, _mm512_set1_epi32(inputs), (__m512i)w);
#elif defined(__AVX512BW__)
    const __m512i x = _mm512_set1_epi32(inputs), weights = (__m512i)w;
    const __m512i by_sign =
        _mm512_mask_sub_epi8(weights, _mm512_movepi8_mask(x), _mm512_setzero_si512(), weights);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(x), by_sign);
    return total + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, _mm256_set1_epi32(inputs), (__m256i)w);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // |x| times w with the sign of x: no sum of two products exceeds 2 * 127 * 127 < 2^15.
    const __m256i x = _mm256_set1_epi32(inputs);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8((__m256i)w, x));
    return total + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Ints)vdotq_s32((int32x4_t)total, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(inputs)));
#elif defined(__aarch64__)
    const int8x8_t x = vreinterpret_s8_s32(vdup_n_s32(inputs));
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8((int8x16_t)w), x));
    const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8((int8x16_t)w), x));
    return (Ints)vaddq_s32((int32x4_t)total, vpaddq_s32(low, high));
#else
    int8_t x[QUAD];
    std::memcpy(x, &inputs, sizeof x);
    for (int lane = 0; lane < LANES; lane++)
        for (int k = 0; k < QUAD; k++) total[lane] += w[QUAD * lane + k] * x[k];
    return total;
#endif
}

// A token's inputs as 8-bit integers, padded to a multiple of QUAD, and their scale. The scale of
// inputs that are not finite is NaN.
inline float quantise(const float* x, int64_t n, int8_t* q) {
    constexpr float to_whole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    float largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        const float size = std::fabs(x[i]);
        largest = size > largest ? size : largest;
        finite &= size < INFINITY;
    }
    const float factor = finite && largest > 0 ? 127 / largest : 0;
    for (int64_t i = 0; i < n; i++) {
        const float scaled = finite ? x[i] * factor : 0;
        q[i] = static_cast<int8_t>(static_cast<int>(scaled + to_whole - to_whole) + INPUT_OFFSET);
    }
    std::memset(q + n, 0, round_up(n, QUAD) - n);
    return finite ? largest / 127 : NAN;
}

// --- weights in panels ----------------------------------------------------------------------------

struct FloatPanels {
    static constexpr int TOKENS = FLOAT_TOKENS;
    typedef float Input;
    typedef Floats Sum;
    static int64_t bytes(int64_t in) { return in * PANEL * sizeof(float); }
    static int64_t steps(int64_t in) { return in; }
    static constexpr int64_t STEP_BYTES = PANEL * sizeof(float);
    static Sum first(const char*, int64_t, int) { return Sum{}; }
    static Floats broadcast_input(const float* x, int64_t k) { return broadcast(x[k]); }
    static Sum add(Floats w, Floats x, Sum total) { return multiply_add(w, x, total); }
    typedef Floats Weights;
};

struct Int8Panels {
    static constexpr int TOKENS = INT8_TOKENS;
    typedef int8_t Input;
    typedef Ints Sum;
    static constexpr int64_t STEP_BYTES = PANEL * QUAD;
    static int64_t steps(int64_t in) { return (in + QUAD - 1) / QUAD; }
    // After the weights: minus INPUT_OFFSET times the sum of each row.
    static int64_t bytes(int64_t in) { return steps(in) * STEP_BYTES + PANEL * sizeof(int32_t); }
    static Sum first(const char* panel, int64_t in, int vector) {
        return load_as<Ints>(panel + steps(in) * STEP_BYTES + vector * sizeof(Ints));
    }
    static int32_t broadcast_input(const int8_t* x, int64_t k) { return load_as<int32_t>(x + k * QUAD); }
    static Sum add(Bytes w, int32_t x, Sum total) { return multiply_add_bytes(w, x, total); }
    typedef Bytes Weights;
};

inline int64_t panel_count(int64_t out) { return (out + PANEL - 1) / PANEL; }

inline void pack(const float* weights, int64_t out, int64_t in, float* panels) {
    for (int64_t row = 0; row < panel_count(out) * PANEL; row++) {
        float* target = panels + row / PANEL * PANEL * in + row % PANEL;
        for (int64_t i = 0; i < in; i++) target[i * PANEL] = row < out ? weights[row * in + i] : 0;
    }
}

inline void pack(const int8_t* weights, int64_t out, int64_t in, int8_t* panels) {
    const int64_t bytes = Int8Panels::bytes(in), steps = Int8Panels::steps(in);
    std::memset(panels, 0, panel_count(out) * bytes);
    for (int64_t row = 0; row < out; row++) {
        int8_t* panel = panels + row / PANEL * bytes;
        int32_t sum = 0;
        for (int64_t i = 0; i < in; i++) {
            panel[(i / QUAD * PANEL + row % PANEL) * QUAD + i % QUAD] = weights[row * in + i];
            sum += weights[row * in + i];
        }
        sum *= -INPUT_OFFSET;
        std::memcpy(panel + steps * Int8Panels::STEP_BYTES + row % PANEL * sizeof sum, &sum, sizeof sum);
    }
}

// --- products -------------------------------------------------------------------------------------

// The sums of P panels with M tokens: y[m][p * PANEL + row].
template <typename Kind, int M, int P>
void tile(const char* panels, int64_t in, const typename Kind::Input* x, int64_t x_stride,
          typename Kind::Sum* y) {
    const int64_t bytes = Kind::bytes(in), steps = Kind::steps(in);
    typename Kind::Sum total[M][P][VECTORS];
    for (int p = 0; p < P; p++)
        for (int v = 0; v < VECTORS; v++)
            for (int m = 0; m < M; m++) total[m][p][v] = Kind::first(panels + p * bytes, in, v);
    for (int64_t k = 0; k < steps; k++) {
        typename Kind::Weights w[P][VECTORS];
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++)
                w[p][v] = load_as<typename Kind::Weights>(panels + p * bytes + k * Kind::STEP_BYTES +
                                                          v * sizeof(Floats));
        for (int m = 0; m < M; m++) {
            const auto input = Kind::broadcast_input(x + m * x_stride, k);
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++)
                    total[m][p][v] = Kind::add(w[p][v], input, total[m][p][v]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) y[(m * P + p) * VECTORS + v] = total[m][p][v];
}

constexpr int GEMV_PANELS = 4;  // for one token: enough sums that additions need not wait

template <typename Kind>
using Tile = void (*)(const char*, int64_t, const typename Kind::Input*, int64_t, typename Kind::Sum*);

template <typename Kind, int... M>
constexpr Tile<Kind> tile_of(int tokens, std::integer_sequence<int, M...>) {
    constexpr Tile<Kind> tiles[] = {tile<Kind, M + 1, 1>...};
    return tiles[tokens - 1];
}

// y = x W^T for x [tokens, in]. `put(token, row, count, values)` receives consecutive rows.
// `scales` has the scale of each token's inputs, or is null.
template <typename Kind, typename Put>
void multiply(const Team& team, const Matrix& a, const typename Kind::Input* x, int64_t x_stride,
              const float* scales, int64_t tokens, Put put) {
    const int64_t bytes = Kind::bytes(a.in);
    const char* panels = static_cast<const char*>(a.panels);
    typename Kind::Sum sums[std::max(GEMV_PANELS, Kind::TOKENS) * VECTORS];
    float values[GEMV_PANELS * PANEL];
    auto put_sums = [&](int64_t token, int64_t row, int64_t count, const typename Kind::Sum* y) {
        count = std::min(count, a.out - row);
        if constexpr (std::is_same_v<Kind, FloatPanels>) {
            std::memcpy(values, y, count * sizeof(float));
        } else {
            int32_t whole[GEMV_PANELS * PANEL];
            std::memcpy(whole, y, count * sizeof(int32_t));
            for (int64_t r = 0; r < count; r++)
                values[r] = static_cast<float>(whole[r]) * scales[token] * a.scale[row + r];
        }
        put(token, row, count, values);
    };
    int64_t panel, end;
    team.share(panel_count(a.out), 1, panel, end);
    for (; tokens == 1 && panel + GEMV_PANELS <= end; panel += GEMV_PANELS) {
        tile<Kind, 1, GEMV_PANELS>(panels + panel * bytes, a.in, x, x_stride, sums);
        put_sums(0, panel * PANEL, GEMV_PANELS * PANEL, sums);
    }
    const int64_t groups = (tokens + Kind::TOKENS - 1) / Kind::TOKENS;  // of nearly equal size
    for (; panel < end; panel++)
        for (int64_t group = 0; group < groups; group++) {
            int64_t token = tokens * group / groups, last = tokens * (group + 1) / groups;
            auto run = tile_of<Kind>(last - token, std::make_integer_sequence<int, Kind::TOKENS>());
            run(panels + panel * bytes, a.in, x + token * x_stride, x_stride, sums);
            for (int64_t m = 0; m < last - token; m++)
                put_sums(token + m, panel * PANEL, PANEL, sums + m * VECTORS);
        }
}

// Working memory for the inputs of int8 products.
struct QuantisedInputs {
    int8_t* values;
    float* scales;
};

template <typename Put>
void gemm(const Team& team, const Matrix& a, const float* x, int64_t tokens,
          const QuantisedInputs& quantised, Put put) {
    if (!a.scale) {
        multiply<FloatPanels>(team, a, x, a.in, nullptr, tokens, put);
        return;
    }
    const int64_t stride = round_up(a.in, QUAD);
    for (int64_t t = team.rank; t < tokens; t += team.size)
        quantised.scales[t] = quantise(x + t * a.in, a.in, quantised.values + t * stride);
    team.sync();
    multiply<Int8Panels>(team, a, quantised.values, stride, quantised.scales, tokens, put);
}

}  // namespace
