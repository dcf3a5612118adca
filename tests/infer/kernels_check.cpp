// Compares the kernels of infer/native with sums in double precision and in integers. Compiled for
// several CPUs by test_native_targets.py; prints what it was compiled for, or the first difference.

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "layer.h"
#include "predictions.h"

static std::mt19937 generator(1);

static std::vector<float> normals(int64_t n) {
    std::normal_distribution<float> draw;
    std::vector<float> values(n);
    for (float& value : values) value = draw(generator);
    return values;
}

static void require(bool correct, const char* what, int64_t out, int64_t in, int64_t tokens) {
    if (correct) return;
    std::printf("%s: wrong for out %d, in %d, tokens %d\n", what, int(out), int(in), int(tokens));
    std::exit(1);
}

static void check_products(int64_t out, int64_t in, int64_t tokens, int threads) {
    std::vector<float> weights = normals(out * in), x = normals(tokens * in), y(tokens * out);
    std::vector<int8_t> whole(out * in), quantised(tokens * (in + 3));
    std::vector<float> scale(out), scales(tokens);
    for (int64_t i = 0; i < out * in; i++) whole[i] = static_cast<int8_t>(generator() % 255 - 127);
    for (float& value : scale) value = 0.01f + 0.001f * (generator() % 7);
    std::vector<float> panels(panel_count(out) * FloatPanels::bytes(in) / sizeof(float));
    std::vector<int8_t> int8_panels(panel_count(out) * Int8Panels::bytes(in));
    pack(weights.data(), out, in, panels.data());
    pack(whole.data(), out, in, int8_panels.data());
    const QuantisedInputs buffers{quantised.data(), scales.data()};
    for (const Matrix& a : {Matrix{panels.data(), nullptr, out, in},
                            Matrix{int8_panels.data(), scale.data(), out, in}}) {
        run_threads(threads, [&](Team team) {
            gemm(team, a, x.data(), tokens, buffers, copy_to(y.data(), out));
        });
        for (int64_t t = 0; t < tokens; t++) {
            float largest = 0;
            for (int64_t i = 0; i < in; i++) largest = std::max(largest, std::fabs(x[t * in + i]));
            for (int64_t r = 0; r < out; r++) {
                double exact = 0, sizes = 0;
                int64_t integers = 0;
                for (int64_t i = 0; i < in; i++) {
                    const double product = double(weights[r * in + i]) * x[t * in + i];
                    exact += product;
                    sizes += std::fabs(product);
                    integers += whole[r * in + i] *
                                int64_t(std::nearbyint(x[t * in + i] * (127 / largest)));
                }
                const double found = y[t * out + r], eps = 6e-8;
                if (a.scale) {
                    exact = double(integers) * (largest / 127) * scale[r];
                    require(std::fabs(found - exact) <= 4 * eps * std::fabs(exact), "int8 gemm", out,
                            in, tokens);
                } else {
                    require(std::fabs(found - exact) <= (in + 1) * eps * sizes, "gemm", out, in,
                            tokens);
                }
            }
        }
    }
}

template <typename Element>
static void check_attention(int64_t head_dim, int64_t length) {
    const int64_t stride = 2 * head_dim;
    std::vector<float> q = normals(head_dim), row = normals(length * stride), out(head_dim);
    std::vector<float> scores(round_up(length, LANES));
    std::vector<Element> stored(row.size());
    convert(row.data(), row.size(), stored.data());
    for (size_t i = 0; i < row.size(); i++) row[i] = load_some(&stored[i], 1)[0];
    const Heads heads{0, 1, 1, head_dim, stride, 0.3f};
    attend(heads, q.data(), stored.data(), length, scores.data(), round_up(length, LANES),
           out.data());
    std::vector<double> weights(length);
    double total = 0, largest = -1e300;
    for (int64_t s = 0; s < length; s++) {
        for (int64_t i = 0; i < head_dim; i++)
            weights[s] += double(q[i]) * row[s * stride + i] * double(0.3f);
        largest = std::max(largest, weights[s]);
    }
    for (double& weight : weights) total += weight = std::exp(weight - largest);
    for (int64_t i = 0; i < head_dim; i++) {
        double exact = 0, sizes = 0;
        for (int64_t s = 0; s < length; s++) {
            exact += weights[s] / total * row[s * stride + head_dim + i];
            sizes += weights[s] / total * std::fabs(row[s * stride + head_dim + i]);
        }
        require(std::fabs(out[i] - exact) <= 1e-5 * sizes, "attention", head_dim, length, 1);
    }
}

// Rounding to the upper half of a float.
static void check_bfloat16(uint32_t bits, uint16_t expected) {
    const float value = load_as<float>(&bits);
    BFloat16 rounded;
    convert(&value, 1, &rounded);
    require(rounded.bits == expected, "bfloat16", bits >> 16, bits & 0xffff, rounded.bits);
}

int main() {
    for (int64_t out : {1, 5, 16, 33, 130})
        for (int64_t in : {1, 3, 7, 48, 100})
            for (int64_t tokens : {1, 2, 3, 7, 15, 33}) check_products(out, in, tokens, 1 + tokens % 3);
    for (int64_t tokens : {1, 5, 16, 130})  // several blocks of a panel, and chunks of tokens
        for (int64_t in : {769, 2100}) check_products(70, in, tokens, 1 + tokens % 2);
    for (int64_t head_dim : {2, 6, 16, 34, 128})
        for (int64_t length : {1, 3, 17, 50}) {
            check_attention<float>(head_dim, length);
            check_attention<BFloat16>(head_dim, length);
        }
    check_bfloat16(0x3f807fff, 0x3f80);  // below the middle of two numbers
    check_bfloat16(0x3f808000, 0x3f80);  // in the middle: to the even one
    check_bfloat16(0x3f818000, 0x3f82);
    check_bfloat16(0xbf808001, 0xbf81);
    check_bfloat16(0x7f7fffff, 0x7f80);  // the largest float becomes infinity
    check_bfloat16(0xff800000, 0xff80);
    check_bfloat16(0x7f800001, 0x7fc0);  // NaN, whose upper half alone would be infinity
    check_bfloat16(0x7fffffff, 0x7fc0);
    float special[3] = {1, NAN, 2};
    int8_t integers[4];
    require(std::isnan(quantise(special, 3, integers)), "quantise NaN", 3, 1, 1);
    special[1] = INFINITY;
    require(std::isnan(quantise(special, 3, integers)), "quantise infinity", 3, 1, 1);
    std::puts(ISA);
}
