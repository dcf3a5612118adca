// A whole pass over a few tokens on a CPU, from ids to logits, in one call.
//
// With few tokens, reading the weights dominates. Operators launched one by one add their launch
// time and wait for each other; here the threads run through all layers and loops together.

#include <cstddef>
#include <string>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "layer.h"
#include "predictions.h"

extern "C" {

struct Model {
    const Layer* layers;  // of prelude, core and coda, in this order
    int64_t prelude, core, coda;
    int64_t width, state_width, context;
    const float* embedding;
    const float *outer_phases, *core_phases;  // [position, head_dim / 2] of (cos, sin)
    const float *prelude_norm, *final_norm;   // scales; the first may be null
    double norm_floor;    // 64 bits: without padding
    Matrix into;          // B_bar; no matrix means the identity
    Matrix transition;    // A_bar, if it is dense
    const float* decay;   // the diagonal of A_bar, if it is diagonal; with neither it is the identity
    Matrix readout, head;
    const float* unembedding;  // the head in float32
    int64_t candidates;   // number of likeliest tokens over which predictions are compared
};

struct Pass {
    int64_t tokens;
    const int64_t *ids, *rows, *positions;
    // [layer, row, position, 2, kv_heads, head_dim]; for the core [slot * layer, ...]
    char *outer, *core;
    int64_t cache_itemsize;  // bytes of an element: 4 for float, 2 for BFloat16
    int64_t outer_layer, outer_row, core_layer, core_row;  // strides in elements
    int64_t loops;
    const int64_t* slots;     // cache slot of every loop
    // Early exit, or null if all tokens run all loops. A token stops after `limits` loops, or when a
    // loop changes it by less than `min_change`. The slots of its remaining loops up to `settled`
    // then receive its last keys and values.
    const int64_t *limits, *settled;
    const float* min_change;  // 0: never; null: never for all tokens
    // The first `watched` tokens of `order` compare predictions after every loop, the others states.
    // If there are any, logits are computed for all tokens and stored by token index.
    int64_t watched;
    const int64_t* order;
    int64_t *ran, *active;    // out: loops of each token; a copy of `order`, for tokens still looping
    float* state;             // out: [tokens, state_width]
    int64_t predicted;        // number of tokens whose logits are returned, and their indices
    const int64_t* predict;
    float* logits;
    float* scratch;
    int64_t threads;
};

}  // extern "C"

namespace {

int64_t rounded(int64_t n) { return round_up(n, LANES); }

// Assigns working memory, part by part; without memory it only counts.
struct ScratchBuilder {
    float* memory;
    int64_t used = 0;
    template <typename T = float>
    T* take(int64_t count) {
        T* part = memory ? reinterpret_cast<T*>(memory + used) : nullptr;
        used += round_up((count * sizeof(T) + sizeof(float) - 1) / sizeof(float), LANES);
        return part;
    }
};

Scratch divide_scratch(const Model& model, int64_t tokens, int64_t rank, ScratchBuilder& builder) {
    const int64_t width = std::max(model.width, model.state_width);
    int64_t projected = 0, hidden = 0, heads = 0, attended = width;
    for (int64_t i = 0; i < model.prelude + model.core + model.coda; i++) {
        const Layer& layer = model.layers[i];
        projected = std::max({projected, layer.inner.out, 2 * layer.proj.in});
        hidden = std::max(hidden, layer.proj.in);
        attended = std::max(attended, layer.outer.in);
        heads = std::max<int64_t>(heads, layer.heads);
    }
    const int64_t largest_input = round_up(std::max({width, hidden, attended}), QUAD);
    const int64_t candidates = rounded(model.candidates);
    Scratch part;
    part.normed = builder.take(width * tokens);
    part.projected = builder.take(projected * tokens);
    part.attended = builder.take(attended * tokens);
    part.hidden = builder.take(hidden * tokens);
    part.previous_state = builder.take(width * tokens);
    part.drive = builder.take(width * tokens);
    part.x = builder.take(width * tokens);
    part.log_probs = builder.take(candidates * tokens);
    part.previous_log_probs = builder.take(candidates * tokens);
    part.divergence = builder.take(tokens);
    part.candidates = builder.take<int32_t>(candidates * tokens);
    part.quantised = {builder.take<int8_t>(largest_input * tokens), builder.take(tokens)};
    part.scores_stride = rounded(model.context);
    for (int64_t before = 0; before <= rank; before++)
        part.scores = builder.take(heads * part.scores_stride);
    return part;
}

struct ActiveCount {  // tokens that still loop, and those of them that are watched
    int64_t looping, watched;
};

struct PassRunner {  // the pass as one thread runs it
    const Team& team;
    const Model& model;
    const Pass& pass;
    const Scratch& scratch;
    Tokens all;
    float *drive, *x;

    void outer_layers(int64_t first_layer, int64_t first_cache_layer, int64_t count,
                      const Tokens& tokens) const {
        for (int64_t i = 0; i < count; i++) {
            const int64_t offset = (first_cache_layer + i) * pass.outer_layer;
            run_layer(team, model.layers[first_layer + i], tokens,
                      kv_cache(pass.outer, offset, pass.outer_row), model.outer_phases, x, scratch);
        }
    }

    KvCache kv_cache(char* data, int64_t offset, int64_t row_stride) const {
        return {data + offset * pass.cache_itemsize, row_stride,
                pass.cache_itemsize == sizeof(BFloat16)};
    }

    // The rows of the given tokens, one after the other.
    const float* gathered(const float* from, int64_t width, const Tokens& tokens) const {
        if (!tokens.indices) return from;
        for (int64_t t = team.rank; t < tokens.count; t += team.size)
            std::copy_n(from + tokens.index(t) * width, width, scratch.normed + t * width);
        team.sync();
        return scratch.normed;
    }

    // to [tokens, a.out] = from W^T, or a copy if there is no matrix.
    void product(const Matrix& a, const float* from, float* to, int64_t width,
                 const Tokens& tokens) const {
        if (a.panels) {
            gemm(team, a, gathered(from, a.in, tokens), tokens.count, scratch.quantised,
                 [&](int64_t t, int64_t row, int64_t count, const float* y) {
                     std::copy_n(y, count, to + tokens.index(t) * a.out + row);
                 });
        } else {
            for (int64_t t = team.rank; t < tokens.count; t += team.size)
                std::copy_n(from + tokens.index(t) * width, width, to + tokens.index(t) * width);
        }
        team.sync();
    }

    void run_prelude() const {
        for (int64_t t = team.rank; t < all.count; t += team.size)
            std::copy_n(model.embedding + all.ids[t] * model.width, model.width,
                        x + t * model.width);
        team.sync();
        outer_layers(0, 0, model.prelude, all);
        if (model.prelude_norm)
            scaled_norm(team, x, model.width, model.norm_floor, model.prelude_norm, all);
        product(model.into, x, drive, model.width, all);
        if (!model.core) product(Matrix{}, drive, pass.state, model.state_width, all);
    }

    void zero_state() const {
        int64_t begin, end;
        team.share(all.count, 1, begin, end);
        std::fill(pass.state + begin * model.state_width, pass.state + end * model.state_width,
                  0.0f);
        team.sync();
    }

    // h = A_bar h + drive for active tokens; the previous h is saved if exits need it.
    void inject(const Tokens& tokens) const {
        const int64_t width = model.state_width;
        float *h = pass.state, *packed = scratch.attended;
        for (int64_t t = team.rank; t < tokens.count; t += team.size) {
            int64_t at = tokens.index(t) * width;
            if (pass.min_change) std::copy_n(h + at, width, scratch.previous_state + at);
            if (model.transition.panels) {
                std::copy_n(h + at, width, packed + t * width);
                continue;
            }
            const float* decay = model.decay;
            for (int64_t i = 0; i < width; i++)
                h[at + i] = (decay ? decay[i] * h[at + i] : h[at + i]) + drive[at + i];
        }
        team.sync();
        if (!model.transition.panels) return;
        gemm(team, model.transition, packed, tokens.count, scratch.quantised,
             [&](int64_t t, int64_t row, int64_t count, const float* y) {
                 int64_t at = tokens.index(t) * width + row;
                 for (int64_t i = 0; i < count; i++) h[at + i] = y[i] + drive[at + i];
             });
        team.sync();
    }

    void one_loop(const Tokens& tokens, int64_t loop) const {
        inject(tokens);
        for (int64_t i = 0; i < model.core; i++) {
            const int64_t offset = (pass.slots[loop] * model.core + i) * pass.core_layer;
            run_layer(team, model.layers[model.prelude + i], tokens,
                      kv_cache(pass.core, offset, pass.core_row), model.core_phases, pass.state,
                      scratch);
        }
    }

    // Keep the tokens in `active` that continue; record the loops of the others.
    ActiveCount remove_stopped(int64_t loop, const ActiveCount& before) const {
        ActiveCount left{0, 0};
        for (int64_t t = 0; t < before.looping; t++) {
            int64_t token = pass.active[t];
            bool stops = loop >= pass.limits[token];
            float min_change = pass.min_change ? pass.min_change[token] : 0;
            if (!stops && min_change > 0)
                stops = t < before.watched ? scratch.divergence[token] < min_change
                                           : state_converged(token, min_change);
            if (stops) {
                pass.ran[token] = loop;
                continue;
            }
            pass.active[left.looping++] = token;
            left.watched += t < before.watched;
        }
        return left;
    }

    bool state_converged(int64_t token, float min_change) const {
        const int64_t width = model.state_width;
        const float* state = pass.state + token * width;
        float* change = scratch.previous_state + token * width;
        for (int64_t i = 0; i < width; i++) change[i] -= state[i];
        return dot(change, change, width) < min_change * min_change * dot(state, state, width);
    }

    void loop_with_exits(ActiveCount& count) const {
        Tokens tokens = all;
        tokens.indices = pass.active;
        for (int64_t loop = 1; loop <= pass.loops && count.looping; loop++) {
            const ActiveCount current = count;
            tokens.count = current.looping;
            one_loop(tokens, loop - 1);
            tokens.count = current.watched;
            if (current.watched) compare_predictions(tokens, loop == 1);
            if (team.rank == 0) count = remove_stopped(loop, current);
            team.sync();
        }
        for (int64_t t = team.rank; t < all.count; t += team.size) settle(t);
    }

    // Predict, and compute the KL divergence from the prediction of the loop before.
    void compare_predictions(const Tokens& tokens, bool first) const {
        const int64_t n = model.candidates, stride = rounded(n);
        run_coda(tokens);
        if (first || compares_all()) run_head(tokens);
        else score_candidates(tokens);
        for (int64_t t = team.rank; t < tokens.count; t += team.size) {
            int64_t token = tokens.index(t);
            const float* logits = pass.logits + token * model.head.out;
            float* log_probs = scratch.log_probs + token * stride;
            float* previous = scratch.previous_log_probs + token * stride;
            int32_t* candidates = scratch.candidates + token * stride;
            if (compares_all()) {
                std::copy_n(logits, n, log_probs);
            } else if (first) {
                top_k(logits, model.head.out, n, candidates);
                for (int64_t i = 0; i < n; i++) log_probs[i] = logits[candidates[i]];
            }
            log_softmax(log_probs, n);
            scratch.divergence[token] = first ? INFINITY : kl_divergence(log_probs, previous, n);
            std::copy_n(log_probs, stride, previous);
        }
        team.sync();
    }

    bool compares_all() const { return model.candidates == model.head.out; }

    void score_candidates(const Tokens& tokens) const {
        const int64_t n = model.candidates, stride = rounded(n);
        int64_t job, end;
        team.share(tokens.count * n, 1, job, end);
        auto offset = [&](int64_t i) { return tokens.index(i / n) * stride + i % n; };
        auto weights = [&](int64_t i) {
            return model.unembedding + scratch.candidates[offset(i)] * model.width;
        };
        for (; job < end; job++) {
            const float* ahead = weights(std::min(job + 4, end - 1));  // the rows are scattered
            for (int64_t i = 0; i < model.width; i += LANES) __builtin_prefetch(ahead + i);
            const float* reading = x + tokens.index(job / n) * model.width;
            scratch.log_probs[offset(job)] = dot(reading, weights(job), model.width);
        }
        team.sync();
    }

    // Copy the last keys and values of a token that stopped early to the slots of its other loops.
    void settle(int64_t t) const {
        const Layer& layer = model.layers[model.prelude];
        const int64_t size = 2 * layer.kv_heads * layer.head_dim, item = pass.cache_itemsize;
        char* kv = pass.core + (all.rows[t] * pass.core_row + all.positions[t] * size) * item;
        const int64_t ran = pass.ran[t], layer_bytes = pass.core_layer * item;
        for (int64_t later = ran; later < pass.settled[t]; later++)
            for (int64_t i = 0; i < model.core && pass.slots[later] != pass.slots[ran - 1]; i++) {
                const char* from = kv + (pass.slots[ran - 1] * model.core + i) * layer_bytes;
                char* to = kv + (pass.slots[later] * model.core + i) * layer_bytes;
                std::copy_n(from, size * item, to);
            }
    }

    void run_coda(const Tokens& tokens) const {
        product(model.readout, pass.state, x, model.width, tokens);
        outer_layers(model.prelude + model.core, model.prelude, model.coda, tokens);
        scaled_norm(team, x, model.width, model.norm_floor, model.final_norm, tokens);
    }

    void run_head(const Tokens& tokens) const {
        gemm(team, model.head, gathered(x, model.width, tokens), tokens.count, scratch.quantised,
             [&](int64_t t, int64_t row, int64_t count, const float* y) {
                 int64_t index = pass.watched ? tokens.index(t) : t;
                 std::copy_n(y, count, pass.logits + index * model.head.out + row);
             });
        team.sync();
    }

    // Coda and head; for watched tokens the coda has run already.
    void finish() const {
        Tokens unread = all, predicted = all;
        if (pass.watched) {
            unread.count -= pass.watched;
            unread.indices = pass.order + pass.watched;
            if (compares_all()) predicted = unread;
        } else {
            predicted.count = pass.predicted;
            predicted.indices = pass.predict;
        }
        if (unread.count) run_coda(unread);
        if (pass.predicted && predicted.count) run_head(predicted);
    }
};

// Ask for pages of 2 MiB for memory that has not been used yet: weights are read from many of them.
void prefer_large_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t page = 4096;
    const uintptr_t first = round_up(reinterpret_cast<uintptr_t>(memory), page);
    const int64_t whole = bytes - (first - reinterpret_cast<uintptr_t>(memory));
    if (whole > 0) madvise(reinterpret_cast<void*>(first), whole / page * page, MADV_HUGEPAGE);
#endif
}

}  // namespace

extern "C" {

// Floats of scratch memory that a pass of `tokens` tokens needs.
int64_t parcae_scratch(const Model* model, int64_t tokens, int64_t threads) {
    ScratchBuilder builder{nullptr};
    divide_scratch(*model, tokens, threads - 1, builder);
    return builder.used;
}

void parcae_pass(const Model* model, const Pass* pass) {
    const Tokens all{pass->tokens, nullptr, pass->ids, pass->rows, pass->positions};
    ActiveCount count{pass->tokens, pass->watched};
    run_threads(pass->threads, [&](Team team) {
        ScratchBuilder builder{pass->scratch};
        const Scratch scratch = divide_scratch(*model, pass->tokens, team.rank, builder);
        const PassRunner runner{team, *model, *pass, scratch, all, scratch.drive, scratch.x};
        runner.zero_state();
        runner.run_prelude();
        if (pass->limits) runner.loop_with_exits(count);
        else
            for (int64_t loop = 0; loop < pass->loops; loop++) runner.one_loop(all, loop);
        runner.finish();
    });
}

// Weights [out, in] in the order in which `gemm` reads them: bytes needed, and the conversion.
int64_t parcae_packed_bytes(int64_t out, int64_t in, int64_t int8) {
    return panel_count(out) * (int8 ? Int8Panels::bytes(in) : FloatPanels::bytes(in));
}

void parcae_pack(const void* weights, int64_t out, int64_t in, int64_t int8, void* panels) {
    prefer_large_pages(panels, parcae_packed_bytes(out, in, int8));
    if (int8) pack(static_cast<const int8_t*>(weights), out, in, static_cast<int8_t*>(panels));
    else pack(static_cast<const float*>(weights), out, in, static_cast<float*>(panels));
}

// y [tokens, out] = x W^T; `quantised` has tokens * (in + 3) bytes, `scales` one float per token.
void parcae_gemm(const Matrix* a, const float* x, int64_t tokens, int8_t* quantised, float* scales,
                 float* y, int64_t threads) {
    run_threads(threads, [&](Team team) {
        gemm(team, *a, x, tokens, QuantisedInputs{quantised, scales}, copy_to(y, a->out));
    });
}

// What the kernels were compiled for.
const char* parcae_target() {
    return ISA ", "
#ifdef _OPENMP
           "OpenMP";
#else
           "std::thread";
#endif
}

#define FIELD(type, name)                                                          \
    text += " " #name ":" + std::to_string(offsetof(type, name)) + "+" +              \
            std::to_string(sizeof(type::name)),                                        \
        listed += sizeof(type::name)

// The structures that Python fills: size, and fields with their offsets and sizes. They have no
// padding, so that a field that is not listed shows as bytes that no field has.
const char* parcae_structures() {
    static const std::string structures = [] {
        std::string text;
        size_t listed = 0;
        const auto begin = [&](const char* name, size_t size) {
            text += name + (" " + std::to_string(size));
            listed = 0;
        };
        const auto end = [&](size_t size) { text += " unlisted:" + std::to_string(size - listed) + "\n"; };
        begin("Matrix", sizeof(Matrix));
        FIELD(Matrix, panels); FIELD(Matrix, scale); FIELD(Matrix, out); FIELD(Matrix, in);
        end(sizeof(Matrix));
        begin("Layer", sizeof(Layer));
        FIELD(Layer, inner); FIELD(Layer, outer); FIELD(Layer, fc); FIELD(Layer, proj);
        FIELD(Layer, norm_after_attention); FIELD(Layer, norm_after_mlp); FIELD(Layer, value_table);
        FIELD(Layer, norm_floor); FIELD(Layer, qk_floor); FIELD(Layer, score_scale);
        FIELD(Layer, heads); FIELD(Layer, kv_heads); FIELD(Layer, head_dim); FIELD(Layer, gated_mlp);
        end(sizeof(Layer));
        begin("Model", sizeof(Model));
        FIELD(Model, layers); FIELD(Model, prelude); FIELD(Model, core); FIELD(Model, coda);
        FIELD(Model, width); FIELD(Model, state_width); FIELD(Model, context); FIELD(Model, embedding);
        FIELD(Model, outer_phases); FIELD(Model, core_phases); FIELD(Model, prelude_norm);
        FIELD(Model, final_norm); FIELD(Model, norm_floor); FIELD(Model, into);
        FIELD(Model, transition); FIELD(Model, decay); FIELD(Model, readout); FIELD(Model, head);
        FIELD(Model, unembedding); FIELD(Model, candidates);
        end(sizeof(Model));
        begin("Pass", sizeof(Pass));
        FIELD(Pass, tokens); FIELD(Pass, ids); FIELD(Pass, rows); FIELD(Pass, positions);
        FIELD(Pass, outer); FIELD(Pass, core); FIELD(Pass, cache_itemsize); FIELD(Pass, outer_layer);
        FIELD(Pass, outer_row); FIELD(Pass, core_layer); FIELD(Pass, core_row);
        FIELD(Pass, loops); FIELD(Pass, slots);
        FIELD(Pass, limits); FIELD(Pass, settled); FIELD(Pass, min_change); FIELD(Pass, watched);
        FIELD(Pass, order); FIELD(Pass, ran); FIELD(Pass, active); FIELD(Pass, state);
        FIELD(Pass, predicted); FIELD(Pass, predict); FIELD(Pass, logits); FIELD(Pass, scratch);
        FIELD(Pass, threads);
        end(sizeof(Pass));
        return text;
    }();
    return structures.c_str();
}

}  // extern "C"
