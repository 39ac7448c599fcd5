// Products of two values, for attention; embeddings; and a recurrent layer.

#pragma once

#include "compiled_elementwise.hpp"
#include "compiled_matrix.hpp"

namespace {

// Products of the matrices of two values: M x K times K x N, `groups` per sample.
// numbers: groups, M, N, K; of the first value the place of the first matrix, the distance of matrices and of rows; of the second
// value the same, and the distance of columns. reals: a factor.
template <typename real>
struct MatrixProduct final : Node<real> {
    int64_t groups, rows, columns, inner, a[3], b[4];
    real factor;
    bool whole;  // rows of the first matrix are full vectors
    WeightPanels<real> panels, transposed_panels;      // of the second matrix, and of its transpose
    AlignedVector<real> packed, transposed, gradient;  // in panels
    AlignedVector<real> a_gradients;
    std::vector<WindowGroup> forward_rows, backward_rows;
    Accumulator<real> accumulator;

    MatrixProduct(const NodeContext<real> &context, const Value<real> &) : factor(real(context.spec.reals[0])) {
        const int64_t *n = context.spec.numbers;
        groups = n[0], rows = n[1], columns = n[2], inner = n[3];
        std::copy_n(n + 4, 3, a), std::copy_n(n + 7, 4, b);
        panels = {inner, columns}, transposed_panels = {columns, inner};
        packed.resize(panels.size()), transposed.resize(transposed_panels.size()), gradient.resize(panels.size());
        whole = inner == padded<real>(inner);
        a_gradients.resize(whole ? 0 : rows * padded<real>(inner));
        forward_rows = {rows_group(rows, inner, a[2], padded<real>(columns))};
        backward_rows = {rows_group(rows, columns, padded<real>(columns), whole ? a[2] : padded<real>(inner))};
    }

    bool computes_by_sample() const override { return true; }
    bool needs_output() const override { return false; }

    void scale(AlignedVector<real> &values) const {
        for (size_t i = 0; factor != 1 && i < values.size(); i += LANES<real>) at(&values[i]) *= factor;
    }

    const real *second(int64_t s, int64_t g) const { return this->in(1).of(s) + b[0] + g * b[1]; }

    void forward(const Pass &pass) override {
        const int64_t width = padded<real>(columns);
        for (int64_t s = pass.first; s < pass.samples; s++)
            for (int64_t g = 0; g < groups; g++) {
                panels.pack(second(s, g), b[2], b[3], packed.data());
                scale(packed);
                real *y = this->output->result_of(s) + g * rows * width;
                correlate<real>(this->in(0).of(s) + a[0] + g * a[1], y, packed.data(), panels, forward_rows, inner, nullptr, ASSIGN);
            }
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        const int64_t width = padded<real>(columns), inner_width = padded<real>(inner);
        Value<real> &first = *this->inputs[0], &other = *this->inputs[1];
        for (int64_t s = pass.first; s < pass.samples; s++)
            for (int64_t g = 0; g < groups; g++) {
                const real *x = first.of(s) + a[0] + g * a[1];
                const real *own = this->output->gradient_of(s) + g * rows * width;
                if (first.needs_gradient) {
                    transposed_panels.pack(second(s, g), b[3], b[2], transposed.data());
                    scale(transposed);
                    real *to = first.gradient_of(s) + a[0] + g * a[1];
                    correlate<real>(own, whole ? to : a_gradients.data(), transposed.data(), transposed_panels, backward_rows,
                                    columns, nullptr, whole && first.sums ? ADD_TO : ASSIGN);
                    for (int64_t m = 0; !whole && m < rows; m++)
                        for (int64_t k = 0; k < inner; k++) to[m * a[2] + k] += a_gradients[m * inner_width + k];
                }
                if (other.needs_gradient) {
                    // Where columns of the second matrix are contiguous, the gradient of its transpose has its order.
                    const bool by_column = whole && b[2] == 1;
                    const WeightPanels<real> &shape = by_column ? transposed_panels : panels;
                    gradient.resize(shape.size());
                    by_column ? accumulator.add(own, width, x, a[2], rows, shape, gradient.data(), true)
                              : accumulator.add(x, a[2], own, width, rows, shape, gradient.data(), true);
                    scale(gradient);
                    real *to = other.gradient_of(s) + b[0] + g * b[1];
                    by_column ? shape.add_to(to, b[3], b[2], gradient.data()) : shape.add_to(to, b[2], b[3], gradient.data());
                }
            }
    }
};

// Rows of a weight, chosen by symbols. numbers: symbols of a sample, width, symbols that are known, the one without a gradient.
template <typename real>
struct Embedding final : Node<real> {
    int64_t length, width, padded_width, padding_symbol;
    Parameter<real> weight;

    Embedding(const NodeContext<real> &context, const Value<real> &)
        : length(context.spec.numbers[0]), width(context.spec.numbers[1]), padded_width(padded<real>(width)),
          padding_symbol(context.spec.numbers[3]) {
        context.load(weight, 0, row_layout(context.spec.numbers[2], width, padded_width));
    }

    std::vector<Parameter<real> *> parameters() override { return {&weight}; }

    const int64_t *symbols(int64_t s) const { return reinterpret_cast<const int64_t *>(this->in().of(s)); }

    void forward(const Pass &pass) override {
        for (int64_t s = 0; s < pass.samples; s++)
            for (int64_t t = 0; t < length; t++)
                std::copy_n(&weight.value[symbols(s)[t] * padded_width], padded_width,
                            &this->output->data[s * this->output->size + t * padded_width]);
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        weight.begin_gradient();
        for (int64_t s = 0; s < pass.samples; s++)
            for (int64_t t = 0; t < length; t++) {
                if (symbols(s)[t] == padding_symbol) continue;
                real *to = &weight.gradient[symbols(s)[t] * padded_width];
                const real *from = this->output->gradient_of(s) + t * padded_width;
                for (int64_t i = 0; i < padded_width; i += LANES<real>) at(to + i) += at(from + i);
            }
    }
};

// A layer of long short-term memory that begins with zeros. numbers: length of a sequence, inputs, units.
// parameters: weights of the inputs and of the outputs before (4 gates x units each), and the biases of both.
template <typename real>
struct LongShortTermMemory final : Node<real> {
    int64_t length, inputs_width, units, x_step, width, gates_width;  // the last three with padding
    Parameter<real> input_weight, recurrent_weight, input_bias, recurrent_bias;
    WeightPanels<real> input_panels, recurrent_panels, input_transposed, recurrent_transposed;
    AlignedVector<real> gates;  // batch x length x 4 x width: input, forget, cell, output; in the backward pass their gradients
    AlignedVector<real> cells;  // batch x length x width
    AlignedVector<real> bias, flipped_input, flipped_recurrent, state_gradient, cell_gradient, scratch;
    Accumulator<real> accumulator;
    int64_t batch;

    LongShortTermMemory(const NodeContext<real> &context, const Value<real> &)
        : length(context.spec.numbers[0]), inputs_width(context.spec.numbers[1]), units(context.spec.numbers[2]),
          x_step(padded<real>(inputs_width)), width(padded<real>(units)), gates_width(4 * width), batch(context.batch) {
        input_panels = {inputs_width, gates_width}, recurrent_panels = {units, gates_width};
        input_transposed = {gates_width, inputs_width}, recurrent_transposed = {gates_width, units};
        context.load(input_weight, 0, layout(input_panels, inputs_width));
        context.load(recurrent_weight, 1, layout(recurrent_panels, units));
        ParameterLayout vector_layout;
        vector_layout.size = gates_width, vector_layout.column = {0};
        for (int64_t r = 0; r < 4 * units; r++) vector_layout.start.push_back(place(r)), vector_layout.stride.push_back(1);
        context.load(input_bias, 2, vector_layout), context.load(recurrent_bias, 3, vector_layout);
        gates.resize(batch * length * gates_width), cells.resize(batch * length * width), bias.resize(gates_width);
        flipped_input.resize(input_transposed.size()), flipped_recurrent.resize(recurrent_transposed.size());
        state_gradient.resize(batch * width), cell_gradient.resize(batch * width), scratch.resize(length * x_step);
    }

    int64_t place(int64_t row) const { return row / units * width + row % units; }  // of a row of a weight among padded gates

    ParameterLayout layout(const WeightPanels<real> &panels, int64_t count) const {
        ParameterLayout layout;
        layout.size = panels.size(), layout.column = counted(count);
        for (int64_t r = 0; r < 4 * units; r++)
            layout.start.push_back(panels.place(0, place(r))), layout.stride.push_back(panels.width(place(r)));
        return layout;
    }

    std::vector<Parameter<real> *> parameters() override {
        return {&input_weight, &recurrent_weight, &input_bias, &recurrent_bias};
    }

    real *gates_of(int64_t s, int64_t t) { return &gates[(s * length + t) * gates_width]; }

    void forward(const Pass &pass) override {
        constexpr int64_t lanes = LANES<real>;
        for (int64_t i = 0; i < gates_width; i += lanes)
            at(&bias[i]) = input_bias.exists() ? at(&input_bias.value[i]) + at(&recurrent_bias.value[i]) : vector<real>{};
        const std::vector<WindowGroup> steps = {rows_group(length, inputs_width, x_step, gates_width)};
        for (int64_t s = 0; s < pass.samples; s++)
            correlate<real>(this->in().of(s), gates_of(s, 0), input_weight.value.data(), input_panels, steps, inputs_width,
                            bias.data(), ASSIGN);
        const std::vector<WindowGroup> samples = {
            rows_group(pass.samples, units, this->output->size, length * gates_width)};
        for (int64_t t = 0; t < length; t++) {
            if (t)
                correlate<real>(&this->output->data[(t - 1) * width], gates_of(0, t), recurrent_weight.value.data(),
                                recurrent_panels, samples, units, nullptr, ADD_TO);
            for (int64_t s = 0; s < pass.samples; s++) {
                real *z = gates_of(s, t), *cell = &cells[(s * length + t) * width];
                real *h = &this->output->data[s * this->output->size + t * width];
                for (int64_t i = 0; i < width; i += lanes) {
                    const vector<real> in = at(z + i) = sigmoid<real>(at(z + i));
                    const vector<real> forget = at(z + width + i) = sigmoid<real>(at(z + width + i));
                    const vector<real> candidate = at(z + 2 * width + i) = tanh_of<real>(at(z + 2 * width + i));
                    const vector<real> out = at(z + 3 * width + i) = sigmoid<real>(at(z + 3 * width + i));
                    at(cell + i) = in * candidate + (t ? forget * at(cell - width + i) : vector<real>{});
                    at(h + i) = out * tanh_of<real>(at(cell + i));
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
        std::fill(cell_gradient.begin(), cell_gradient.end(), real(0));
        const std::vector<WindowGroup> samples = {rows_group(pass.samples, gates_width, length * gates_width, width)};
        for (int64_t t = length; t-- > 0;) {
            for (int64_t s = 0; s < pass.samples; s++) {
                real *z = gates_of(s, t), *cell = &cells[(s * length + t) * width];
                const real *own = this->output->gradient_of(s) + t * width;
                for (int64_t i = 0; i < width; i += lanes) {
                    const vector<real> in = at(z + i), forget = at(z + width + i), candidate = at(z + 2 * width + i);
                    const vector<real> out = at(z + 3 * width + i), squashed = tanh_of<real>(at(cell + i));
                    const vector<real> state = at(own + i) + at(&state_gradient[s * width + i]);
                    const vector<real> c = at(&cell_gradient[s * width + i]) + state * out * (1 - squashed * squashed);
                    const vector<real> before = t ? at(cell - width + i) : vector<real>{};
                    at(&cell_gradient[s * width + i]) = c * forget;
                    at(z + i) = c * candidate * in * (1 - in);
                    at(z + width + i) = c * before * forget * (1 - forget);
                    at(z + 2 * width + i) = c * in * (1 - candidate * candidate);
                    at(z + 3 * width + i) = state * squashed * out * (1 - out);
                }
            }
            if (t)
                correlate<real>(gates_of(0, t), state_gradient.data(), flipped_recurrent.data(), recurrent_transposed, samples,
                                gates_width, nullptr, ASSIGN);
        }
        if (input.needs_gradient)
            input_panels.transpose_to(input_transposed, PlainValues<real>{input_weight.value.data()}, flipped_input.data());
        const std::vector<WindowGroup> steps = {rows_group(length, gates_width, gates_width, x_step)};
        for (int64_t s = 0; s < pass.samples; s++) {
            const real *gradients = gates_of(s, 0);
            accumulator.add(input.of(s), x_step, gradients, gates_width, length, input_panels, input_weight.gradient.data());
            accumulator.add(this->output->of(s), width, gradients + gates_width, gates_width, length - 1, recurrent_panels,
                            recurrent_weight.gradient.data());
            for (int64_t t = 0; input_bias.exists() && t < length; t++)
                for (int64_t i = 0; i < gates_width; i += lanes) at(&input_bias.gradient[i]) += at(gradients + t * gates_width + i);
            if (!input.needs_gradient) continue;
            correlate<real>(gradients, scratch.data(), flipped_input.data(), input_transposed, steps, gates_width, nullptr, ASSIGN);
            for (int64_t i = 0; i < length * x_step; i += lanes) this->give(input, input.gradient_of(s) + i, at(&scratch[i]));
        }
        recurrent_bias.gradient = input_bias.gradient;
    }
};

}  // namespace
