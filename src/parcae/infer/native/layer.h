// One residual block for the tokens of a pass: what infer/layers.py computes.

#pragma once

#include "attention.h"
#include "matrix.h"

extern "C" {

struct Layer {
    Matrix inner, outer, fc, proj;
    const float* after_attention;  // scales of the norms after, or null
    const float* after_mlp;
    const float* values;           // value embeddings [vocabulary, kv_heads * head_dim], or null
    float norm_floor, qk_floor;    // D eps and E eps; a negative qk_floor is no norm
    float score_scale;
    int32_t heads, kv_heads, head_dim, gated_mlp;
};

}  // extern "C"

namespace {

// Tokens that take part. What is kept from layer to layer lies by their place in the pass; what a
// layer needs in between is packed, as if the others did not exist.
struct Tokens {
    int64_t count;
    const int64_t* index;  // null: all of them
    const int64_t *ids, *rows, *positions;
    int64_t place(int64_t t) const { return index ? index[t] : t; }
};

// A layer's part of the cache [row, position, 2, kv_heads, head_dim].
struct Kept {
    float* data;
    int64_t row_stride;
};

struct Scratch {
    float *made, *mixed, *hidden, *before, *drive, *x;  // of all threads
    float *shares, *shares_before, *moved;
    int32_t* candidates;
    float *normed, *scores;                             // of this one
    int64_t scores_room;
};

// x / sqrt(|x|^2 + floor), packed. Every thread makes its own, which is quicker than to meet.
void unit_norm(const float* x, int64_t width, float floor, const Tokens& tokens, float* out) {
    for (int64_t t = 0; t < tokens.count; t++) {
        const float* from = x + tokens.place(t) * width;
        float factor = 1 / std::sqrt(dot(from, from, width) + floor);
        for (int64_t i = 0; i < width; i++) out[t * width + i] = from[i] * factor;
    }
}

void scaled_norm(const Team& team, float* x, int64_t width, float floor, const float* scale,
                 const Tokens& tokens) {
    for (int64_t t = team.rank; t < tokens.count; t += team.size) {
        float* row = x + tokens.place(t) * width;
        float factor = 1 / std::sqrt(dot(row, row, width) + floor);
        for (int64_t i = 0; i < width; i++) row[i] *= factor * scale[i];
    }
    team.meet();
}

// Queries and keys turned by their positions; keys and values into the cache.
void remember(const Team& team, const Layer& layer, const Tokens& tokens, const Kept& kept,
              const float* phases, float* made) {
    const int64_t H = layer.heads, K = layer.kv_heads, E = layer.head_dim;
    for (int64_t job = team.rank; job < tokens.count * (H + K); job += team.size) {
        int64_t t = job / (H + K), h = job % (H + K), at = tokens.place(t);
        float* row = made + t * layer.inner.out;
        turn(row + h * E, phases + tokens.positions[at] * E, E, layer.qk_floor);
        if (h < H) continue;
        float* key = kept.data + tokens.rows[at] * kept.row_stride +
                     tokens.positions[at] * 2 * K * E + (h - H) * E;
        float* value = key + K * E;
        std::memcpy(key, row + h * E, E * sizeof(float));
        std::memcpy(value, row + (h + K) * E, E * sizeof(float));
        if (!layer.values) continue;
        const float* extra = layer.values + (tokens.ids[at] * K + h - H) * E;
        float gate = 2 / (1 + std::exp(-row[(H + 2 * K) * E + h - H]));
        for (int64_t i = 0; i < E; i++) value[i] += gate * extra[i];
    }
    team.meet();
}

// Every thread takes a run of heads, token by token.
void attend_all(const Team& team, const Layer& layer, const Tokens& tokens, const Kept& kept,
                const Scratch& scratch) {
    const int64_t H = layer.heads, K = layer.kv_heads, E = layer.head_dim;
    int64_t job, end;
    team.share(tokens.count * H, 1, job, end);
    while (job < end) {
        int64_t t = job / H, first = job % H, last = std::min(H, first + end - job);
        int64_t at = tokens.place(t);
        Heads heads{first, last, H / K, E, 2 * K * E, layer.score_scale};
        attend(heads, scratch.made + t * layer.inner.out,
               kept.data + tokens.rows[at] * kept.row_stride, tokens.positions[at] + 1,
               scratch.scores, scratch.scores_room, scratch.mixed + t * H * E);
        job += last - first;
    }
    team.meet();
}

void expand(const Team& team, const Layer& layer, const Tokens& tokens, const Scratch& scratch) {
    const int64_t hidden = layer.proj.in;
    if (!layer.gated_mlp) {
        multiply(team, layer.fc, scratch.normed, tokens.count,
                 [&](int64_t t, int64_t row, auto y) {
                     auto positive = y < 0.0f ? decltype(y){} : y;
                     store(scratch.hidden + t * hidden + row, positive * positive);
                 });
        team.meet();
        return;
    }
    float* both = scratch.made;
    multiply(team, layer.fc, scratch.normed, tokens.count, [&](int64_t t, int64_t row, auto y) {
        store(both + t * 2 * hidden + row, y);
    });
    team.meet();
    int64_t begin, end;
    team.share(hidden, LANES, begin, end);
    for (int64_t t = 0; t < tokens.count; t++)
        for (int64_t i = begin; i < end; i++) {
            float gate = both[t * 2 * hidden + i], up = both[t * 2 * hidden + hidden + i];
            scratch.hidden[t * hidden + i] = gate / (1 + std::exp(-gate)) * up;
        }
    team.meet();
}

// x by the tokens' places, in place.
void run_layer(const Team& team, const Layer& layer, const Tokens& tokens, const Kept& kept,
               const float* phases, float* x, const Scratch& scratch) {
    const int64_t width = layer.inner.in;
    auto add = [&](int64_t t, int64_t row, auto y) {
        float* cell = x + tokens.place(t) * width + row;
        store(cell, load_as<decltype(y)>(cell) + y);
    };
    unit_norm(x, width, layer.norm_floor, tokens, scratch.normed);
    multiply(team, layer.inner, scratch.normed, tokens.count, [&](int64_t t, int64_t row, auto y) {
        store(scratch.made + t * layer.inner.out + row, y);
    });
    team.meet();
    remember(team, layer, tokens, kept, phases, scratch.made);
    attend_all(team, layer, tokens, kept, scratch);
    multiply(team, layer.outer, scratch.mixed, tokens.count, add);
    team.meet();
    if (layer.after_attention)
        scaled_norm(team, x, width, layer.norm_floor, layer.after_attention, tokens);
    unit_norm(x, width, layer.norm_floor, tokens, scratch.normed);
    expand(team, layer, tokens, scratch);
    multiply(team, layer.proj, scratch.hidden, tokens.count, add);
    team.meet();
    if (layer.after_mlp)
        scaled_norm(team, x, width, layer.norm_floor, layer.after_mlp, tokens);
}

}  // namespace
