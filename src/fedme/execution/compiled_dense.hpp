// One dense layer over the samples of a batch.

#pragma once

#include "compiled_vectors.hpp"

namespace {

// outputs[b][o] = x[b] . w[o] for B samples and O outputs, whose sums stay in registers.
template <typename real, int B, int O>
__attribute__((noinline)) void dots(const real *const *x, const real *w, int64_t wide, real *outputs, int64_t high) {
    const vector<real> zero = {};
    const real *inputs[B];
    vector<real> sums[B][O];
    for (int b = 0; b < B; b++) {
        inputs[b] = x[b];
        for (int o = 0; o < O; o++) sums[b][o] = zero;
    }
    for (int64_t k = 0; k < wide; k += LANES<real>)
        for (int b = 0; b < B; b++)
            for (int o = 0; o < O; o++) sums[b][o] += at(inputs[b] + k) * at(w + o * wide + k);
    for (int b = 0; b < B; b++)
        for (int o = 0; o < O; o++) outputs[b * high + o] = total(sums[b][o]);
}

// What becomes of a gradient. A plain step has its slopes multiplied by -rate already, so that the sums start from the weights.
enum Use { PLAIN, RULE, KEEP };

// The gradient of the weights of O outputs and K vectors of inputs, the sum of slopes[b][o] * x[b], put to use.
template <typename real, Use USE, int O, int K>
inline __attribute__((always_inline)) void descend_block(const real *const *x, const real *slopes, int64_t high, int64_t samples,
                                                         Weights<real> &weights, int64_t row, int64_t wide, int64_t first,
                                                         const Rule<real> &rule) {
    constexpr int64_t lanes = LANES<real>;
    const vector<real> zero = {};
    real *w = weights.now.data() + row * wide + first;
    vector<real> sums[O][K];
    for (int o = 0; o < O; o++)
        for (int k = 0; k < K; k++) sums[o][k] = USE == PLAIN ? at(w + o * wide + k * lanes) : zero;
    for (int64_t b = 0; b < samples; b++)
        for (int o = 0; o < O; o++)
            for (int k = 0; k < K; k++) sums[o][k] += slopes[b * high + o] * at(x[b] + first + k * lanes);
    for (int o = 0; o < O; o++)
        for (int k = 0; k < K; k++) {
            const int64_t place = o * wide + k * lanes;
            if (USE == PLAIN)
                at(w + place) = sums[o][k];
            else if (USE == KEEP)
                at(&weights.gradient[row * wide + first + place]) = sums[o][k];
            else
                at(w + place) -= rule.rate * weights.step(rule, row * wide + first + place, sums[o][k]);
        }
}

template <typename real, Use USE, int O>
__attribute__((noinline)) void descend_rows(const real *const *x, const real *slopes, int64_t high, int64_t samples,
                                            Weights<real> &weights, int64_t row, int64_t wide, const Rule<real> &rule) {
    constexpr int64_t lanes = LANES<real>;
    int64_t k = 0;
    for (; k + 3 * lanes <= wide; k += 3 * lanes)
        descend_block<real, USE, O, 3>(x, slopes, high, samples, weights, row, wide, k, rule);
    for (; k < wide; k += lanes) descend_block<real, USE, O, 1>(x, slopes, high, samples, weights, row, wide, k, rule);
}

template <typename real>
struct Layer {
    int64_t in, out, wide, high;  // inputs and outputs, and the same padded
    int64_t activation;
    Dropout dropout;
    Layout layout;  // of the weight
    Weights<real> weight, bias;  // out x wide, and high; there may be no bias
    Numbers<real> outputs;   // batch x high
    Numbers<real> slopes;    // batch x high: of the loss, by what the layer computes before its activation
    Numbers<real> mask, dropped;  // batch x high: what dropout multiplies outputs by, and what it leaves of them
    std::vector<const real *> x;  // its inputs: a pointer for each sample

    // `columns` says where in a padded row each input stands.
    Layer(int64_t out, int64_t wide, const std::vector<int64_t> &columns, int64_t activation, const Dropout &dropout,
          int64_t batch)
        : in(columns.size()), out(out), wide(wide), high(padded<real>(out)), activation(activation), dropout(dropout),
          layout(in_rows(out, in, wide)), outputs(batch * high), slopes(batch * high), mask(dropout.p ? batch * high : 0),
          dropped(mask.size()), x(batch) {
        layout.column = columns;
    }

    // A few outputs for all samples: the weights of those are in the cache then, however many there are.
    template <int O>
    void forward_rows(int64_t samples, int64_t o) {
        const real *w = &weight.now[o * wide];
        int64_t b = 0;
        for (; (samples - b) % 3 && samples - b > 1; b += 2) dots<real, 2, O>(&x[b], w, wide, &outputs[b * high + o], high);
        for (; b + 3 <= samples; b += 3) dots<real, 3, O>(&x[b], w, wide, &outputs[b * high + o], high);
        for (; b < samples; b++) dots<real, 1, O>(&x[b], w, wide, &outputs[b * high + o], high);
    }

    void forward(int64_t samples, int64_t draw) {
        int64_t b, o = 0;
        for (; o + 4 <= out; o += 4) forward_rows<4>(samples, o);  // by three samples: what the registers hold
        for (; o + 2 <= out; o += 2) forward_rows<2>(samples, o);
        for (; o < out; o++) forward_rows<1>(samples, o);
        for (b = 0; b < samples; b++)
            for (o = 0; o < out; o++) {
                real &z = outputs[b * high + o];
                z = activated(activation, bias.now.empty() ? z : z + bias.now[o]);
            }
        if (!dropout.p || draw == NO_DRAW) return;
        const auto chance = dropout.mask<real>(draw);
        for (b = 0; b < samples; b++)
            for (o = 0; o < out; o++) mask[b * high + o] = chance.at(uint32_t(b * out + o));
        for (int64_t i = 0; i < samples * high; i++) dropped[i] = outputs[i] * mask[i];
    }

    // What the next layer is given of a sample.
    const real *handed(int64_t b, int64_t draw) const {
        return &(!dropout.p || draw == NO_DRAW ? outputs : dropped)[b * high];
    }

    template <Use USE>
    void descend(int64_t samples, const Rule<real> &rule) {
        if (USE == PLAIN)
            for (int64_t i = 0; i < samples * high; i++) slopes[i] *= -rule.rate;
        int64_t o = 0;
        for (; o + 4 <= out; o += 4) descend_rows<real, USE, 4>(x.data(), &slopes[o], high, samples, weight, o, wide, rule);
        for (; o < out; o++) descend_rows<real, USE, 1>(x.data(), &slopes[o], high, samples, weight, o, wide, rule);
        for (o = 0; o < int64_t(bias.now.size()); o += LANES<real>) {
            vector<real> gradient = at(&slopes[o]);
            for (int64_t b = 1; b < samples; b++) gradient += at(&slopes[b * high + o]);
            if (USE == KEEP)
                at(&bias.gradient[o]) = gradient;
            else
                at(&bias.now[o]) += USE == PLAIN ? gradient : -rule.rate * bias.step(rule, o, gradient);
        }
    }

    // The slope of the loss by what the layer is given: below[b] = sum of slopes[b][o] * w[o].
    template <int B, int K>
    void propagate_block(real *below, int64_t b0, int64_t first) const {
        constexpr int64_t lanes = LANES<real>;
        const vector<real> zero = {};
        vector<real> sums[B][K];
        for (int b = 0; b < B; b++)
            for (int k = 0; k < K; k++) sums[b][k] = zero;
        for (int64_t o = 0; o < out; o++)
            for (int b = 0; b < B; b++)
                for (int k = 0; k < K; k++)
                    sums[b][k] += slopes[(b0 + b) * high + o] * at(&weight.now[o * wide + first + k * lanes]);
        for (int b = 0; b < B; b++)
            for (int k = 0; k < K; k++) at(below + (b0 + b) * wide + first + k * lanes) = sums[b][k];
    }

    template <int K>
    void propagate_columns(real *below, int64_t samples, int64_t first) const {
        int64_t b = 0;
        for (; b + 3 <= samples; b += 3) propagate_block<3, K>(below, b, first);
        for (; b < samples; b++) propagate_block<1, K>(below, b, first);
    }

    // A few columns of the weights for all samples: those are in the cache then, however many there are.
    void propagate(real *below, int64_t samples) const {
        int64_t k = 0;
        for (; k + 4 * LANES<real> <= wide; k += 4 * LANES<real>) propagate_columns<4>(below, samples, k);
        for (; k < wide; k += LANES<real>) propagate_columns<1>(below, samples, k);
    }

    // From slopes by what the layer hands on to slopes by what it computes before activation and dropout.
    void differentiate(int64_t samples) {
        for (int64_t b = 0; b < samples; b++)
            for (int64_t o = 0; o < out; o++) {
                const int64_t place = b * high + o;
                const real slope = dropout.p ? slopes[place] * mask[place] : slopes[place];
                slopes[place] = slope_below(activation, outputs[place], slope);
            }
    }
};

}  // namespace
