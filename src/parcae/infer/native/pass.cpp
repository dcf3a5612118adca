// A whole pass over a few tokens on a CPU, from ids to logits, or any of its stages, in one call.
//
// A token at a time, the work is to read every weight once. Operators started one by one wait for
// each other and for their own start; here the threads walk through all layers and loops together.

#include "layer.h"

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
    // or when a loop moves its state by less than a share `least`; then it stands still, and the
    // slots of the loops up to `settled` receive its last keys and values.
    const int64_t *limits, *settled;
    const float* least;       // 0: that is no reason to stop; null: for none
    int64_t *ran, *index;     // how often each has looped at last; room for as many numbers
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
    int64_t made = 0, hidden = 0, mixed, before, drive, x, normed, scores, scores_room;
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
    }
    int64_t floats(int64_t threads) const {
        return made + mixed + hidden + before + drive + x + threads * (normed + scores);
    }
    Scratch cut(float* p, int rank) const {
        Scratch part;
        part.made = p;
        part.mixed = part.made + made;
        part.hidden = part.mixed + mixed;
        part.before = part.hidden + hidden;
        part.drive = part.before + before;
        part.x = part.drive + drive;
        part.normed = part.x + x + rank * (normed + scores);
        part.scores = part.normed + normed;
        part.scores_room = scores_room;
        return part;
    }
};

struct Walk {  // what one thread knows
    const Team& team;
    const Model& model;
    const Pass& pass;
    const Scratch& scratch;
    Tokens all;
    float *drive, *x;

    void outer_layers(int64_t first_layer, int64_t first_kept, int64_t count) const {
        for (int64_t i = 0; i < count; i++) {
            Kept kept{pass.outer + (first_kept + i) * pass.outer_layer, pass.outer_row};
            run_layer(team, model.layers[first_layer + i], all, kept, model.outer_phases, x,
                      scratch);
        }
    }

    // to [tokens, a.out] = from W^T, or a copy where there is no such matrix.
    void product(const Matrix& a, const float* from, float* to, int64_t width) const {
        if (a.data) {
            multiply(team, a, from, all.count, [&](int64_t t, int64_t row, auto y) {
                store(to + t * a.out + row, y);
            });
        } else {
            int64_t begin, end;
            team.share(all.count, 1, begin, end);
            std::copy(from + begin * width, from + end * width, to + begin * width);
        }
        team.meet();
    }

    void begin() const {
        for (int64_t t = team.rank; t < all.count; t += team.size)
            std::copy_n(model.embedding + all.ids[t] * model.width, model.width,
                        x + t * model.width);
        team.meet();
        outer_layers(0, 0, model.prelude);
        if (model.prelude_norm)
            scaled_norm(team, x, model.width, model.norm_floor, model.prelude_norm, all);
        product(model.into, x, drive, model.width);
        if (!model.core) product(Matrix{}, drive, pass.state, model.state_width);
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

    // How many tokens of the index loop on; the others' count is noted.
    int64_t still_looping(int64_t loop, int64_t count) const {
        const int64_t width = model.state_width;
        int64_t left = 0;
        for (int64_t t = 0; t < count; t++) {
            int64_t token = pass.index[t];
            bool stops = loop >= pass.limits[token];
            float share = pass.least ? pass.least[token] : 0;
            if (!stops && share > 0) {
                const float* now = pass.state + token * width;
                float* then = scratch.before + token * width;
                for (int64_t i = 0; i < width; i++) then[i] -= now[i];
                stops = dot(then, then, width) < share * share * dot(now, now, width);
            }
            if (stops) pass.ran[token] = loop;
            else pass.index[left++] = token;
        }
        return left;
    }

    void loop_each(int64_t& looping) const {
        Tokens tokens = all;
        tokens.index = pass.index;
        for (int64_t loop = 0; loop < pass.loops && looping; loop++) {
            tokens.count = looping;
            one_loop(tokens, loop);
            if (team.rank == 0) looping = still_looping(loop + 1, tokens.count);
            team.meet();
        }
        for (int64_t t = team.rank; t < all.count; t += team.size) settle(t);
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

    void read() const {
        product(model.readout, pass.state, x, model.width);
        outer_layers(model.prelude + model.core, model.prelude, model.coda);
        scaled_norm(team, x, model.width, model.norm_floor, model.final_norm, all);
    }

    void predict() const {
        for (int64_t p = 0; p < pass.predicted; p++)
            std::copy_n(x + pass.predict[p] * model.width, model.width,
                        scratch.normed + p * model.width);
        multiply(team, model.head, scratch.normed, pass.predicted,
                 [&](int64_t p, int64_t row, auto y) {
                     store(pass.logits + p * model.head.out + row, y);
                 });
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
    int64_t looping = pass->tokens;
    for (int64_t t = 0; pass->limits && t < looping; t++) pass->index[t] = t;
    together(pass->threads, [&](Team team) {
        const Scratch mine = room.cut(pass->scratch, team.rank);
        const Walk walk{team, *model, *pass, mine, all, pass->drive ? pass->drive : mine.drive,
                        pass->x ? pass->x : mine.x};
        if (pass->from_zero) walk.rest_at_zero();
        if (pass->begins) walk.begin();
        if (pass->limits) walk.loop_each(looping);
        else
            for (int64_t loop = 0; loop < pass->loops; loop++) walk.one_loop(all, loop);
        if (pass->reads) walk.read();
        if (pass->predicted) walk.predict();
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
