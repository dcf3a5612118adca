// How far a loop moved what a token predicts: what infer/exit.py computes.

#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace {

// The length of the state, as a share; the KL of predictions; their entropy.
enum Measure : int64_t { OF_STATE, OF_PREDICTION, OF_ENTROPY };

// Whole numbers in the order of the floats, whatever they are: no NaN confuses it.
inline int32_t standing(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits ^ (bits >> 31 & std::numeric_limits<int32_t>::max());
}

// Places of the k largest of n scores, in their order. What the smallest of them stands at is found
// by halving: compilers count sixteen at a time, and nothing is moved.
inline void likeliest(const float* scores, int64_t n, int64_t k, int32_t* places) {
    int32_t low = std::numeric_limits<int32_t>::min(), high = std::numeric_limits<int32_t>::max();
    while (low < high) {  // at least k stand at `low` or higher, fewer than k above `high`
        const int32_t middle = static_cast<int32_t>((int64_t{low} + high + 1) >> 1);
        int32_t count = 0;
        for (int64_t i = 0; i < n; i++) count += standing(scores[i]) >= middle;
        if (count >= k) low = middle;
        else high = middle - 1;
        if (count == k) break;
    }
    int64_t equals = k;
    for (int64_t i = 0; i < n; i++) equals -= standing(scores[i]) > low;
    for (int64_t i = 0; i < n; i++) {
        int32_t here = standing(scores[i]);
        if (here > low || (here == low && equals-- > 0)) *places++ = static_cast<int32_t>(i);
    }
}

// Log-softmax in place, with room up to a multiple of LANES; what is there counts for nothing.
inline void to_log_shares(float* scores, int64_t length) {
    float largest = -INFINITY;
    for (int64_t s = 0; s < length; s++) largest = scores[s] > largest ? scores[s] : largest;
    for (int64_t s = length; s % LANES; s++) scores[s] = largest - 1000;
    Floats total = {};
    for (int64_t s = 0; s < length; s += LANES)
        total += exp_of_negative(load(scores + s) - largest);
    const float all = std::log(sum(total));
    for (int64_t s = 0; s < length; s += LANES) store(scores + s, load(scores + s) - largest - all);
}

// The mean of log(share) - log(other) over shares; of log(share) alone where there is no other.
inline float mean_surplus(const float* shares, const float* others, int64_t length) {
    Floats total = {};
    for (int64_t s = 0; s < length; s += LANES) {
        Floats share = load(shares + s);
        total = plus_product(total, exp_of_negative(share),
                             others ? share - load(others + s) : share);
    }
    return sum(total);
}

inline float moved_by(Measure measure, const float* now, const float* before, int64_t length) {
    if (measure == OF_PREDICTION) return mean_surplus(now, before, length);
    return std::fabs(mean_surplus(now, nullptr, length) - mean_surplus(before, nullptr, length));
}

}  // namespace
