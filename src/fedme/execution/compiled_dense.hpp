// A dense layer over vectors: one row of numbers per sample.

#pragma once

#include "compiled_graph.hpp"

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

// numbers: outputs, whether ReLU follows. table: the place of every input in a row. parameters: weight, bias.
template <typename real>
struct Dense final : Node<real> {
    int64_t out, padded_in, padded_out;
    bool relu;
    Parameter<real> weight, bias;  // out x padded_in, and padded_out; there may be no bias
    std::vector<const real *> x;   // the inputs of every sample
    AlignedVector<real> scratch;   // gradients of the inputs, before they are added

    Dense(const NodeContext<real> &context, const Value<real> &input)
        : out(context.spec.numbers[0]), padded_in(input.size), padded_out(padded<real>(out)), relu(context.spec.numbers[1]),
          x(context.batch), scratch(input.sums ? context.batch * input.size : 0) {
        ParameterLayout layout = row_layout(out, context.spec.table_size, padded_in);
        layout.column.assign(context.spec.table, context.spec.table + context.spec.table_size);
        context.load(weight, 0, layout);
        context.load(bias, 1, out);
    }

    std::vector<Parameter<real> *> parameters() override { return {&weight, &bias}; }

    // A few outputs for all samples, so that their weights stay in the cache.
    template <int O>
    void forward_rows(int64_t samples, int64_t o) {
        const real *w = &weight.value[o * padded_in];
        real *y = &this->output->data[o];
        int64_t b = 0;
        for (; (samples - b) % 3 && samples - b > 1; b += 2)
            dots<real, 2, O>(&x[b], w, padded_in, y + b * padded_out, padded_out);
        for (; b + 3 <= samples; b += 3) dots<real, 3, O>(&x[b], w, padded_in, y + b * padded_out, padded_out);
        for (; b < samples; b++) dots<real, 1, O>(&x[b], w, padded_in, y + b * padded_out, padded_out);
    }

    void forward(const Pass &pass) override {
        for (int64_t b = 0; b < pass.samples; b++) x[b] = this->in().of(b);
        int64_t o = 0;
        for (; o + 4 <= out; o += 4) forward_rows<4>(pass.samples, o);  // times three samples: as many sums as registers
        for (; o + 2 <= out; o += 2) forward_rows<2>(pass.samples, o);
        for (; o < out; o++) forward_rows<1>(pass.samples, o);
        for (int64_t b = 0; b < pass.samples; b++)
            for (o = 0; o < padded_out; o += LANES<real>) {
                vector<real> &y = at(&this->output->data[b * padded_out + o]);
                const vector<real> z = bias.exists() ? y + at(&bias.value[o]) : y;
                y = relu ? rectified<real>(z) : z;
            }
    }

    void backward(const Pass &pass, const UpdateRule<real> &rule) override {
        Value<real> &input = *this->inputs[0];
        AlignedVector<real> &gradients = this->output->gradient;
        const int64_t samples = pass.samples;
        const vector<real> zero = {};
        for (int64_t i = 0; relu && i < samples * padded_out; i += LANES<real>)
            at(&gradients[i]) = at(&this->output->data[i]) > zero ? at(&gradients[i]) : zero;
        if (input.needs_gradient) {
            real *to = input.sums ? scratch.data() : input.gradient.data();
            backward_inputs(to, samples);
            for (int64_t i = 0; input.sums && i < samples * padded_in; i += LANES<real>)
                at(&input.gradient[i]) += at(to + i);
        }
        if (rule.clips() || !weight.trained || (bias.exists() && !bias.trained)) {
            weight.gradient.resize(weight.value.size()), bias.gradient.resize(bias.value.size());
            update<STORE>(samples, rule);
        } else if (rule.is_plain()) {
            update<ADD>(samples, rule);
        } else {
            update<UPDATE>(samples, rule);
        }
    }

    template <GradientUse USE>
    void update(int64_t samples, const UpdateRule<real> &rule) {
        real *gradients = this->output->gradient.data();
        if (USE == ADD)
            for (int64_t i = 0; i < samples * padded_out; i++) gradients[i] *= -rule.lr;
        int64_t o = 0;
        for (; o + 4 <= out; o += 4)
            update_rows<real, USE, 4>(x.data(), gradients + o, padded_out, samples, weight, o, padded_in, rule);
        for (; o < out; o++)
            update_rows<real, USE, 1>(x.data(), gradients + o, padded_out, samples, weight, o, padded_in, rule);
        for (o = 0; o < int64_t(bias.value.size()); o += LANES<real>) {
            vector<real> gradient = at(gradients + o);
            for (int64_t b = 1; b < samples; b++) gradient += at(gradients + b * padded_out + o);
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
        const real *gradients = this->output->gradient.data();
        const vector<real> zero = {};
        vector<real> sums[B][K];
        for (int b = 0; b < B; b++)
            for (int k = 0; k < K; k++) sums[b][k] = zero;
        for (int64_t o = 0; o < out; o++)
            for (int b = 0; b < B; b++)
                for (int k = 0; k < K; k++)
                    sums[b][k] += gradients[(b0 + b) * padded_out + o] * at(&weight.value[o * padded_in + first + k * lanes]);
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
};

}  // namespace
