// One dense layer over the samples of a batch.

#pragma once

#include "compiled_vectors.hpp"

namespace {

// outputs[b][o] = x[b] . w[o] for B samples and O outputs, whose sums stay in registers.
template <typename real, int B, int O>
__attribute__((noinline)) void dots(const real *const *x, const real *w, int64_t padded_in, real *outputs, int64_t padded_out) {
    const vector<real> zero = {};
    const real *inputs[B];
    vector<real> sums[B][O];
    for (int b = 0; b < B; b++) {
        inputs[b] = x[b];
        for (int o = 0; o < O; o++) sums[b][o] = zero;
    }
    for (int64_t k = 0; k < padded_in; k += LANES<real>)
        for (int b = 0; b < B; b++)
            for (int o = 0; o < O; o++) sums[b][o] += at(inputs[b] + k) * at(w + o * padded_in + k);
    for (int b = 0; b < B; b++)
        for (int o = 0; o < O; o++) outputs[b * padded_out + o] = sum_of(sums[b][o]);
}

// What is done with a gradient: ADD adds it to the weights (output gradients are multiplied by -lr before), UPDATE applies the
// rule, STORE keeps it.
enum GradientUse { ADD, UPDATE, STORE };

// The gradient of the weights of O outputs and K vectors of inputs: the sum of output_gradients[b][o] * x[b].
template <typename real, GradientUse USE, int O, int K>
inline __attribute__((always_inline)) void update_block(const real *const *x, const real *output_gradients, int64_t padded_out,
                                                        int64_t samples, Parameter<real> &weights, int64_t row,
                                                        int64_t padded_in, int64_t first, const UpdateRule<real> &rule) {
    constexpr int64_t lanes = LANES<real>;
    const vector<real> zero = {};
    real *w = weights.value.data() + row * padded_in + first;
    vector<real> sums[O][K];
    for (int o = 0; o < O; o++)
        for (int k = 0; k < K; k++) sums[o][k] = USE == ADD ? at(w + o * padded_in + k * lanes) : zero;
    for (int64_t b = 0; b < samples; b++)
        for (int o = 0; o < O; o++)
            for (int k = 0; k < K; k++) sums[o][k] += output_gradients[b * padded_out + o] * at(x[b] + first + k * lanes);
    for (int o = 0; o < O; o++)
        for (int k = 0; k < K; k++) {
            const int64_t place = o * padded_in + k * lanes;
            if (USE == ADD)
                at(w + place) = sums[o][k];
            else if (USE == STORE)
                at(&weights.gradient[row * padded_in + first + place]) = sums[o][k];
            else
                at(w + place) -= rule.lr * weights.step(rule, row * padded_in + first + place, sums[o][k]);
        }
}

template <typename real, GradientUse USE, int O>
__attribute__((noinline)) void update_rows(const real *const *x, const real *output_gradients, int64_t padded_out,
                                           int64_t samples, Parameter<real> &weights, int64_t row, int64_t padded_in,
                                           const UpdateRule<real> &rule) {
    constexpr int64_t lanes = LANES<real>;
    int64_t k = 0;
    for (; k + 3 * lanes <= padded_in; k += 3 * lanes)
        update_block<real, USE, O, 3>(x, output_gradients, padded_out, samples, weights, row, padded_in, k, rule);
    for (; k < padded_in; k += lanes)
        update_block<real, USE, O, 1>(x, output_gradients, padded_out, samples, weights, row, padded_in, k, rule);
}

template <typename real>
struct DenseLayer {
    int64_t in, out, padded_in, padded_out;  // inputs and outputs, and the same padded
    int64_t activation;
    Dropout dropout;
    ParameterLayout layout;  // of the weight
    Parameter<real> weight, bias;  // out x padded_in, and padded_out; there may be no bias
    AlignedVector<real> outputs;   // batch x padded_out
    AlignedVector<real> output_gradients;  // batch x padded_out: gradients of the outputs before the activation
    AlignedVector<real> mask, dropped;  // batch x padded_out: the dropout mask, and the outputs after dropout
    std::vector<const real *> x;  // the inputs of every sample

    // `columns` has the place of each input in a padded row.
    DenseLayer(int64_t out, int64_t padded_in, const std::vector<int64_t> &columns, int64_t activation, const Dropout &dropout,
               int64_t batch)
        : in(columns.size()), out(out), padded_in(padded_in), padded_out(padded<real>(out)), activation(activation),
          dropout(dropout), layout(row_layout(out, in, padded_in)), outputs(batch * padded_out),
          output_gradients(batch * padded_out), mask(dropout.p ? batch * padded_out : 0), dropped(mask.size()), x(batch) {
        layout.column = columns;
    }

    // A few outputs for all samples, so that their weights stay in the cache.
    template <int O>
    void forward_rows(int64_t samples, int64_t o) {
        const real *w = &weight.value[o * padded_in];
        real *y = &outputs[o];
        int64_t b = 0;
        for (; (samples - b) % 3 && samples - b > 1; b += 2)
            dots<real, 2, O>(&x[b], w, padded_in, y + b * padded_out, padded_out);
        for (; b + 3 <= samples; b += 3) dots<real, 3, O>(&x[b], w, padded_in, y + b * padded_out, padded_out);
        for (; b < samples; b++) dots<real, 1, O>(&x[b], w, padded_in, y + b * padded_out, padded_out);
    }

    void forward(int64_t samples, int64_t draw) {
        int64_t b, o = 0;
        for (; o + 4 <= out; o += 4) forward_rows<4>(samples, o);  // times three samples: as many sums as there are registers
        for (; o + 2 <= out; o += 2) forward_rows<2>(samples, o);
        for (; o < out; o++) forward_rows<1>(samples, o);
        for (b = 0; b < samples; b++)
            for (o = 0; o < out; o++) {
                real &z = outputs[b * padded_out + o];
                z = activate(activation, bias.value.empty() ? z : z + bias.value[o]);
            }
        if (!dropout.p || draw == EVALUATION) return;
        const auto drawn = dropout.mask<real>(draw);
        for (b = 0; b < samples; b++)
            for (o = 0; o < out; o++) mask[b * padded_out + o] = drawn.at(uint32_t(b * out + o));
        for (int64_t i = 0; i < samples * padded_out; i++) dropped[i] = outputs[i] * mask[i];
    }

    // The inputs of the next layer for one sample.
    const real *output_of(int64_t b, int64_t draw) const {
        return &(!dropout.p || draw == EVALUATION ? outputs : dropped)[b * padded_out];
    }

    template <GradientUse USE>
    void update(int64_t samples, const UpdateRule<real> &rule) {
        if (USE == ADD)
            for (int64_t i = 0; i < samples * padded_out; i++) output_gradients[i] *= -rule.lr;
        int64_t o = 0;
        for (; o + 4 <= out; o += 4)
            update_rows<real, USE, 4>(x.data(), &output_gradients[o], padded_out, samples, weight, o, padded_in, rule);
        for (; o < out; o++)
            update_rows<real, USE, 1>(x.data(), &output_gradients[o], padded_out, samples, weight, o, padded_in, rule);
        for (o = 0; o < int64_t(bias.value.size()); o += LANES<real>) {
            vector<real> gradient = at(&output_gradients[o]);
            for (int64_t b = 1; b < samples; b++) gradient += at(&output_gradients[b * padded_out + o]);
            if (USE == STORE)
                at(&bias.gradient[o]) = gradient;
            else
                at(&bias.value[o]) += USE == ADD ? gradient : -rule.lr * bias.step(rule, o, gradient);
        }
    }

    // input_gradients[b] = the sum of output_gradients[b][o] * w[o].
    template <int B, int K>
    void input_gradients_block(real *input_gradients, int64_t b0, int64_t first) const {
        constexpr int64_t lanes = LANES<real>;
        const vector<real> zero = {};
        vector<real> sums[B][K];
        for (int b = 0; b < B; b++)
            for (int k = 0; k < K; k++) sums[b][k] = zero;
        for (int64_t o = 0; o < out; o++)
            for (int b = 0; b < B; b++)
                for (int k = 0; k < K; k++)
                    sums[b][k] += output_gradients[(b0 + b) * padded_out + o] *
                                  at(&weight.value[o * padded_in + first + k * lanes]);
        for (int b = 0; b < B; b++)
            for (int k = 0; k < K; k++) at(input_gradients + (b0 + b) * padded_in + first + k * lanes) = sums[b][k];
    }

    template <int K>
    void input_gradients_columns(real *input_gradients, int64_t samples, int64_t first) const {
        int64_t b = 0;
        for (; b + 3 <= samples; b += 3) input_gradients_block<3, K>(input_gradients, b, first);
        for (; b < samples; b++) input_gradients_block<1, K>(input_gradients, b, first);
    }

    // A few columns of the weights for all samples, so that they stay in the cache.
    void backward_inputs(real *input_gradients, int64_t samples) const {
        int64_t k = 0;
        for (; k + 4 * LANES<real> <= padded_in; k += 4 * LANES<real>) input_gradients_columns<4>(input_gradients, samples, k);
        for (; k < padded_in; k += LANES<real>) input_gradients_columns<1>(input_gradients, samples, k);
    }

    // Turn the gradients of the outputs after dropout into those before the activation.
    void backward_activation(int64_t samples) {
        for (int64_t b = 0; b < samples; b++)
            for (int64_t o = 0; o < out; o++) {
                const int64_t place = b * padded_out + o;
                const real gradient = dropout.p ? output_gradients[place] * mask[place] : output_gradients[place];
                output_gradients[place] = activation_gradient(activation, outputs[place], gradient);
            }
    }
};

}  // namespace
