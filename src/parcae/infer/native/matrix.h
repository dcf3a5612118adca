// Products of a matrix with a few tokens. The work is to read every weight once: a row of weights is
// multiplied with several tokens while it is in registers, and what comes next is fetched meanwhile.

#pragma once

#include "team.h"
#include "vectors.h"

extern "C" {

struct Matrix {  // [out, in], row by row; bytes have a scale for each row
    const void* data;    // null: there is no such matrix
    const float* scale;  // null: the data are floats
    int64_t out, in;
};

}  // extern "C"

namespace {

constexpr int MOST_AT_ONCE = 6;   // tokens, whose sums with four rows fill the registers
constexpr int ROWS_OF_ALONE = 16;  // rows at once for one token alone

// values[m][r] for R rows, four by four, and M tokens, where rows are whole vectors. Meanwhile A rows
// are called for, from `next` on: the processor foresees one stretch of memory at a time, not several.
template <typename T, int R, int M, int A>
void some_rows(const Matrix& a, int64_t row, const float* x, int64_t next, float* values) {
    const T *w = static_cast<const T*>(a.data) + row * a.in, *later = w + (next - row) * a.in;
    Floats total[R][M] = {};
    for (int64_t i = 0; i < a.in; i += LANES) {
        Floats inputs[M];
        for (int m = 0; m < M; m++) inputs[m] = load(x + m * a.in + i);
        if (i * sizeof(T) % 64 == 0)
            for (int k = 0; k < A; k++) __builtin_prefetch(later + k * a.in + i);
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

// Of any length.
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
    Rows alone;                    // many rows for one token
    Rows once[MOST_AT_ONCE + 1];   // four rows that so many tokens meet once
    Rows again[MOST_AT_ONCE + 1];  // four rows for one of several groups of tokens
    float (*one)(const Matrix&, int64_t, const float*);
};

template <typename T>
constexpr Kernels KERNELS = {
    some_rows<T, ROWS_OF_ALONE, 1, ROWS_OF_ALONE>,
    {nullptr, some_rows<T, 4, 1, 4>, some_rows<T, 4, 2, 4>, some_rows<T, 4, 3, 4>,
     some_rows<T, 4, 4, 4>, some_rows<T, 4, 5, 4>, some_rows<T, 4, 6, 4>},
    {nullptr, nullptr, nullptr, some_rows<T, 4, 3, 2>, some_rows<T, 4, 4, 2>,
     some_rows<T, 4, 5, 2>, some_rows<T, 4, 6, 2>},
    one_row<T>,
};

// y = x W^T for x [tokens, in]; what becomes of it is up to `put(token, row, values)`, where values
// are those of four rows, or of one.
template <typename Put>
void multiply(const Team& team, const Matrix& a, const float* x, int64_t tokens, Put put) {
    const Kernels& kernels = a.scale ? KERNELS<int8_t> : KERNELS<float>;
    const int64_t groups = (tokens + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
    const Rows* four = groups == 1 ? kernels.once : kernels.again;
    float values[std::max(ROWS_OF_ALONE, 4 * MOST_AT_ONCE)];
    int64_t row, end;
    team.share(a.out, LANES, row, end);
    const int64_t many = a.in % LANES ? row : end;  // up to here rows are taken several at a time
    for (; tokens == 1 && row + ROWS_OF_ALONE <= many; row += ROWS_OF_ALONE) {
        kernels.alone(a, row, x, row + ROWS_OF_ALONE, values);
        for (int r = 0; r < ROWS_OF_ALONE; r += 4) put(0, row + r, load_as<Quarter>(values + r));
    }
    for (; row + 4 <= many; row += 4)
        for (int64_t group = 0; group < groups; group++) {  // alike in size, so of three at least
            int64_t token = tokens * group / groups, some = tokens * (group + 1) / groups - token;
            four[some](a, row, x + token * a.in, row + 4 + 2 * (group % 2), values);
            for (int64_t m = 0; m < some; m++)
                put(token + m, row, load_as<Quarter>(values + 4 * m));
        }
    for (; row < end; row++)
        for (int64_t token = 0; token < tokens; token++)
            put(token, row, kernels.one(a, row, x + token * a.in));
}

}  // namespace
