// Products of a matrix with a few tokens. Reading the weights dominates: a row of weights is
// multiplied with several tokens while it is in registers, and the next rows are prefetched.

#pragma once

#include "team.h"
#include "vectors.h"

extern "C" {

struct Matrix {  // [out, in], row-major
    const void* data;    // null: no matrix
    const float* scale;  // one per row of int8 data; null: the data are floats
    int64_t out, in;
};

}  // extern "C"

namespace {

constexpr int MAX_GROUP = 6;     // tokens whose sums with four rows fill the registers
constexpr int ROWS_PER_TOKEN = 16;  // rows at once for a single token

// values[m][r] for R rows, four at a time, and M tokens; rows are multiples of LANES. A rows from
// `next` on are prefetched: the CPU predicts one stream of memory, not several.
template <typename T, int R, int M, int A>
void some_rows(const Matrix& a, int64_t row, const float* x, int64_t next, float* values) {
    const T *w = static_cast<const T*>(a.data) + row * a.in, *ahead = w + (next - row) * a.in;
    Floats total[R][M] = {};
    for (int64_t i = 0; i < a.in; i += LANES) {
        Floats inputs[M];
        for (int m = 0; m < M; m++) inputs[m] = load(x + m * a.in + i);
        if (i * sizeof(T) % 64 == 0)
            for (int k = 0; k < A; k++) __builtin_prefetch(ahead + k * a.in + i);
        for (int r = 0; r < R; r++) {
            Floats weights = load(w + r * a.in + i);
            for (int m = 0; m < M; m++)
                total[r][m] = plus_product(total[r][m], weights, inputs[m]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r += 4) {
            Quarter four = sums(total[r][m], total[r + 1][m], total[r + 2][m], total[r + 3][m]);
            if (a.scale) four *= load_as<Quarter>(a.scale + row + r);
            store(values + m * R + r, four);
        }
}

// One row of any length.
template <typename T>
float one_row(const Matrix& a, int64_t row, const float* x) {
    const T* w = static_cast<const T*>(a.data) + row * a.in;
    Floats total = {};
    int64_t i = 0;
    for (; i + LANES <= a.in; i += LANES) total = plus_product(total, load(w + i), load(x + i));
    if (i < a.in) total = plus_product(total, load_some(w + i, a.in - i), load_some(x + i, a.in - i));
    return sum(total) * (a.scale ? a.scale[row] : 1.0f);
}

typedef void (*Rows)(const Matrix&, int64_t, const float*, int64_t, float*);

struct Kernels {
    Rows single;                   // many rows for one token
    Rows one_group[MAX_GROUP + 1];  // four rows for all tokens, by their number
    Rows groups[MAX_GROUP + 1];     // four rows for one of several groups of tokens
    float (*one_row)(const Matrix&, int64_t, const float*);
};

template <typename T>
constexpr Kernels KERNELS = {
    some_rows<T, ROWS_PER_TOKEN, 1, ROWS_PER_TOKEN>,
    {nullptr, some_rows<T, 4, 1, 4>, some_rows<T, 4, 2, 4>, some_rows<T, 4, 3, 4>,
     some_rows<T, 4, 4, 4>, some_rows<T, 4, 5, 4>, some_rows<T, 4, 6, 4>},
    {nullptr, nullptr, nullptr, some_rows<T, 4, 3, 2>, some_rows<T, 4, 4, 2>,
     some_rows<T, 4, 5, 2>, some_rows<T, 4, 6, 2>},
    one_row<T>,
};

// y = x W^T for x [tokens, in]. `put(token, row, values)` receives the results of four rows, or of
// one row.
template <typename Put>
void multiply(const Team& team, const Matrix& a, const float* x, int64_t tokens, Put put) {
    const Kernels& kernels = a.scale ? KERNELS<int8_t> : KERNELS<float>;
    const int64_t groups = (tokens + MAX_GROUP - 1) / MAX_GROUP;
    const Rows* four = groups == 1 ? kernels.one_group : kernels.groups;
    float values[std::max(ROWS_PER_TOKEN, 4 * MAX_GROUP)];
    int64_t row, end;
    team.share(a.out, LANES, row, end);
    const int64_t many = a.in % LANES ? row : end;  // up to here several rows at a time
    for (; tokens == 1 && row + ROWS_PER_TOKEN <= many; row += ROWS_PER_TOKEN) {
        kernels.single(a, row, x, row + ROWS_PER_TOKEN, values);
        for (int r = 0; r < ROWS_PER_TOKEN; r += 4) put(0, row + r, load_as<Quarter>(values + r));
    }
    for (; row + 4 <= many; row += 4)
        for (int64_t group = 0; group < groups; group++) {  // of nearly equal size, so at least three
            int64_t token = tokens * group / groups, some = tokens * (group + 1) / groups - token;
            four[some](a, row, x + token * a.in, row + 4 + 2 * (group % 2), values);
            for (int64_t m = 0; m < some; m++)
                put(token + m, row, load_as<Quarter>(values + 4 * m));
        }
    for (; row < end; row++)
        for (int64_t token = 0; token < tokens; token++)
            put(token, row, kernels.one_row(a, row, x + token * a.in));
}

}  // namespace
