// A whole pass over a few tokens on a CPU, from ids to logits, or any of its stages, in one call.
//
// A token at a time, the work is to read every weight once. Operators started one by one wait for
// each other and for their own start; here the threads walk through all layers and loops together.

#include "layer.h"
#include "predictions.h"

extern "C" {

struct Model {
    const Layer* layers;  // of prelude, core and coda, end to end
    int64_t prelude, core, coda;
    int64_t width, state_width, context;
    const float* embedding;
    const float *outer_phases, *core_phases;  // [position, head_dim / 2] of (cos, sin)
    const float *prelude_norm, *final_norm;   // scales; the first may be null
    float norm_floor;
    Matrix into;          // B_bar; none: what the prelude leaves is added as it is
    Matrix transition;    // A_bar: this matrix, or
    const float* decay;   // this diagonal, or, where there is neither, 1
    Matrix readout, head;
    const float* unembedding;  // the head, in floats
    int64_t compared;     // predictions are compared over so many likely tokens, or over all
};

struct Pass {  // every field has eight bytes
    int64_t tokens;
    const int64_t *ids, *rows, *positions;
    // [layer, row, position, 2, kv_heads, head_dim]; for the core [slot * layer, ...]
    float *outer, *core;
    int64_t outer_layer, outer_row, core_layer, core_row;  // strides
    int64_t begins, reads;    // whether embedding and prelude, and coda, are part of it
    int64_t from_zero;        // whether the states begin there
    int64_t loops;
    const int64_t* slots;     // of every loop that is run
    // How often tokens loop: null where all of them run all loops. A token stops after `limits`,
    // or when a loop moves it by less than `least`; then it stands still, and the slots of the
    // loops up to `settled` receive its last keys and values.
    const int64_t *limits, *settled;
    const float* least;       // 0: that is no reason to stop; null: for none
    const int64_t* measures;  // what has to move that much: see Measure
    // So many tokens' predictions are read after every loop, and they come first in the order. Where
    // there are any, the logits of all tokens are wanted, and lie by their place.
    int64_t watched;
    const int64_t* order;
    int64_t *ran, *index;     // how often each has looped at last; the order again, for what is left
    // [tokens, state_width] twice, and what the head reads, [tokens, width]; null where nobody else
    // wants to know.
    float *state, *drive, *x;
    int64_t predicted;        // how many tokens' logits are wanted, and which
    const int64_t* predict;
    float* logits;
    float* scratch;
    int64_t threads;
};

}  // extern "C"

namespace {

int64_t rounded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

struct Room {  // in floats; what threads share, and what each has for itself
    int64_t made = 0, hidden = 0, mixed, before, drive, x, shares, moved, normed, scores,
        scores_room;
    Room(const Model& model, int64_t tokens) {
        const int64_t width = std::max(model.width, model.state_width);
        int64_t heads = 0;
        for (int64_t i = 0; i < model.prelude + model.core + model.coda; i++) {
            const Layer& layer = model.layers[i];
            made = std::max({made, layer.inner.out, 2 * layer.proj.in});
            hidden = std::max(hidden, layer.proj.in);
            heads = std::max<int64_t>(heads, layer.heads);
        }
        scores_room = rounded(model.context);
        scores = heads * scores_room;
        made = rounded(made * tokens);
        hidden = rounded(hidden * tokens);
        mixed = before = drive = x = normed = rounded(width * tokens);
        shares = rounded(model.compared) * tokens;
        moved = rounded(tokens);
    }
    int64_t floats(int64_t threads) const {
        return made + mixed + hidden + before + drive + x + 3 * shares + moved +
               threads * (normed + scores);
    }
    Scratch cut(float* p, int rank) const {
        Scratch part;
        part.made = p;
        part.mixed = part.made + made;
        part.hidden = part.mixed + mixed;
        part.before = part.hidden + hidden;
        part.drive = part.before + before;
        part.x = part.drive + drive;
        part.shares = part.x + x;
        part.shares_before = part.shares + shares;
        part.candidates = reinterpret_cast<int32_t*>(part.shares_before + shares);
        part.moved = part.shares_before + 2 * shares;
        part.normed = part.moved + moved + rank * (normed + scores);
        part.scores = part.normed + normed;
        part.scores_room = scores_room;
        return part;
    }
};

struct Left {  // tokens that still loop, and those among them that are watched
    int64_t looping, watched;
};

struct Walk {  // what one thread knows
    const Team& team;
    const Model& model;
    const Pass& pass;
    const Scratch& scratch;
    Tokens all;
    float *drive, *x;

    void outer_layers(int64_t first_layer, int64_t first_kept, int64_t count,
                      const Tokens& tokens) const {
        for (int64_t i = 0; i < count; i++) {
            Kept kept{pass.outer + (first_kept + i) * pass.outer_layer, pass.outer_row};
            run_layer(team, model.layers[first_layer + i], tokens, kept, model.outer_phases, x,
                      scratch);
        }
    }

    const float* packed(const float* from, int64_t width, const Tokens& tokens) const {
        if (!tokens.index) return from;
        for (int64_t t = 0; t < tokens.count; t++)
            std::copy_n(from + tokens.place(t) * width, width, scratch.normed + t * width);
        return scratch.normed;
    }

    // to [tokens, a.out] = from W^T, or a copy where there is no such matrix.
    void product(const Matrix& a, const float* from, float* to, int64_t width,
                 const Tokens& tokens) const {
        if (a.data) {
            multiply(team, a, packed(from, a.in, tokens), tokens.count,
                     [&](int64_t t, int64_t row, auto y) {
                         store(to + tokens.place(t) * a.out + row, y);
                     });
        } else {
            for (int64_t t = team.rank; t < tokens.count; t += team.size)
                std::copy_n(from + tokens.place(t) * width, width, to + tokens.place(t) * width);
        }
        team.meet();
    }

    void begin() const {
        for (int64_t t = team.rank; t < all.count; t += team.size)
            std::copy_n(model.embedding + all.ids[t] * model.width, model.width,
                        x + t * model.width);
        team.meet();
        outer_layers(0, 0, model.prelude, all);
        if (model.prelude_norm)
            scaled_norm(team, x, model.width, model.norm_floor, model.prelude_norm, all);
        product(model.into, x, drive, model.width, all);
        if (!model.core) product(Matrix{}, drive, pass.state, model.state_width, all);
    }

    void rest_at_zero() const {
        int64_t begin, end;
        team.share(all.count, 1, begin, end);
        std::fill(pass.state + begin * model.state_width, pass.state + end * model.state_width,
                  0.0f);
        team.meet();
    }

    // h = A_bar h + drive for tokens that still loop; `before` keeps what h was.
    void mix(const Tokens& tokens) const {
        const int64_t width = model.state_width;
        float *h = pass.state, *packed = scratch.mixed;
        for (int64_t t = team.rank; t < tokens.count; t += team.size) {
            int64_t at = tokens.place(t) * width;
            if (pass.least) std::copy_n(h + at, width, scratch.before + at);
            if (model.transition.data) {
                std::copy_n(h + at, width, packed + t * width);
                continue;
            }
            const float* decay = model.decay;
            for (int64_t i = 0; i < width; i++)
                h[at + i] = (decay ? decay[i] * h[at + i] : h[at + i]) + drive[at + i];
        }
        team.meet();
        if (!model.transition.data) return;
        multiply(team, model.transition, packed, tokens.count,
                 [&](int64_t t, int64_t row, auto y) {
                     int64_t at = tokens.place(t) * width + row;
                     store(h + at, y + load_as<decltype(y)>(drive + at));
                 });
        team.meet();
    }

    void one_loop(const Tokens& tokens, int64_t loop) const {
        mix(tokens);
        for (int64_t i = 0; i < model.core; i++) {
            int64_t place = pass.slots[loop] * model.core + i;
            Kept kept{pass.core + place * pass.core_layer, pass.core_row};
            run_layer(team, model.layers[model.prelude + i], tokens, kept, model.core_phases,
                      pass.state, scratch);
        }
    }

    // Which tokens of the index loop on; the others' count is noted.
    Left still_looping(int64_t loop, const Left& before) const {
        Left left{0, 0};
        for (int64_t t = 0; t < before.looping; t++) {
            int64_t token = pass.index[t];
            bool stops = loop >= pass.limits[token];
            float least = pass.least ? pass.least[token] : 0;
            if (!stops && least > 0)
                stops = t < before.watched ? scratch.moved[token] < least : rests(token, least);
            if (stops) {
                pass.ran[token] = loop;
                continue;
            }
            pass.index[left.looping++] = token;
            left.watched += t < before.watched;
        }
        return left;
    }

    bool rests(int64_t token, float share) const {
        const int64_t width = model.state_width;
        const float* now = pass.state + token * width;
        float* then = scratch.before + token * width;
        for (int64_t i = 0; i < width; i++) then[i] -= now[i];
        return dot(then, then, width) < share * share * dot(now, now, width);
    }

    void loop_each(Left& left) const {
        Tokens tokens = all;
        tokens.index = pass.index;
        for (int64_t loop = 1; loop <= pass.loops && left.looping; loop++) {
            const Left here = left;
            tokens.count = here.looping;
            one_loop(tokens, loop - 1);
            tokens.count = here.watched;
            if (here.watched) watch(tokens, loop == 1);
            if (team.rank == 0) left = still_looping(loop, here);
            team.meet();
        }
        for (int64_t t = team.rank; t < all.count; t += team.size) settle(t);
    }

    // What tokens predict now, and how far that is from what they did a loop ago.
    void watch(const Tokens& tokens, bool first) const {
        const int64_t n = model.compared, room = rounded(n);
        read(tokens);
        if (first || reads_all()) predict(tokens);
        else score_candidates(tokens);
        for (int64_t t = team.rank; t < tokens.count; t += team.size) {
            int64_t token = tokens.place(t);
            const float* logits = pass.logits + token * model.head.out;
            float *now = scratch.shares + token * room, *then = scratch.shares_before + token * room;
            int32_t* candidates = scratch.candidates + token * room;
            if (reads_all()) {
                std::copy_n(logits, n, now);
            } else if (first) {
                likeliest(logits, model.head.out, n, candidates);
                for (int64_t i = 0; i < n; i++) now[i] = logits[candidates[i]];
            }
            to_log_shares(now, n);
            scratch.moved[token] =
                first ? INFINITY : moved_by(Measure(pass.measures[token]), now, then, n);
            std::copy_n(now, room, then);
        }
        team.meet();
    }

    bool reads_all() const { return model.compared == model.head.out; }

    void score_candidates(const Tokens& tokens) const {
        const int64_t n = model.compared, room = rounded(n);
        int64_t job, end;
        team.share(tokens.count * n, 1, job, end);
        auto cell = [&](int64_t one) { return tokens.place(one / n) * room + one % n; };
        auto weights = [&](int64_t one) {
            return model.unembedding + scratch.candidates[cell(one)] * model.width;
        };
        for (; job < end; job++) {
            const float* later = weights(std::min(job + 4, end - 1));  // rows here and there
            for (int64_t i = 0; i < model.width; i += LANES) __builtin_prefetch(later + i);
            const float* reading = x + tokens.place(job / n) * model.width;
            scratch.shares[cell(job)] = dot(reading, weights(job), model.width);
        }
        team.meet();
    }

    void settle(int64_t t) const {
        const Layer& layer = model.layers[model.prelude];
        const int64_t size = 2 * layer.kv_heads * layer.head_dim;
        float* cell = pass.core + all.rows[t] * pass.core_row + all.positions[t] * size;
        const int64_t ran = pass.ran[t];
        for (int64_t later = ran; later < pass.settled[t]; later++)
            for (int64_t i = 0; i < model.core && pass.slots[later] != pass.slots[ran - 1]; i++) {
                float* from = cell + (pass.slots[ran - 1] * model.core + i) * pass.core_layer;
                float* to = cell + (pass.slots[later] * model.core + i) * pass.core_layer;
                std::copy_n(from, size, to);
            }
    }

    void read(const Tokens& tokens) const {
        product(model.readout, pass.state, x, model.width, tokens);
        outer_layers(model.prelude + model.core, model.prelude, model.coda, tokens);
        scaled_norm(team, x, model.width, model.norm_floor, model.final_norm, tokens);
    }

    void predict(const Tokens& tokens) const {
        multiply(team, model.head, packed(x, model.width, tokens), tokens.count,
                 [&](int64_t t, int64_t row, auto y) {
                     int64_t place = pass.watched ? tokens.place(t) : t;
                     store(pass.logits + place * model.head.out + row, y);
                 });
        team.meet();
    }

    // Tokens that were watched have been read already.
    void finish() const {
        Tokens unread = all, predicted = all;
        if (pass.watched) {
            unread.count -= pass.watched;
            unread.index = pass.order + pass.watched;
            if (reads_all()) predicted = unread;
        } else {
            predicted.count = pass.predicted;
            predicted.index = pass.predict;
        }
        if (pass.reads && unread.count) read(unread);
        if (pass.predicted && predicted.count) predict(predicted);
    }
};

}  // namespace

extern "C" {

// Floats of scratch that a pass of `tokens` needs.
int64_t parcae_scratch(const Model* model, int64_t tokens, int64_t threads) {
    return Room(*model, tokens).floats(threads);
}

void parcae_pass(const Model* model, const Pass* pass) {
    const Room room(*model, pass->tokens);
    const Tokens all{pass->tokens, nullptr, pass->ids, pass->rows, pass->positions};
    Left left{pass->tokens, pass->watched};
    together(pass->threads, [&](Team team) {
        const Scratch mine = room.cut(pass->scratch, team.rank);
        const Walk walk{team, *model, *pass, mine, all, pass->drive ? pass->drive : mine.drive,
                        pass->x ? pass->x : mine.x};
        if (pass->from_zero) walk.rest_at_zero();
        if (pass->begins) walk.begin();
        if (pass->limits) walk.loop_each(left);
        else
            for (int64_t loop = 0; loop < pass->loops; loop++) walk.one_loop(all, loop);
        walk.finish();
    });
}

// y [tokens, out] = x W^T.
void parcae_multiply(const Matrix* a, const float* x, int64_t tokens, float* y, int64_t threads) {
    together(threads, [&](Team team) {
        multiply(team, *a, x, tokens,
                 [&](int64_t t, int64_t row, auto value) { store(y + t * a->out + row, value); });
    });
}

}  // extern "C"
