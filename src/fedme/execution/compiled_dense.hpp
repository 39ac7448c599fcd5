// A dense layer over vectors: one row of numbers per sample.

#pragma once

#include "compiled_graph.hpp"
#include "compiled_matrix.hpp"

namespace {

// numbers: outputs, whether ReLU follows, whether the weight is inputs x outputs. table: the place of every input in a row. parameters: weight, bias.
//
// Weights are read and written in tiles of some inputs and one panel of outputs. A tile of the gradient is used for a step at
// once, while it is in the nearest cache; so every weight is fetched from memory once for all samples.
template <typename real>
struct Dense final : Node<real> {
    static constexpr int64_t SOME = 96;  // inputs of a tile
    int64_t width, out, padded_out, batch;  // `width`: inputs with padding
    bool relu;
    Parameter<real> weight, bias;  // there may be no bias
    WeightPanels<real> panels, transposed_panels;
    AlignedVector<real> x;  // inputs in blocks: width / SOME x batch x SOME
    AlignedVector<real> transposed, gradients, tile;
    std::vector<int64_t> offsets;
    std::vector<WindowGroup> rows;

    Dense(const NodeContext<real> &context, const Value<real> &input)
        : width(input.size), out(context.spec.numbers[0]), padded_out(padded<real>(out)), batch(context.batch),
          relu(context.spec.numbers[1]), panels{width, out}, transposed_panels{out, width}, x((width + SOME - 1) / SOME * SOME * batch),
          gradients(batch * padded_out), tile(SOME * 2 * LANES<real>), offsets(counted(SOME)), rows(1) {
        ParameterLayout layout;
        layout.size = panels.size();
        layout.column.assign(context.spec.table, context.spec.table + context.spec.table_size);
        for (int64_t o = 0; o < out; o++) layout.start.push_back(panels.place(0, o)), layout.stride.push_back(panels.width(o));
        layout.transposed = context.spec.numbers[2];
        context.load(weight, 0, layout);
        context.load(bias, 1, out);
        if (input.needs_gradient) transposed.resize(transposed_panels.size());
        weight.mixes_late = true;
    }

    std::vector<Parameter<real> *> parameters() override { return {&weight, &bias}; }

    void forward(const Pass &pass) override {
        const int64_t samples = pass.samples;
        real *y = this->output->data.data();
        for (int64_t b = 0; b < samples; b++)
            for (int64_t k = 0; k < width; k += SOME)
                std::copy_n(this->in().of(b) + k, std::min(SOME, width - k), &x[k * batch + b * SOME]);
        rows[0] = rows_group(samples, SOME, SOME, padded_out);
        for (int64_t k = 0; k < width; k += SOME) {
            rows[0].first = k, rows[0].spans[0].count = std::min(SOME, width - k);
            if (weight.mixed_with)
                forward_mixture(k, y);
            else
                correlate<real>(&x[k * batch], y, weight.value.data(), panels, rows, 1, nullptr, k ? ADD_TO : ASSIGN);
        }
        for (int64_t b = 0; b < samples; b++, y += padded_out)
            for (int64_t o = 0; o < padded_out; o += LANES<real>) {
                const vector<real> z = bias.exists() ? at(y + o) + at(&bias.value[o]) : at(y + o);
                at(y + o) = relu ? rectified<real>(z) : z;
            }
    }

    // The same with tiles of a mixture with other weights. Larger than the cache, it would take longer to store than to mix again.
    void forward_mixture(int64_t k, real *y) {
        for (int64_t v = 0; v < panels.vectors(); v += 2) {
            const int64_t place = panels.start(v / 2) + k * wide(v), count = rows[0].spans[0].count * wide(v);
            weight.mix(place, count, weight.mixed_with, weight.own_part, tile.data());
            const WeightPanels<real> panel{SOME, wide(v)};
            rows[0].first = 0;
            correlate<real>(&x[k * batch], y + v * LANES<real>, tile.data(), panel, rows, 1, nullptr, k ? ADD_TO : ASSIGN);
        }
    }

    int64_t wide(int64_t v) const { return std::min<int64_t>(2, panels.vectors() - v) * LANES<real>; }  // the panel of a vector

    void backward(const Pass &pass, const UpdateRule<real> &rule) override {
        Value<real> &input = *this->inputs[0];
        real *own = this->output->gradient.data();
        const int64_t samples = pass.samples;
        const vector<real> zero = {};
        for (int64_t i = 0; relu && i < samples * padded_out; i += LANES<real>)
            at(own + i) = at(&this->output->data[i]) > zero ? at(own + i) : zero;
        if (input.needs_gradient) {
            const real *values = weight.value.data();
            if (weight.mixed_with)
                panels.transpose_to(transposed_panels, Mixture<real>{values, weight.mixed_with, weight.own_part}, transposed.data());
            else
                panels.transpose_to(transposed_panels, PlainValues<real>{values}, transposed.data());
            correlate<real>(own, input.gradient.data(), transposed.data(), transposed_panels,
                            {rows_group(samples, out, padded_out, width)}, out, nullptr, input.sums ? ADD_TO : ASSIGN);
        }
        const bool stores = rule.clips() || rule.stores || weight.shared;  // others add to the gradient
        if (weight.trained) update_weight(samples, rule, stores);
        if (!bias.exists() || !bias.trained) return;
        bias.gradient.resize(padded_out);
        for (int64_t o = 0; o < padded_out; o += LANES<real>) {
            vector<real> gradient = at(own + o);
            for (int64_t b = 1; b < samples; b++) gradient += at(own + b * padded_out + o);
            at(&bias.gradient[o]) = gradient;
        }
    }

    void update_weight(int64_t samples, const UpdateRule<real> &rule, bool stores) {
        constexpr int64_t lanes = LANES<real>;
        const real *own = this->output->gradient.data();
        // Without momentum, -lr times the gradient is added as it is computed.
        const bool adds = !stores && (weight.mixed_with ? rule.is_plain() && !rule.measures : rule.has_no_state());
        const bool pulls = adds && !rule.is_plain();
        const real scale = adds ? -rule.lr : real(1);
        for (int64_t v = 0; v < panels.vectors(); v += 2)
            for (int64_t b = 0; b < samples; b++)
                for (int64_t i = 0; i < wide(v); i += lanes)
                    at(&gradients[v * lanes * samples + b * wide(v) + i]) = scale * at(own + b * padded_out + v * lanes + i);
        weight.gradient.resize(stores ? weight.value.size() : 0);  // the client before may have stored it
        for (int64_t k = 0; k < width; k += SOME)
            for (int64_t v = 0; v < panels.vectors(); v += 2) {
                const int64_t inputs = std::min(SOME, width - k), place = panels.start(v / 2) + k * wide(v);
                real *to = adds ? &weight.own()[place] : stores ? &weight.gradient[place] : tile.data();
                const real *anchor = !pulls ? nullptr : rule.prox ? &weight.anchor[place] : to;
                accumulate<real>({&x[k * batch], 0, SOME}, offsets.data(), inputs,
                                 {&gradients[v * lanes * samples], 0, wide(v)}, 1, samples, wide(v) / lanes, to,
                                 {!adds, rule.lr * rule.weight_decay, rule.lr * rule.prox, anchor});
                if (!adds && !stores) weight.descend(rule, place, inputs * wide(v), to);
            }
    }
};

}  // namespace
