// Some heads of one token over the keys and values of its row.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

constexpr int64_t KEYS_AT_ONCE = 16;  // of which all heads are read before the next: memory in order

// Turn the pairs of a head by its position's phases, then make it a unit vector.
inline void turn(float* head, const float* phases, int64_t head_dim, float floor) {
    for (int64_t i = 0; i < head_dim; i += 2) {
        float a = head[i], b = head[i + 1], c = phases[i], s = phases[i + 1];
        head[i] = a * c - b * s;
        head[i + 1] = b * c + a * s;
    }
    if (floor < 0) return;
    float factor = 1 / std::sqrt(dot(head, head, head_dim) + floor);
    for (int64_t i = 0; i < head_dim; i++) head[i] *= factor;
}

inline void score(const float* q, const float* keys, int64_t stride, int64_t count,
                  int64_t head_dim, float scale, float* scores) {
    const int64_t whole = head_dim / LANES * LANES;
    int64_t s = 0;
    for (; s + 4 <= count; s += 4) {
        const float* key = keys + s * stride;
        Floats total[4] = {};
        for (int64_t i = 0; i < whole; i += LANES)
            for (int k = 0; k < 4; k++) {
                const float* here = key + k * stride + i;
                __builtin_prefetch(here + KEYS_AT_ONCE * stride);
                total[k] = plus_product(total[k], load(q + i), load(here));
            }
        const int64_t rest = head_dim - whole;
        for (int k = 0; k < 4 && rest; k++)
            total[k] = plus_product(total[k], load_some(q + whole, rest),
                                    load_some(key + k * stride + whole, rest));
        store(scores + s, sums(total[0], total[1], total[2], total[3]) * scale);
    }
    for (; s < count; s++) scores[s] = dot(q, keys + s * stride, head_dim) * scale;
}

// Softmax in place, with room up to a multiple of LANES.
inline void soften(float* scores, int64_t length) {
    float largest = -INFINITY;
    for (int64_t s = 0; s < length; s++) largest = scores[s] > largest ? scores[s] : largest;
    for (int64_t s = length; s % LANES; s++) scores[s] = -INFINITY;
    Floats total = {};
    for (int64_t s = 0; s < length; s += LANES) {
        Floats share = exp_of_negative(load(scores + s) - largest);
        store(scores + s, share);
        total += share;
    }
    float factor = 1 / sum(total);
    for (int64_t s = 0; s < length; s++) scores[s] *= factor;
}

// out += the values, weighted, for V vectors of a head.
template <int V>
inline void weigh_some(const float* values, int64_t stride, const float* shares, int64_t count,
                       float* out) {
    Floats total[V];
    for (int v = 0; v < V; v++) total[v] = load(out + v * LANES);
    for (int64_t s = 0; s < count; s++)
        for (int v = 0; v < V; v++) {
            const float* here = values + s * stride + v * LANES;
            __builtin_prefetch(here + KEYS_AT_ONCE * stride);
            total[v] = plus_product(total[v], shares[s] - Floats{}, load(here));
        }
    for (int v = 0; v < V; v++) store(out + v * LANES, total[v]);
}

inline void weigh(const float* values, int64_t stride, const float* shares, int64_t count,
                  int64_t head_dim, float* out) {
    int64_t i = 0;
    for (; i + 8 * LANES <= head_dim; i += 8 * LANES)
        weigh_some<8>(values + i, stride, shares, count, out + i);
    for (; i + 4 * LANES <= head_dim; i += 4 * LANES)
        weigh_some<4>(values + i, stride, shares, count, out + i);
    for (; i + LANES <= head_dim; i += LANES)
        weigh_some<1>(values + i, stride, shares, count, out + i);
    for (; i < head_dim; i++)
        for (int64_t s = 0; s < count; s++) out[i] += shares[s] * values[s * stride + i];
}

struct Heads {
    int64_t begin, end;  // of the queries'
    int64_t group;       // so many of them share keys and values
    int64_t head_dim;
    int64_t stride;      // from a position to the next; values lie half of it behind keys
    float scale;
};

// q and out are the token's [heads, head_dim]; `row` has its keys and values from position 0 on.
// `scores` has `room` floats for each of the heads.
inline void attend(const Heads& heads, const float* q, const float* row, int64_t length,
                   float* scores, int64_t room, float* out) {
    const int64_t E = heads.head_dim, stride = heads.stride;
    auto each = [&](auto function) {
        for (int64_t first = 0; first < length; first += KEYS_AT_ONCE) {
            int64_t count = std::min(KEYS_AT_ONCE, length - first);
            for (int64_t h = heads.begin; h < heads.end; h++)
                function(h, row + first * stride + h / heads.group * E, count,
                         scores + (h - heads.begin) * room + first);
        }
    };
    each([&](int64_t h, const float* keys, int64_t count, float* to) {
        score(q + h * E, keys, stride, count, E, heads.scale, to);
    });
    std::memset(out + heads.begin * E, 0, (heads.end - heads.begin) * E * sizeof(float));
    for (int64_t h = 0; h < heads.end - heads.begin; h++) soften(scores + h * room, length);
    each([&](int64_t h, const float* keys, int64_t count, float* shares) {
        weigh(keys + stride / 2, stride, shares, count, E, out + h * E);
    });
}

}  // namespace
