// Residual blocks for a few tokens on a CPU: what infer/layers.py computes, in one call per stack.
//
// A token at a time, the work is to read every weight once. Operators started one by one wait for
// each other and for their own start; here the threads walk through a stack together and meet at a
// barrier where one step needs all of the step before. Several tokens share the reading: a row of
// weights is multiplied with all of them while it is in registers.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

typedef float Floats __attribute__((vector_size(64), aligned(4)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
constexpr int LANES = 16;
constexpr int64_t BLOCK = 1 << 18;  // bytes of weights that are used again at once

Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }

Floats load(const int8_t* p) {
#ifdef __AVX512F__
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return reinterpret_cast<Floats>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#else
    Floats values;
    for (int i = 0; i < LANES; i++) values[i] = p[i];
    return values;
#endif
}

float sum(Floats v) {
    Half halves[2];
    std::memcpy(halves, &v, sizeof v);
    Half half = halves[0] + halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, &half, sizeof half);
    Quarter quarter = quarters[0] + quarters[1];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

}  // namespace

extern "C" {

struct Matrix {  // [out, in], row by row; bytes have a scale for each row
    const void* data;
    const float* scale;  // null: the data are floats
    int64_t out, in;
};

struct Layer {
    Matrix inner, outer, fc, proj;
    const float* after_attention;  // scales of the norms after, or null
    const float* after_mlp;
    float norm_floor, qk_floor;    // D eps and E eps; a negative qk_floor is no norm
    float score_scale;
    int32_t heads, kv_heads, head_dim, gated_mlp;
};

struct Pass {  // the tokens of a pass and where they belong
    int64_t tokens;
    const int64_t* rows;
    const int64_t* positions;
    const float* phases;           // [tokens, head_dim / 2] of (cos, sin)
    int64_t row_stride;            // in a layer's cache [row, position, 2, kv_heads, head_dim]
};

struct Depth {  // when the tokens stop looping
    const int64_t* limits;    // after so many loops
    const float* thresholds;  // also where a loop moves its state by less than this share; 0: never
    int64_t* done;            // how often each looped
    int64_t* index;           // room for `tokens` numbers
};

struct Mix {  // A_bar: a diagonal, a matrix, or, where both are null, 1
    const float* decay;
    Matrix transition;
};

}  // extern "C"

namespace {

// Threads wait for each other hundreds of times a token, mostly for microseconds. So they look out
// for the last one first; but where it has no core to run on, they make room for it.
class Barrier {
    std::atomic<int> arrived{0}, round{0};

  public:
    void meet(int size) {
        int mine = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int looks = 0; round.load(std::memory_order_acquire) == mine; looks++)
            if (looks > 4000) std::this_thread::yield();
    }
};

struct Team {
    int rank, size;
    Barrier* barrier;
    void meet() const {
        if (size > 1) barrier->meet(size);
    }
    // This thread's share of n things, in runs of `grain`.
    void share(int64_t n, int64_t grain, int64_t& begin, int64_t& end) const {
        int64_t blocks = (n + grain - 1) / grain, each = (blocks + size - 1) / size;
        begin = std::min(n, rank * each * grain);
        end = std::min(n, begin + each * grain);
    }
};

// R rows of weights with M tokens: every weight is read once, and R * M sums are in flight.
template <typename T, int R, int M>
inline void products(const T* w, int64_t in, const float* x, int64_t x_stride, float sums[R][M]) {
    Floats total[R][M] = {};
    int64_t i = 0;
    for (; i + LANES <= in; i += LANES) {
        Floats inputs[M];
        for (int m = 0; m < M; m++) inputs[m] = load(x + m * x_stride + i);
        for (int r = 0; r < R; r++) {
            Floats weights = load(w + r * in + i);
            for (int m = 0; m < M; m++) total[r][m] += weights * inputs[m];
        }
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) {
            float rest = 0;
            for (int64_t j = i; j < in; j++) rest += float(w[r * in + j]) * x[m * x_stride + j];
            sums[r][m] = sum(total[r][m]) + rest;
        }
}

template <typename T, int R, int M, typename Put>
inline void some_rows(const Matrix& a, int64_t row, const float* x, int64_t x_stride, int64_t token,
                      Put put) {
    float sums[R][M];
    products<T, R, M>(static_cast<const T*>(a.data) + row * a.in, a.in, x + token * x_stride,
                      x_stride, sums);
    for (int r = 0; r < R; r++) {
        float scale = a.scale ? a.scale[row + r] : 1.0f;
        for (int m = 0; m < M; m++) put(token + m, row + r, sums[r][m] * scale);
    }
}

template <typename T, int M, typename Put>
inline void some_tokens(const Matrix& a, int64_t row, int64_t end, const float* x,
                        int64_t x_stride, int64_t token, Put put) {
    for (; row + 4 <= end; row += 4) some_rows<T, 4, M>(a, row, x, x_stride, token, put);
    for (; row < end; row++) some_rows<T, 1, M>(a, row, x, x_stride, token, put);
}

// Tokens in groups of six, whose sums fill the registers. Rows of weights in blocks that stay in the
// cache until every group has met them, while a group's inputs stay in the first one.
template <typename T, typename Put>
void all_tokens(const Team& team, const Matrix& a, const float* x, int64_t x_stride,
                int64_t tokens, Put put) {
    int64_t begin, end, block = std::max<int64_t>(4, BLOCK / (a.in * sizeof(T)) / 4 * 4);
    team.share(a.out, 4, begin, end);
    for (int64_t row = begin; row < end; row += block) {
        int64_t last = std::min(end, row + block), t = 0;
        for (; t + 6 <= tokens; t += 6) some_tokens<T, 6>(a, row, last, x, x_stride, t, put);
        switch (tokens - t) {
            case 5: some_tokens<T, 5>(a, row, last, x, x_stride, t, put); break;
            case 4: some_tokens<T, 4>(a, row, last, x, x_stride, t, put); break;
            case 3: some_tokens<T, 3>(a, row, last, x, x_stride, t, put); break;
            case 2: some_tokens<T, 2>(a, row, last, x, x_stride, t, put); break;
            case 1: some_tokens<T, 1>(a, row, last, x, x_stride, t, put); break;
        }
    }
}

// y = x W^T; what becomes of a sum is up to `put(token, row, value)`.
template <typename Put>
void multiply(const Team& team, const Matrix& a, const float* x, int64_t x_stride, int64_t tokens,
              Put put) {
    a.scale ? all_tokens<int8_t>(team, a, x, x_stride, tokens, put)
            : all_tokens<float>(team, a, x, x_stride, tokens, put);
}

float dot(const float* a, const float* b, int64_t n) {
    Floats total = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) total += load(a + i) * load(b + i);
    float rest = 0;
    for (; i < n; i++) rest += a[i] * b[i];
    return sum(total) + rest;
}

void scaled_copy(const float* x, float factor, int64_t n, float* out) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * factor;
}

// Tokens that still loop. What is kept from loop to loop lies by their place in the pass; what a
// layer needs in between is packed, as if the others did not exist.
struct Active {
    int64_t count;
    const int64_t* index;  // null: all of them
    int64_t place(int64_t t) const { return index ? index[t] : t; }
};

// x / sqrt(|x|^2 + floor) for every token; the threads take turns.
void unit_norm(const Team& team, const float* x, int64_t width, float floor, const Active& active,
               float* out) {
    for (int64_t t = team.rank; t < active.count; t += team.size) {
        const float* from = x + active.place(t) * width;
        scaled_copy(from, 1 / std::sqrt(dot(from, from, width) + floor), width, out + t * width);
    }
}

void norm_in_place(const Team& team, float* x, int64_t width, float floor, const float* scale,
                   const Active& active) {
    for (int64_t t = team.rank; t < active.count; t += team.size) {
        float* row = x + active.place(t) * width;
        float factor = 1 / std::sqrt(dot(row, row, width) + floor);
        for (int64_t i = 0; i < width; i++) row[i] *= factor * scale[i];
    }
}

// Turn the pairs of a head by its position's phases, then make it a unit vector.
void turn(float* head, const float* phases, int64_t head_dim, float floor) {
    for (int64_t i = 0; i < head_dim; i += 2) {
        float a = head[i], b = head[i + 1], c = phases[i], s = phases[i + 1];
        head[i] = a * c - b * s;
        head[i + 1] = b * c + a * s;
    }
    if (floor >= 0)
        scaled_copy(head, 1 / std::sqrt(dot(head, head, head_dim) + floor), head_dim, head);
}

// Softmax of the scores over `length` keys, then the mean of the values.
void attend(const float* q, const float* keys, const float* values, int64_t stride, int64_t length,
            int64_t head_dim, float scale, float* scores, float* __restrict__ out) {
    float largest = -INFINITY;
    for (int64_t s = 0; s < length; s++) {
        scores[s] = scale * dot(q, keys + s * stride, head_dim);
        largest = std::max(largest, scores[s]);
    }
    float whole = 0;
    for (int64_t s = 0; s < length; s++) whole += scores[s] = std::exp(scores[s] - largest);
    std::memset(out, 0, head_dim * sizeof(float));
    for (int64_t s = 0; s < length; s++) {
        const float* __restrict__ value = values + s * stride;
        float share = scores[s] / whole;
        for (int64_t i = 0; i < head_dim; i++) out[i] += share * value[i];
    }
}

struct Scratch {
    float *normed, *made, *mixed, *hidden, *before, *scores;
};

void one_layer(const Team& team, const Layer& layer, const Pass& pass, const Active& active,
               float* x, float* kept, const float* value, const Scratch& scratch) {
    const int64_t N = active.count, H = layer.heads, K = layer.kv_heads, E = layer.head_dim;
    const int64_t width = layer.inner.in, made = layer.inner.out, hidden = layer.proj.in;
    const int64_t stride = 2 * K * E;
    unit_norm(team, x, width, layer.norm_floor, active, scratch.normed);
    team.meet();
    multiply(team, layer.inner, scratch.normed, width, N,
             [&](int64_t t, int64_t o, float y) { scratch.made[t * made + o] = y; });
    team.meet();
    for (int64_t job = team.rank; job < N * (H + K); job += team.size) {
        int64_t t = job / (H + K), h = job % (H + K), at = active.place(t);
        float* head = scratch.made + t * made + h * E;
        turn(head, pass.phases + at * E, E, layer.qk_floor);
        if (h < H) continue;
        int64_t kv = h - H;
        float* cell = kept + pass.rows[at] * pass.row_stride + pass.positions[at] * stride + kv * E;
        std::memcpy(cell, head, E * sizeof(float));
        const float* v = scratch.made + t * made + (H + K + kv) * E;
        float gate = value ? 2 / (1 + std::exp(-scratch.made[t * made + (H + 2 * K) * E + kv])) : 0;
        const float* extra = value + at * K * E + kv * E;
        for (int64_t i = 0; i < E; i++) cell[K * E + i] = value ? v[i] + gate * extra[i] : v[i];
    }
    team.meet();
    for (int64_t job = team.rank; job < N * H; job += team.size) {
        int64_t t = job / H, h = job % H, at = active.place(t);
        const float* row = kept + pass.rows[at] * pass.row_stride + h / (H / K) * E;
        attend(scratch.made + t * made + h * E, row, row + K * E, stride, pass.positions[at] + 1, E,
               layer.score_scale, scratch.scores, scratch.mixed + t * H * E + h * E);
    }
    team.meet();
    multiply(team, layer.outer, scratch.mixed, width, N,
             [&](int64_t t, int64_t o, float y) { x[active.place(t) * width + o] += y; });
    team.meet();
    if (layer.after_attention) {
        norm_in_place(team, x, width, layer.norm_floor, layer.after_attention, active);
        team.meet();
    }
    unit_norm(team, x, width, layer.norm_floor, active, scratch.normed);
    team.meet();
    if (!layer.gated_mlp) {
        multiply(team, layer.fc, scratch.normed, width, N, [&](int64_t t, int64_t o, float y) {
            float positive = std::max(y, 0.0f);
            scratch.hidden[t * hidden + o] = positive * positive;
        });
    } else {
        float* both = scratch.made;
        multiply(team, layer.fc, scratch.normed, width, N,
                 [&](int64_t t, int64_t o, float y) { both[t * 2 * hidden + o] = y; });
        team.meet();
        for (int64_t t = 0; t < N; t++)
            for (int64_t i = team.rank; i < hidden; i += team.size) {
                float gate = both[t * 2 * hidden + i];
                float up = both[t * 2 * hidden + hidden + i];
                scratch.hidden[t * hidden + i] = gate / (1 + std::exp(-gate)) * up;
            }
    }
    team.meet();
    multiply(team, layer.proj, scratch.hidden, hidden, N,
             [&](int64_t t, int64_t o, float y) { x[active.place(t) * width + o] += y; });
    team.meet();
    if (layer.after_mlp) {
        norm_in_place(team, x, width, layer.norm_floor, layer.after_mlp, active);
        team.meet();
    }
}

// h = A_bar h + drive for the tokens that still loop; `before` keeps what h was.
void mix_in(const Team& team, const Mix& mix, const float* drive, int64_t width,
            const Active& active, float* h, float* before, float* packed) {
    int64_t begin, end;
    team.share(active.count, 1, begin, end);
    for (int64_t t = begin; t < end; t++) {
        int64_t at = active.place(t) * width;
        if (before) std::memcpy(before + at, h + at, width * sizeof(float));
        if (mix.transition.data) {
            std::memcpy(packed + t * width, h + at, width * sizeof(float));
            continue;
        }
        for (int64_t i = 0; i < width; i++)
            h[at + i] = (mix.decay ? mix.decay[i] * h[at + i] : h[at + i]) + drive[at + i];
    }
    team.meet();
    if (!mix.transition.data) return;
    multiply(team, mix.transition, packed, width, active.count,
             [&](int64_t t, int64_t o, float y) {
                 int64_t at = active.place(t) * width + o;
                 h[at] = y + drive[at];
             });
    team.meet();
}

// Which tokens loop on after `loop` loops; the others' count is noted.
int64_t still_looping(const Depth& depth, int64_t loop, int64_t count, int64_t width,
                      const float* h, float* before) {
    int64_t left = 0;
    for (int64_t t = 0; t < count; t++) {
        int64_t token = depth.index[t];
        const float* now = h + token * width;
        float* then = before + token * width;
        bool stops = loop >= depth.limits[token];
        if (!stops && depth.thresholds[token] > 0) {
            for (int64_t i = 0; i < width; i++) then[i] -= now[i];
            float share = depth.thresholds[token];
            stops = dot(then, then, width) < share * share * dot(now, now, width);
        }
        if (stops) depth.done[token] = loop;
        else depth.index[left++] = token;
    }
    return left;
}

struct Room {  // the largest of what the layers need for a token
    int64_t width = 0, made = 0, hidden = 0;
    Room(const Layer* layers, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            width = std::max(width, layers[i].inner.in);
            hidden = std::max(hidden, layers[i].proj.in);
            made = std::max({made, layers[i].inner.out, 2 * layers[i].proj.in});
        }
    }
    int64_t floats(int64_t tokens) const { return tokens * (3 * width + made + hidden); }
    Scratch cut(float* p, int64_t tokens, int64_t context, int rank) const {
        Scratch part;
        part.normed = p;
        part.made = part.normed + tokens * width;
        part.mixed = part.made + tokens * made;
        part.hidden = part.mixed + tokens * width;
        part.before = part.hidden + tokens * hidden;
        part.scores = part.before + tokens * width + rank * context;
        return part;
    }
};

// The same function for every thread of a team.
template <typename Function>
void together(int64_t threads, Function function) {
    Barrier barrier;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    function(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier});
#else
    function(Team{0, 1, &barrier});
#endif
}

}  // namespace

extern "C" {

// Floats of scratch that a pass of `tokens` needs, with `threads` and a context.
int64_t parcae_scratch(const Layer* layers, int64_t count, int64_t tokens, int64_t context,
                       int64_t threads) {
    return Room(layers, count).floats(tokens) + threads * context;
}

// x [tokens, width] in place through `count` layers, at most `loops` times; before each time it is
// mixed with `drive`, unless `mix` is null. With `depth` every token stops when it should.
// kept[loop * count + i] is layer i's cache in that loop, values[i] its value embeddings
// [tokens, kv_heads * head_dim], or null.
void parcae_layers(const Layer* layers, int64_t count, const Pass* pass, const Mix* mix,
                   const Depth* depth, const float* drive, int64_t loops, float* x,
                   float* const* kept, const float* const* values, float* scratch,
                   int64_t context, int64_t threads) {
    const Room room(layers, count);
    const int64_t width = layers[0].inner.in;
    int64_t looping = pass->tokens;
    for (int64_t t = 0; depth && t < looping; t++) depth->index[t] = t;
    together(threads, [&](Team team) {
        const Scratch mine = room.cut(scratch, pass->tokens, context, team.rank);
        for (int64_t loop = 0; loop < loops; loop++) {
            const Active active{looping, depth ? depth->index : nullptr};
            if (!active.count) break;
            if (mix)
                mix_in(team, *mix, drive, width, active, x, depth ? mine.before : nullptr,
                       mine.normed);
            for (int64_t i = 0; i < count; i++)
                one_layer(team, layers[i], *pass, active, x, kept[loop * count + i], values[i],
                          mine);
            if (!depth) continue;
            if (team.rank == 0)
                looping = still_looping(*depth, loop + 1, active.count, width, x, mine.before);
            team.meet();
        }
    });
}

// y [tokens, out] = x W^T, or y + x W^T.
void parcae_multiply(const Matrix* a, const float* x, int64_t tokens, float* y, int32_t add,
                     int64_t threads) {
    together(threads, [&](Team team) {
        multiply(team, *a, x, a->in, tokens, [&](int64_t t, int64_t o, float value) {
            float& cell = y[t * a->out + o];
            cell = add ? cell + value : value;
        });
    });
}

}  // extern "C"
