// A layer of gated recurrent units.

#pragma once

#include "compiled_sequences.hpp"

namespace {

// Begins with zeros. numbers: length of a sequence, inputs, units.
// parameters: weights of the inputs and of the outputs before (reset, update and candidate x units each), and the biases of both.
// h' = (1 - update) tanh(candidate of the inputs + reset * candidate of h) + update h
template <typename real>
struct GatedRecurrentUnit final : Node<real> {
    int64_t length, inputs_width, units, x_step, width, gates_width, batch;  // steps and widths with padding
    Parameter<real> input_weight, recurrent_weight, input_bias, recurrent_bias;
    WeightPanels<real> input_panels, recurrent_panels, input_transposed, recurrent_transposed;
    AlignedVector<real> gates, before;  // batch x length x 3 x width: gates, and what they get of h; then the gradients of both
    AlignedVector<real> flipped_input, flipped_recurrent, state_gradient, passed_on, scratch;
    Accumulator<real> accumulator;

    GatedRecurrentUnit(const NodeContext<real> &context, const Value<real> &)
        : length(context.spec.numbers[0]), inputs_width(context.spec.numbers[1]), units(context.spec.numbers[2]),
          x_step(padded<real>(inputs_width)), width(padded<real>(units)), gates_width(3 * width), batch(context.batch) {
        input_panels = {inputs_width, gates_width}, recurrent_panels = {units, gates_width};
        input_transposed = {gates_width, inputs_width}, recurrent_transposed = {gates_width, units};
        context.load(input_weight, 0, layout(input_panels, inputs_width));
        context.load(recurrent_weight, 1, layout(recurrent_panels, units));
        ParameterLayout vector_layout;
        vector_layout.size = gates_width, vector_layout.column = {0};
        for (int64_t r = 0; r < 3 * units; r++) vector_layout.start.push_back(place(r)), vector_layout.stride.push_back(1);
        context.load(input_bias, 2, vector_layout), context.load(recurrent_bias, 3, vector_layout);
        gates.resize(batch * length * gates_width), before.resize(gates.size());
        flipped_input.resize(input_transposed.size()), flipped_recurrent.resize(recurrent_transposed.size());
        state_gradient.resize(batch * width), passed_on.resize(batch * width), scratch.resize(length * x_step);
    }

    int64_t place(int64_t row) const { return row / units * width + row % units; }  // of a row of a weight among padded gates

    ParameterLayout layout(const WeightPanels<real> &panels, int64_t count) const {
        ParameterLayout layout;
        layout.size = panels.size(), layout.column = counted(count);
        for (int64_t r = 0; r < 3 * units; r++)
            layout.start.push_back(panels.place(0, place(r))), layout.stride.push_back(panels.width(place(r)));
        return layout;
    }

    std::vector<Parameter<real> *> parameters() override {
        return {&input_weight, &recurrent_weight, &input_bias, &recurrent_bias};
    }

    int64_t step_of(int64_t s, int64_t t) const { return (s * length + t) * gates_width; }
    static const real *bias_of(const Parameter<real> &bias) { return bias.exists() ? bias.value.data() : nullptr; }

    void forward(const Pass &pass) override {
        constexpr int64_t lanes = LANES<real>;
        const std::vector<WindowGroup> steps = {rows_group(length, inputs_width, x_step, gates_width)};
        for (int64_t s = 0; s < pass.samples; s++)
            correlate<real>(this->in().of(s), &gates[step_of(s, 0)], input_weight.value.data(), input_panels, steps, inputs_width,
                            bias_of(input_bias), ASSIGN);
        const std::vector<WindowGroup> samples = {
            rows_group(pass.samples, units, this->output->size, length * gates_width)};
        for (int64_t t = 0; t < length; t++) {
            if (t)
                correlate<real>(&this->output->data[(t - 1) * width], &before[step_of(0, t)], recurrent_weight.value.data(),
                                recurrent_panels, samples, units, bias_of(recurrent_bias), ASSIGN);
            for (int64_t s = 0; s < pass.samples; s++) {
                real *z = &gates[step_of(s, t)], *r = &before[step_of(s, t)];
                real *h = &this->output->data[s * this->output->size + t * width];
                for (int64_t i = 0; i < gates_width && !t; i += lanes)
                    at(r + i) = recurrent_bias.exists() ? at(&recurrent_bias.value[i]) : vector<real>{};
                for (int64_t i = 0; i < width; i += lanes) {
                    const vector<real> reset = at(z + i) = sigmoid<real>(at(z + i) + at(r + i));
                    const vector<real> update = at(z + width + i) = sigmoid<real>(at(z + width + i) + at(r + width + i));
                    vector<real> &candidate = at(z + 2 * width + i);
                    candidate = tanh_of<real>(candidate + reset * at(r + 2 * width + i));
                    at(h + i) = (1 - update) * candidate + (t ? update * at(h - width + i) : vector<real>{});
                }
            }
        }
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        constexpr int64_t lanes = LANES<real>;
        Value<real> &input = *this->inputs[0];
        for (Parameter<real> *parameter : parameters()) parameter->begin_gradient();
        recurrent_panels.transpose_to(recurrent_transposed, PlainValues<real>{recurrent_weight.value.data()}, flipped_recurrent.data());
        std::fill(state_gradient.begin(), state_gradient.end(), real(0));
        std::fill(passed_on.begin(), passed_on.end(), real(0));
        const std::vector<WindowGroup> samples = {rows_group(pass.samples, gates_width, length * gates_width, width)};
        for (int64_t t = length; t-- > 0;) {
            for (int64_t s = 0; s < pass.samples; s++) {
                real *z = &gates[step_of(s, t)], *r = &before[step_of(s, t)];
                const real *own = this->output->gradient_of(s) + t * width, *h = this->output->of(s) + t * width;
                for (int64_t i = 0; i < width; i += lanes) {
                    const vector<real> reset = at(z + i), update = at(z + width + i), candidate = at(z + 2 * width + i);
                    const vector<real> state = at(own + i) + at(&state_gradient[s * width + i]) + at(&passed_on[s * width + i]);
                    const vector<real> old = t ? at(h - width + i) : vector<real>{};
                    const vector<real> c = state * (1 - update) * (1 - candidate * candidate);
                    at(z + i) = at(r + i) = c * at(r + 2 * width + i) * reset * (1 - reset);
                    at(z + width + i) = at(r + width + i) = state * (old - candidate) * update * (1 - update);
                    at(z + 2 * width + i) = c;
                    at(r + 2 * width + i) = c * reset;
                    at(&passed_on[s * width + i]) = state * update;
                }
            }
            if (t)
                correlate<real>(&before[step_of(0, t)], state_gradient.data(), flipped_recurrent.data(), recurrent_transposed,
                                samples, gates_width, nullptr, ASSIGN);
        }
        if (input.needs_gradient)
            input_panels.transpose_to(input_transposed, PlainValues<real>{input_weight.value.data()}, flipped_input.data());
        const std::vector<WindowGroup> steps = {rows_group(length, gates_width, gates_width, x_step)};
        for (int64_t s = 0; s < pass.samples; s++) {
            const real *gradients = &gates[step_of(s, 0)], *of_state = &before[step_of(s, 0)];
            accumulator.add(input.of(s), x_step, gradients, gates_width, length, input_panels, input_weight.gradient.data());
            accumulator.add(this->output->of(s), width, of_state + gates_width, gates_width, length - 1, recurrent_panels,
                            recurrent_weight.gradient.data());
            for (int64_t i = 0; input_bias.exists() && i < length * gates_width; i += lanes) {
                at(&input_bias.gradient[i % gates_width]) += at(gradients + i);
                at(&recurrent_bias.gradient[i % gates_width]) += at(of_state + i);
            }
            if (!input.needs_gradient) continue;
            correlate<real>(gradients, scratch.data(), flipped_input.data(), input_transposed, steps, gates_width, nullptr, ASSIGN);
            for (int64_t i = 0; i < length * x_step; i += lanes) this->give(input, input.gradient_of(s) + i, at(&scratch[i]));
        }
    }
};

}  // namespace
