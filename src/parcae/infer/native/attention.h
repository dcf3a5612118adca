// Attention of some heads of one token over the keys and values of its row, which are floats or
// BFloat16 (`Element`); sums are always floats.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

constexpr int64_t KEY_BLOCK = 8;  // keys read for all heads before the next: sequential memory
template <typename Element>
constexpr int64_t LINE = 64 / sizeof(Element);  // elements of a cache line

// Rotary embedding of one head in place, then division by its norm unless `floor` is negative.
inline void apply_rope(float* head, const float* phases, int64_t head_dim, float floor) {
    for (int64_t i = 0; i < head_dim; i += 2) {
        float a = head[i], b = head[i + 1], c = phases[i], s = phases[i + 1];
        head[i] = a * c - b * s;
        head[i + 1] = b * c + a * s;
    }
    if (floor < 0) return;
    float factor = 1 / std::sqrt(dot(head, head, head_dim) + floor);
    for (int64_t i = 0; i < head_dim; i++) head[i] *= factor;
}

// The scores of KEYS keys, in steps of a vector: enough sums that additions need not wait.
template <int KEYS, typename Element>
inline void score_keys(const float* q, const Element* keys, int64_t stride, int64_t head_dim,
                       float scale, float* scores) {
    const int64_t whole = head_dim / LANES * LANES, rest = head_dim - whole;
    Floats total[KEYS] = {};
    for (int64_t i = 0; i < whole; i += LANES) {
        const Floats query = in_register(load(q + i));
        for (int k = 0; k < KEYS; k++) {
            const Element* channels = keys + k * stride + i;
            if (i % LINE<Element> == 0) __builtin_prefetch(channels + KEY_BLOCK * stride);
            total[k] = multiply_add(query, load(channels), total[k]);
        }
    }
    for (int k = 0; k < KEYS && rest; k++)
        total[k] = multiply_add(load_some(q + whole, rest),
                                load_some(keys + k * stride + whole, rest), total[k]);
    for (int k = 0; k < KEYS; k += 4)
        store(scores + k, sums(total[k], total[k + 1], total[k + 2], total[k + 3]) * scale);
}

template <typename Element>
inline void score(const float* q, const Element* keys, int64_t stride, int64_t count,
                  int64_t head_dim, float scale, float* scores) {
    int64_t s = 0;
    for (; s + 8 <= count; s += 8)
        score_keys<8>(q, keys + s * stride, stride, head_dim, scale, scores + s);
    for (; s + 4 <= count; s += 4)
        score_keys<4>(q, keys + s * stride, stride, head_dim, scale, scores + s);
    for (; s < count; s++) scores[s] = dot(q, keys + s * stride, head_dim) * scale;
}

// Softmax in place; `scores` is padded to a multiple of LANES.
inline void softmax(float* scores, int64_t length) {
    for (int64_t s = length; s % LANES; s++) scores[s] = -INFINITY;
    const float largest = largest_of(scores, length);
    Floats total = {};
    for (int64_t s = 0; s < length; s += LANES) {
        Floats weight = exp_of_negative(load(scores + s) - largest);
        store(scores + s, weight);
        total += weight;
    }
    float factor = 1 / sum(total);
    for (int64_t s = 0; s < length; s++) scores[s] *= factor;
}

// out += the weighted sum of the values, for V vectors of a head.
template <int V, typename Element>
inline void weighted_sum_vectors(const Element* values, int64_t stride, const float* weights,
                                 int64_t count, float* out) {
    Floats total[V];
    for (int v = 0; v < V; v++) total[v] = load(out + v * LANES);
    for (int64_t s = 0; s < count; s++)
        for (int v = 0; v < V; v++) {
            const Element* channels = values + s * stride + v * LANES;
            if (v * LANES % LINE<Element> == 0) __builtin_prefetch(channels + KEY_BLOCK * stride);
            total[v] = multiply_add(broadcast(weights[s]), load(channels), total[v]);
        }
    for (int v = 0; v < V; v++) store(out + v * LANES, total[v]);
}

template <typename Element>
inline void weighted_sum(const Element* values, int64_t stride, const float* weights, int64_t count,
                         int64_t head_dim, float* out) {
    int64_t i = 0;
    for (; i + 8 * LANES <= head_dim; i += 8 * LANES)
        weighted_sum_vectors<8>(values + i, stride, weights, count, out + i);
    for (; i + 4 * LANES <= head_dim; i += 4 * LANES)
        weighted_sum_vectors<4>(values + i, stride, weights, count, out + i);
    for (; i + LANES <= head_dim; i += LANES)
        weighted_sum_vectors<1>(values + i, stride, weights, count, out + i);
    for (; i < head_dim; i++)
        for (int64_t s = 0; s < count; s++)
            out[i] += weights[s] * load_some(values + s * stride + i, 1)[0];
}

struct Heads {
    int64_t begin, end;  // query heads
    int64_t group;       // query heads per key-value head
    int64_t head_dim;
    int64_t stride;      // from a position to the next; values follow keys by half of it
    float scale;
};

// q and out are [heads, head_dim]; `row` has the keys and values from position 0 on.
// `scores` has `scores_stride` floats per head.
template <typename Element>
inline void attend(const Heads& heads, const float* q, const Element* row, int64_t length,
                   float* scores, int64_t scores_stride, float* out) {
    const int64_t E = heads.head_dim, stride = heads.stride;
    auto for_blocks = [&](auto function) {
        for (int64_t first = 0; first < length; first += KEY_BLOCK) {
            int64_t count = std::min(KEY_BLOCK, length - first);
            for (int64_t h = heads.begin; h < heads.end; h++)
                function(h, row + first * stride + h / heads.group * E, count,
                         scores + (h - heads.begin) * scores_stride + first);
        }
    };
    for_blocks([&](int64_t h, const Element* keys, int64_t count, float* block) {
        score(q + h * E, keys, stride, count, E, heads.scale, block);
    });
    std::memset(out + heads.begin * E, 0, (heads.end - heads.begin) * E * sizeof(float));
    for (int64_t h = 0; h < heads.end - heads.begin; h++) softmax(scores + h * scores_stride, length);
    for_blocks([&](int64_t h, const Element* keys, int64_t count, float* weights) {
        weighted_sum(keys + stride / 2, stride, weights, count, E, out + h * E);
    });
}

}  // namespace
