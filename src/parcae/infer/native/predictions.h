// The KL divergence of a prediction from that of the loop before, as in infer/exit.py.

#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace {

// Integers in the order of the floats; defined for NaN too.
inline int32_t ordered_bits(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits ^ (bits >> 31 & std::numeric_limits<int32_t>::max());
}

// Indices of the k largest of n scores, in increasing order. The k-th largest value is found by
// bisection: compilers vectorise the counting, and no score is moved.
inline void top_k(const float* scores, int64_t n, int64_t k, int32_t* indices) {
    int32_t low = std::numeric_limits<int32_t>::min(), high = std::numeric_limits<int32_t>::max();
    while (low < high) {  // at least k values are >= low, fewer than k are > high
        const int32_t middle = static_cast<int32_t>((int64_t{low} + high + 1) >> 1);
        int32_t count = 0;
        for (int64_t i = 0; i < n; i++) count += ordered_bits(scores[i]) >= middle;
        if (count >= k) low = middle;
        else high = middle - 1;
        if (count == k) break;
    }
    int64_t equals = k;
    for (int64_t i = 0; i < n; i++) equals -= ordered_bits(scores[i]) > low;
    for (int64_t i = 0; i < n; i++) {
        int32_t value = ordered_bits(scores[i]);
        if (value > low || (value == low && equals-- > 0)) *indices++ = static_cast<int32_t>(i);
    }
}

// Log-softmax in place; the padding up to a multiple of LANES gets probability 0.
inline void log_softmax(float* scores, int64_t length) {
    float largest = -INFINITY;
    for (int64_t s = 0; s < length; s++) largest = scores[s] > largest ? scores[s] : largest;
    for (int64_t s = length; s % LANES; s++) scores[s] = largest - 1000;
    Floats total = {};
    for (int64_t s = 0; s < length; s += LANES)
        total += exp_of_negative(load(scores + s) - largest);
    const float log_total = std::log(sum(total));
    for (int64_t s = 0; s < length; s += LANES)
        store(scores + s, load(scores + s) - largest - log_total);
}

// KL(p || q) from log-probabilities.
inline float kl_divergence(const float* log_p, const float* log_q, int64_t length) {
    Floats total = {};
    for (int64_t s = 0; s < length; s += LANES) {
        Floats p = load(log_p + s);
        total = multiply_add(exp_of_negative(p), p - load(log_q + s), total);
    }
    return sum(total);
}

}  // namespace
