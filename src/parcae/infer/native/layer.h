// One residual block for the tokens of a pass; the same computation as infer/layers.py.

#pragma once

#include "attention.h"
#include "matrix.h"

extern "C" {

struct Layer {
    Matrix inner, outer, fc, proj;
    const float* norm_after_attention;  // scales of the norms after, or null
    const float* norm_after_mlp;
    const float* value_table;    // value embeddings [vocabulary, kv_heads * head_dim], or null
    float norm_floor, qk_floor;  // D eps and E eps; a negative qk_floor means no norm
    float score_scale;
    int32_t heads, kv_heads, head_dim;
    int64_t gated_mlp;  // 64 bits: without padding
};

}  // extern "C"

namespace {

// The active tokens of a pass. States are indexed by the token's index in the pass; intermediate
// results of a layer are packed: they have rows for the active tokens only.
struct Tokens {
    int64_t count;
    const int64_t* indices;  // null: all tokens
    const int64_t *ids, *rows, *positions;
    int64_t index(int64_t t) const { return indices ? indices[t] : t; }
};

// A layer's part of the cache [row, position, 2, kv_heads, head_dim], of float or BFloat16.
struct KvCache {
    void* data;
    int64_t row_stride;
    bool bfloat16;

    // Calls `function` with a pointer to the elements of a row.
    template <typename Function>
    void with_row(int64_t row, Function function) const {
        if (bfloat16) function(static_cast<BFloat16*>(data) + row * row_stride);
        else function(static_cast<float*>(data) + row * row_stride);
    }
};

struct Scratch {
    // shared by all threads
    float *normed, *projected, *attended, *hidden, *previous_state, *drive, *x;
    float *log_probs, *previous_log_probs, *divergence;
    int32_t* candidates;
    QuantisedInputs quantised;
    // of this thread
    float* scores;
    int64_t scores_stride;
};

// x / sqrt(|x|^2 + floor), packed.
void unit_norm(const Team& team, const float* x, int64_t width, float floor, const Tokens& tokens,
               float* out) {
    for (int64_t t = team.rank; t < tokens.count; t += team.size) {
        const float* row = x + tokens.index(t) * width;
        float factor = 1 / std::sqrt(dot(row, row, width) + floor);
        for (int64_t i = 0; i < width; i++) out[t * width + i] = row[i] * factor;
    }
    team.sync();
}

void scaled_norm(const Team& team, float* x, int64_t width, float floor, const float* scale,
                 const Tokens& tokens) {
    for (int64_t t = team.rank; t < tokens.count; t += team.size) {
        float* row = x + tokens.index(t) * width;
        float factor = 1 / std::sqrt(dot(row, row, width) + floor);
        for (int64_t i = 0; i < width; i++) row[i] *= factor * scale[i];
    }
    team.sync();
}

// Apply rotary embeddings to queries and keys; write keys and values into the cache.
void write_kv(const Team& team, const Layer& layer, const Tokens& tokens, const KvCache& kv,
              const float* phases, float* projected) {
    const int64_t H = layer.heads, K = layer.kv_heads, E = layer.head_dim;
    for (int64_t job = team.rank; job < tokens.count * (H + K); job += team.size) {
        int64_t t = job / (H + K), h = job % (H + K), at = tokens.index(t);
        float* row = projected + t * layer.inner.out;
        apply_rope(row + h * E, phases + tokens.positions[at] * E, E, layer.qk_floor);
        if (h < H) continue;
        float *key = row + h * E, *value = key + K * E;
        if (layer.value_table) {
            const float* extra = layer.value_table + (tokens.ids[at] * K + h - H) * E;
            float gate = 2 / (1 + std::exp(-row[(H + 2 * K) * E + h - H]));
            for (int64_t i = 0; i < E; i++) value[i] += gate * extra[i];
        }
        kv.with_row(tokens.rows[at], [&](auto* target) {
            target += tokens.positions[at] * 2 * K * E + (h - H) * E;
            convert(key, E, target);
            convert(value, E, target + K * E);
        });
    }
    team.sync();
}

// Threads share the tokens, or where there are few, the heads of each.
void attend_all(const Team& team, const Layer& layer, const Tokens& tokens, const KvCache& kv,
                const Scratch& scratch) {
    const int64_t H = layer.heads, K = layer.kv_heads, E = layer.head_dim;
    const int64_t parts = tokens.count < 2 * team.size ? std::min<int64_t>(H, team.size) : 1;
    team.for_each(tokens.count * parts, [&](int64_t job) {
        const int64_t t = job / parts, part = job % parts, at = tokens.index(t);
        Heads heads{H * part / parts, H * (part + 1) / parts, H / K, E, 2 * K * E, layer.score_scale};
        kv.with_row(tokens.rows[at], [&](const auto* row) {
            attend(heads, scratch.projected + t * layer.inner.out, row, tokens.positions[at] + 1,
                   scratch.scores, scratch.scores_stride, scratch.attended + t * H * E);
        });
    });
    team.sync();
}

// What a product does with its results: copy them to rows of `to`.
inline auto copy_to(float* to, int64_t stride) {
    return [=](int64_t t, int64_t row, int64_t count, const float* y) {
        std::memcpy(to + t * stride + row, y, count * sizeof(float));
    };
}

void mlp_hidden(const Team& team, const Layer& layer, const Tokens& tokens, const Scratch& scratch) {
    const int64_t hidden = layer.proj.in;
    if (!layer.gated_mlp) {
        gemm(team, layer.fc, scratch.normed, tokens.count, scratch.quantised,
             [&](int64_t t, int64_t row, int64_t count, const float* y) {
                 float* target = scratch.hidden + t * hidden + row;
                 for (int64_t i = 0; i < count; i++) target[i] = y[i] < 0 ? 0 : y[i] * y[i];
             });
        team.sync();
        return;
    }
    float* gate_and_up = scratch.projected;
    gemm(team, layer.fc, scratch.normed, tokens.count, scratch.quantised,
         copy_to(gate_and_up, 2 * hidden));
    team.sync();
    int64_t begin, end;
    team.share(hidden, LANES, begin, end);
    for (int64_t t = 0; t < tokens.count; t++)
        for (int64_t i = begin; i < end; i++) {
            const float* row = gate_and_up + t * 2 * hidden;
            float gate = row[i], up = row[hidden + i];
            scratch.hidden[t * hidden + i] = gate / (1 + std::exp(-gate)) * up;
        }
    team.sync();
}

// Updates x, indexed by the tokens' indices, in place.
void run_layer(const Team& team, const Layer& layer, const Tokens& tokens, const KvCache& kv,
               const float* phases, float* x, const Scratch& scratch) {
    const int64_t width = layer.inner.in;
    auto add_to_x = [&](int64_t t, int64_t row, int64_t count, const float* y) {
        float* target = x + tokens.index(t) * width + row;
        for (int64_t i = 0; i < count; i++) target[i] += y[i];
    };
    unit_norm(team, x, width, layer.norm_floor, tokens, scratch.normed);
    gemm(team, layer.inner, scratch.normed, tokens.count, scratch.quantised,
         copy_to(scratch.projected, layer.inner.out));
    team.sync();
    write_kv(team, layer, tokens, kv, phases, scratch.projected);
    attend_all(team, layer, tokens, kv, scratch);
    gemm(team, layer.outer, scratch.attended, tokens.count, scratch.quantised, add_to_x);
    team.sync();
    if (layer.norm_after_attention)
        scaled_norm(team, x, width, layer.norm_floor, layer.norm_after_attention, tokens);
    unit_norm(team, x, width, layer.norm_floor, tokens, scratch.normed);
    mlp_hidden(team, layer, tokens, scratch);
    gemm(team, layer.proj, scratch.hidden, tokens.count, scratch.quantised, add_to_x);
    team.sync();
    if (layer.norm_after_mlp)
        scaled_norm(team, x, width, layer.norm_floor, layer.norm_after_mlp, tokens);
}

}  // namespace
