// Products of a weight matrix with the tokens of a pass.
//
// Weights are stored in panels of PANEL rows: the first weight of each of these rows, then the
// second of each, and so on. A tile multiplies part of a panel with several tokens, whose sums fill
// the registers. A panel is read from memory once, in blocks that stay in the L1 cache while all
// tokens are multiplied with them, and during which the next block is fetched. Each sum is taken in
// the order of the inputs, in every tile.

#pragma once

#include <limits>
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

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
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
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
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
    int32_t size = 0;  // of the largest input: the bits of positive floats have the floats' order
    for (int64_t i = 0; i < n; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        size = std::max(size, bits & std::numeric_limits<int32_t>::max());
    }
    float largest;
    std::memcpy(&largest, &size, sizeof largest);
    if (!(largest < INFINITY)) {
        std::memset(q, 0, round_up(n, QUAD));
        return NAN;
    }
    const float inverse = largest > 0 ? 127 / largest : 0;
    const float factor = inverse < INFINITY ? inverse : 0;  // the smallest inputs count as 0
    for (int64_t i = 0; i < n; i++) {
        const int whole = static_cast<int>(x[i] * factor + to_whole - to_whole);
        q[i] = static_cast<int8_t>(whole + INPUT_OFFSET);
    }
    std::memset(q + n, 0, round_up(n, QUAD) - n);
    return largest / 127;
}

// --- weights in panels ----------------------------------------------------------------------------

struct FloatPanels {
    static constexpr int TOKENS = FLOAT_TOKENS;
    typedef float Input, Number;
    typedef Floats Sum;
    static int64_t bytes(int64_t in) { return in * PANEL * sizeof(float); }
    static int64_t steps(int64_t in) { return in; }
    static constexpr int64_t STEP_INPUTS = 1, STEP_BYTES = PANEL * sizeof(float);
    static void start(const char*, int64_t, float* sums) {
        std::memset(sums, 0, PANEL * sizeof(float));
    }
    static Floats broadcast_input(const float* x, int64_t k) { return broadcast(x[k]); }
    static Sum add(Floats w, Floats x, Sum total) { return multiply_add(w, x, total); }
    typedef Floats Weights;
};

struct Int8Panels {
    static constexpr int TOKENS = INT8_TOKENS;
    typedef int8_t Input;
    typedef int32_t Number;
    typedef Ints Sum;
    static constexpr int64_t STEP_INPUTS = QUAD, STEP_BYTES = PANEL * QUAD;
    static int64_t steps(int64_t in) { return (in + QUAD - 1) / QUAD; }
    // After the weights: minus INPUT_OFFSET times the sum of each row.
    static int64_t bytes(int64_t in) { return steps(in) * STEP_BYTES + PANEL * sizeof(int32_t); }
    static void start(const char* panel, int64_t in, int32_t* sums) {
        std::memcpy(sums, panel + steps(in) * STEP_BYTES, PANEL * sizeof(int32_t));
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

// Where to fetch the next block of weights from while a tile is computed. Four places of the block
// are fetched in turn: the CPU then follows four streams by itself, which takes three quarters of the
// time that one stream does.
struct Ahead {
    static constexpr int STREAMS = 4;
    const char* begin;
    int64_t stream_bytes, step_bytes;  // between the streams, and between the steps of a stream

    void fetch(int64_t k, int64_t bytes) const {
        const char* place = begin + k % STREAMS * stream_bytes + k / STREAMS * step_bytes;
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(place + line);
    }
};

// Add `steps` steps of P panels, `bytes` apart, to the sums [M, P * PANEL] of M tokens.
template <typename Kind, int M, int P>
void tile(const char* panels, int64_t bytes, int64_t steps, const typename Kind::Input* x,
          int64_t x_stride, typename Kind::Number* sums, const Ahead& ahead) {
    typename Kind::Sum total[M][P * VECTORS];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < P * VECTORS; v++)
            total[m][v] = load_as<typename Kind::Sum>(sums + m * P * PANEL + v * LANES);
    for (int64_t k = 0; k < steps; k++) {
        typename Kind::Weights w[P * VECTORS];
        for (int v = 0; v < P * VECTORS; v++)
            w[v] = in_register(load_as<typename Kind::Weights>(
                panels + v / VECTORS * bytes + k * Kind::STEP_BYTES + v % VECTORS * sizeof(Floats)));
        if (P == 1) ahead.fetch(k, Kind::STEP_BYTES);
        for (int m = 0; m < M; m++) {
            const auto input = Kind::broadcast_input(x + m * x_stride, k);
            for (int v = 0; v < P * VECTORS; v++) total[m][v] = Kind::add(w[v], input, total[m][v]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < P * VECTORS; v++)
            store(sums + m * P * PANEL + v * LANES, total[m][v]);
}

constexpr int GEMV_PANELS = 4;  // for one token: four streams, and additions need not wait
constexpr int64_t BLOCK_BYTES = 16 << 10;  // half of a small L1 cache
constexpr int64_t CHUNK = 128;  // tokens whose sums are kept at a time

template <typename Kind>
using Tile = void (*)(const char*, int64_t, int64_t, const typename Kind::Input*, int64_t,
                      typename Kind::Number*, const Ahead&);

template <typename Kind, int... M>
constexpr Tile<Kind> tile_of(int64_t tokens, std::integer_sequence<int, M...>) {
    constexpr Tile<Kind> tiles[] = {tile<Kind, M + 1, 1>...};
    return tiles[tokens - 1];
}

// The sums of one panel with `tokens` tokens.
template <typename Kind>
void multiply_panel(const char* panel, int64_t in, const typename Kind::Input* x, int64_t x_stride,
                    int64_t tokens, typename Kind::Number* sums) {
    constexpr int64_t block_steps = BLOCK_BYTES / Kind::STEP_BYTES;
    const int64_t steps = Kind::steps(in), blocks = (steps + block_steps - 1) / block_steps;
    const int64_t groups = (tokens + Kind::TOKENS - 1) / Kind::TOKENS;
    const int64_t fetching = std::min<int64_t>(groups, 4);  // groups that share the fetching
    for (int64_t block = 0; block < blocks; block++) {  // blocks and groups of nearly equal size
        const int64_t first = steps * block / blocks, count = steps * (block + 1) / blocks - first;
        const int64_t bytes = count * Kind::STEP_BYTES, stream_bytes = bytes / Ahead::STREAMS;
        const char* weights = panel + first * Kind::STEP_BYTES;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t token = tokens * group / groups, last = tokens * (group + 1) / groups;
            const int64_t part = std::min(group, fetching - 1);
            const Ahead ahead{weights + bytes + stream_bytes * part / fetching, stream_bytes,
                              (Kind::STEP_BYTES + fetching - 1) / fetching};
            auto run = tile_of<Kind>(last - token, std::make_integer_sequence<int, Kind::TOKENS>());
            run(weights, 0, count, x + token * x_stride + first * Kind::STEP_INPUTS, x_stride,
                sums + token * PANEL, ahead);
        }
    }
}

// y = x W^T for x [tokens, in]. `put(token, row, count, values)` receives consecutive rows.
// `scales` has the scale of each token's inputs, or is null.
template <typename Kind, typename Put>
void multiply(const Team& team, const Matrix& a, const typename Kind::Input* x, int64_t x_stride,
              const float* scales, int64_t tokens, Put put) {
    typedef typename Kind::Number Number;
    const int64_t bytes = Kind::bytes(a.in);
    const char* panels = static_cast<const char*>(a.panels);
    Number sums[CHUNK * PANEL];
    auto put_panel = [&](int64_t token, int64_t panel, const Number* y) {
        const int64_t row = panel * PANEL;
        float scaled[PANEL];
        const float* values = scaled;
        if constexpr (std::is_same_v<Number, float>) {
            values = y;
        } else {
            const float* scale = a.scale + row;
            for (int64_t r = 0; r < std::min<int64_t>(PANEL, a.out - row); r++)
                scaled[r] = static_cast<float>(y[r]) * scales[token] * scale[r];
        }
        if (row + PANEL <= a.out) put(token, row, PANEL, values);  // with a constant, for speed
        else put(token, row, a.out - row, values);
    };
    auto multiply_one = [&](int64_t panel) {
        for (int64_t first = 0; first < tokens; first += CHUNK) {
            const int64_t count = std::min(CHUNK, tokens - first);
            const char* weights = panels + panel * bytes;
            for (int64_t t = 0; t < count; t++) Kind::start(weights, a.in, sums + t * PANEL);
            multiply_panel<Kind>(weights, a.in, x + first * x_stride, x_stride, count, sums);
            for (int64_t t = 0; t < count; t++) put_panel(first + t, panel, sums + t * PANEL);
        }
    };
    const int64_t all = panel_count(a.out);
    if (tokens > 1 || all < GEMV_PANELS * team.size) {
        team.for_each(all, multiply_one);
        return;
    }
    team.for_each((all + GEMV_PANELS - 1) / GEMV_PANELS, [&](int64_t group) {
        int64_t panel = group * GEMV_PANELS;
        if (panel + GEMV_PANELS > all) {
            for (; panel < all; panel++) multiply_one(panel);
            return;
        }
        for (int p = 0; p < GEMV_PANELS; p++)
            Kind::start(panels + (panel + p) * bytes, a.in, sums + p * PANEL);
        tile<Kind, 1, GEMV_PANELS>(panels + panel * bytes, bytes, Kind::steps(a.in), x, x_stride, sums,
                                   Ahead{});
        for (int p = 0; p < GEMV_PANELS; p++) put_panel(0, panel + p, sums + p * PANEL);
    });
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
