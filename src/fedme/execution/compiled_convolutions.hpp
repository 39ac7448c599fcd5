// Convolutions, sample by sample; a linear layer over a sequence is a convolution with a window of one.
//
// A feature map is rows x columns x channels, with channels padded to full vectors. Where a convolution pads, its inputs are
// copied into a map with a border of zeros.

#pragma once

#include "compiled_graph.hpp"
#include "compiled_maps.hpp"
#include "compiled_planes.hpp"
#include "compiled_winograd.hpp"

namespace {

// The geometry that convolutions and depthwise convolutions share.
// numbers: channels, rows and columns of the input; its strides by channel, row and column; outputs; window, padding, stride and
// dilation (rows and columns each); whether ReLU follows; whether the input is a feature map as above; whether the
// weight has the inputs first.
template <typename real>
struct Windowed : Node<real> {
    const int64_t *n;
    int64_t channels, outputs, input_step[3];
    Pair window, padding, stride, dilation;
    bool relu, copies;  // `copies`: the inputs are copied
    FeatureMap in, out, input_map;
    AlignedVector<real> copied;  // batch x in

    Windowed(const NodeContext<real> &context, int64_t copied_channels, bool may_copy = true)
        : n(context.spec.numbers), channels(n[0]), outputs(n[6]), input_step{n[3], n[4], n[5]}, window{n[7], n[8]},
          padding{n[9], n[10]}, stride{n[11], n[12]}, dilation{n[13], n[14]}, relu(n[15]) {
        input_map = {n[1], n[2], channels, padded<real>(channels)};
        copies = may_copy && (padding.rows || padding.columns || !n[16]);
        in = copies ? FeatureMap{n[1], n[2], channels, copied_channels, padding.rows, padding.columns} : input_map;
        out = {(n[1] + 2 * padding.rows - (window.rows - 1) * dilation.rows - 1) / stride.rows + 1,
               (n[2] + 2 * padding.columns - (window.columns - 1) * dilation.columns - 1) / stride.columns + 1, outputs,
               padded<real>(outputs)};
        if (copies) copied.resize(context.batch * in.size());
    }

    const real *input_of(int64_t b) const { return copies ? &copied[b * in.size()] : this->inputs[0]->of(b); }

    void copy_input(int64_t b) {
        if (!copies) return;
        const real *from = this->inputs[0]->of(b);
        real *to = &copied[b * in.size()];
        for (int64_t r = 0; r < in.rows; r++)
            for (int64_t c = 0; c < in.columns; c++) {
                const real *x = from + r * input_step[1] + c * input_step[2];
                real *place = to + in.place(r, c);
                if (input_step[0] == 1)
                    std::copy_n(x, channels, place);
                else
                    for (int64_t i = 0; i < channels; i++) place[i] = x[i * input_step[0]];
            }
    }

    // The gradient of a sample before ReLU, in a map that may have a border.
    void gradient_before_relu(int64_t b, real *to, const FeatureMap &map) {
        for (int64_t r = 0; r < out.rows; r++)
            for (int64_t i = 0; i < out.line(); i += LANES<real>)
                at(to + map.place(r, 0) + i) = gradient_before_relu(b, r * out.line() + i);
    }

    vector<real> gradient_before_relu(int64_t b, int64_t place) const {
        const vector<real> gradient = at(this->output->gradient_of(b) + place), zero = {};
        return relu ? (at(this->output->of(b) + place) > zero ? gradient : zero) : gradient;
    }
};

// parameters: weight, bias.
template <typename real>
struct Convolution final : Windowed<real> {
    static constexpr int64_t POSITIONS = 256;  // whose gradients, one panel wide, stay in the nearest cache
    using Base = Windowed<real>;
    using Base::channels, Base::outputs, Base::window, Base::padding, Base::stride, Base::dilation, Base::out, Base::relu;

    // The gradients of those inputs whose windows have the same taps: a convolution of the gradients with these taps, flipped.
    struct Phase {
        WeightPanels<real> panels;
        AlignedVector<real> flipped;
        std::vector<int64_t> from;  // the place of each flipped weight among the weights
        std::vector<WindowGroup> windows;
        int64_t row;  // values in a row of a window
        Pair first;   // input that it gives a gradient to
        std::unique_ptr<PlaneConvolution<real>> planes;  // computes it instead, with few channels
    };

    Parameter<real> weight, bias;
    WeightPanels<real> panels;
    std::vector<int64_t> offsets;  // of every input in a window
    std::vector<WindowGroup> windows;
    std::vector<Phase> phases;
    bool leaves_gaps = false;  // some inputs are in no window
    FeatureMap gradient_map;
    AlignedVector<real> gradients;  // of one sample
    PackedPanel<real> packed;
    Accumulator<real> accumulator;  // of a window of one, where all positions are alike
    std::unique_ptr<Winograd<real>> winograd;  // computes instead of all this, where it is faster
    std::unique_ptr<PlaneConvolution<real>> planes;  // the same but for the gradient of the input, with few outputs
    AlignedVector<real> plane_inputs;                // of the batch
    std::unique_ptr<Planes<real>> gradient_planes;
    AlignedVector<real> plane_gradients;  // of one sample

    // Results, and gradients of the weights, whose vectors run along columns.
    static bool has_planes(const int64_t *n) {
        const int64_t columns = n[2] + 2 * n[10] - (n[8] - 1) * n[14];
        const int64_t moved = padded<real>(n[6]) + (n[5] == 1 ? 0 : padded<real>(n[0]));
        return n[11] == 1 && n[12] == 1 && !Winograd<real>::is_worth(n) &&
               PlaneConvolution<real>::is_worth(n[7] * n[8] * n[0], n[6], columns, moved);
    }

    // The same for gradients of the input.
    static bool has_plane_gradients(const int64_t *n) {
        const int64_t taps = (n[7] + n[11] - 1) / n[11] * ((n[8] + n[12] - 1) / n[12]), columns = (n[2] + n[12] - 1) / n[12];
        return PlaneConvolution<real>::is_worth(taps * n[6], n[0], columns, padded<real>(n[0]) + padded<real>(n[6]));
    }

    Convolution(const NodeContext<real> &context, const Value<real> &input)
        : Base(context, context.spec.numbers[0],
               !Winograd<real>::is_worth(context.spec.numbers) && !has_planes(context.spec.numbers)) {
        const int64_t taps = window.rows * window.columns;
        panels = {taps * channels, outputs};
        const FeatureMap &in = this->in;
        if (has_planes(this->n)) {
            const Planes<real> maps(in.rows, in.columns, padding, channels);
            planes = std::make_unique<PlaneConvolution<real>>(maps, outputs, window, dilation, Pair{0, 0},
                                                              Pair{out.rows, out.columns});
            plane_inputs.resize(planes->room(context.batch));
        } else {
            windows = windows_of(in, 0, 0, stride, window, dilation, {out.rows, out.columns}, 0, {out.line(), out.padded_channels});
            for (const Span &span : spans_of(in, 0, window.rows, window.columns, dilation))
                for (int64_t i = 0; i < span.count; i++) offsets.push_back(span.first + i);
        }
        ParameterLayout layout;
        layout.size = planes ? planes->weights.size() : panels.size();
        for (int64_t o = 0; o < outputs; o++) {
            layout.start.push_back(place(0, o));
            layout.stride.push_back(planes ? planes->weights.block() : panels.width(o));
        }
        for (int64_t c = 0; c < channels; c++)
            for (int64_t tap = 0; tap < taps; tap++) layout.column.push_back(tap * channels + c);
        layout.transposed = context.spec.numbers[17];
        context.load(weight, 0, layout);
        context.load(bias, 1, outputs);
        if (Winograd<real>::is_worth(context.spec.numbers)) {
            winograd = std::make_unique<Winograd<real>>(context.spec.numbers, input.needs_gradient);
            return;
        }
        gradient_map = out;
        if (input.needs_gradient) prepare_phases();
        gradients.resize(gradient_map.size());
        if (!planes && !plane_phases()) return;
        gradient_planes = std::make_unique<Planes<real>>(planes_of_gradients());
        int64_t room = gradient_planes->size();
        for (const Phase &phase : phases)
            if (phase.planes) room = std::max(room, phase.planes->room(1));
        plane_gradients.resize(room);
    }

    int64_t place(int64_t input, int64_t output) const {  // of a weight
        return planes ? planes->weights.place(input, output) : panels.place(input, output);
    }

    bool plane_phases() const { return !phases.empty() && phases[0].planes; }

    Planes<real> planes_of_gradients() const {
        const Pair border{gradient_map.border_rows, gradient_map.border_columns};
        return Planes<real>(out.rows, out.columns, border, planes ? planes->out.channels : outputs);
    }

    // The taps that a phase has in one direction, the inputs it gives gradients to, and where the first window begins.
    struct PhaseLine {
        int64_t taps, first_input, inputs, begin, border;
        PhaseLine(int64_t phase, int64_t size, int64_t window, int64_t padding, int64_t stride, int64_t dilation, int64_t outputs) {
            taps = stride == 1 ? window : std::max<int64_t>(0, (window - phase + stride - 1) / stride);
            first_input = ((phase - padding) % stride + stride) % stride;
            inputs = first_input < size ? (size - first_input + stride - 1) / stride : 0;
            const int64_t newest = (first_input + padding - phase) / stride;  // the output that the first tap leads to
            begin = newest - (taps - 1) * dilation;
            border = std::max({int64_t(0), -begin, newest + inputs - 1 - (outputs - 1)});
        }
    };

    void prepare_phases() {
        const FeatureMap &map = this->input_map;
        std::vector<std::pair<PhaseLine, PhaseLine>> lines;
        for (int64_t r = 0; r < stride.rows; r++)
            for (int64_t c = 0; c < stride.columns; c++) {
                lines.emplace_back(
                    PhaseLine(r, map.rows, window.rows, padding.rows, stride.rows, dilation.rows, out.rows),
                    PhaseLine(c, map.columns, window.columns, padding.columns, stride.columns, dilation.columns, out.columns));
                gradient_map.border_rows = std::max(gradient_map.border_rows, lines.back().first.border);
                gradient_map.border_columns = std::max(gradient_map.border_columns, lines.back().second.border);
            }
        for (size_t p = 0; p < lines.size(); p++) {
            const PhaseLine &rows = lines[p].first, &columns = lines[p].second;
            if (!rows.taps || !columns.taps) leaves_gaps = true;
            if (!rows.taps || !columns.taps || !rows.inputs || !columns.inputs) continue;
            Phase phase;
            const int64_t taps = rows.taps * columns.taps;
            const Pair begin{rows.begin + gradient_map.border_rows, columns.begin + gradient_map.border_columns};
            const Pair size{rows.taps, columns.taps}, count{rows.inputs, columns.inputs};
            phase.panels = {taps * outputs, channels};
            phase.row = columns.taps * outputs;
            phase.first = {rows.first_input, columns.first_input};
            int64_t gradient_channels = outputs;
            if (has_plane_gradients(this->n)) {
                const Planes<real> maps = planes_of_gradients();
                phase.planes = std::make_unique<PlaneConvolution<real>>(maps, channels, size, dilation, begin, count);
                gradient_channels = maps.channels;
            }
            phase.flipped.resize(phase.planes ? phase.planes->weights.size() : phase.panels.size());
            phase.from.assign(phase.flipped.size(), -1);
            const int64_t first_row = p / stride.columns, first_column = p % stride.columns;
            for (int64_t r = 0; r < rows.taps; r++)
                for (int64_t c = 0; c < columns.taps; c++) {
                    const int64_t tap = (first_row + (rows.taps - 1 - r) * stride.rows) * window.columns + first_column +
                                        (columns.taps - 1 - c) * stride.columns;
                    for (int64_t i = 0; i < channels; i++)
                        for (int64_t o = 0; o < outputs; o++) {
                            const int64_t input = (r * columns.taps + c) * gradient_channels + o;
                            const int64_t to = phase.planes ? phase.planes->weights.place(input, i) : phase.panels.place(input, i);
                            phase.from[to] = place(tap * channels + i, o);
                        }
                }
            if (!phase.planes)
                phase.windows = windows_of(gradient_map, begin.rows, begin.columns, {1, 1}, size, dilation, count,
                                           map.place(rows.first_input, columns.first_input),
                                           {stride.rows * map.line(), stride.columns * map.padded_channels});
            phases.push_back(std::move(phase));
        }
    }

    std::vector<Parameter<real> *> parameters() override { return {&weight, &bias}; }

    bool computes_by_sample() const override { return !winograd && window.rows * window.columns > 1; }
    bool needs_inputs() const override { return !planes && !this->copies; }
    bool needs_output() const override { return relu; }

    void forward(const Pass &pass) override {
        const real *start = bias.exists() ? bias.value.data() : nullptr;
        if (winograd) {
            winograd->load(weight.value.data(), panels);
            return winograd->forward(*this->inputs[0], *this->output, start, pass.samples);
        }
        for (int64_t b = pass.first; b < pass.samples; b++) {
            if (planes) {
                forward_planes(b, start);
                continue;
            }
            this->copy_input(b);
            correlate<real>(this->input_of(b), this->output->result_of(b), weight.value.data(), panels, windows,
                            window.columns * channels, start, relu ? RECTIFY : ASSIGN);
        }
    }

    real *planes_of(int64_t b) { return &plane_inputs[b * planes->in.size()]; }

    void forward_planes(int64_t b, const real *start) {
        const Planes<real> &maps = planes->in;
        const real *x = this->inputs[0]->of(b);
        const int64_t *step = this->input_step;
        if (this->n[16])
            maps.load(planes_of(b), [&](int64_t r, int64_t c, int64_t i) { return at(x + this->input_map.place(r, c) + i); });
        else
            for (int64_t i = 0; i < channels; i++)
                for (int64_t r = 0; r < maps.map.rows; r++) {
                    const real *from = x + i * step[0] + r * step[1];
                    real *to = planes_of(b) + i * maps.map.size() + maps.map.place(r, 0);
                    if (step[2] == 1)
                        std::copy_n(from, maps.columns, to);
                    else
                        for (int64_t c = 0; c < maps.columns; c++) to[c] = from[c * step[2]];
                }
        const real *results = planes->correlate(planes_of(b), weight.value.data(), start);
        real *y = this->output->result_of(b);
        planes->out.for_each_vector(results, [&](int64_t r, int64_t c, int64_t i, vector<real> value) {
            at(y + out.place(r, c) + i) = relu ? rectified<real>(value) : value;
        });
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        Value<real> &input = *this->inputs[0];
        if (!pass.first) begin_gradient();
        if (winograd) {
            for (int64_t b = 0; relu && b < pass.samples; b++)
                this->gradient_before_relu(b, this->output->gradient_of(b), out);
            winograd->backward(input, *this->output, bias.gradient, pass.samples);
            return winograd->add_gradient(weight.gradient.data(), panels);
        }
        const bool in_place = !gradient_map.border_rows && !gradient_map.border_columns;
        for (int64_t b = pass.first; b < pass.samples; b++) {
            if (leaves_gaps && !input.sums) std::fill_n(input.gradient_of(b), input.size, real(0));
            real *own = in_place ? this->output->gradient_of(b) : gradients.data();
            if (gradient_planes)
                gradient_planes->load(plane_gradients.data(), [&](int64_t r, int64_t c, int64_t i) {
                    return this->gradient_before_relu(b, out.place(r, c) + i);
                });
            if ((relu || !in_place) && !(planes && (plane_phases() || phases.empty())))
                this->gradient_before_relu(b, own, gradient_map);
            if (planes)
                accumulate_planes(b);
            else
                accumulate_gradient(this->input_of(b), own);
            for (Phase &phase : phases) {
                if (phase.planes)
                    give_planes(b, phase);
                else
                    correlate<real>(own, input.gradient_of(b), phase.flipped.data(), phase.panels, phase.windows,
                                    phase.row, nullptr, input.sums ? ADD_TO : ASSIGN);
            }
        }
        if (planes && pass.last) planes->add_gradient(weight.gradient.data());
    }

    void begin_gradient() {
        weight.begin_gradient(), bias.begin_gradient();
        if (planes) planes->begin_gradient();
        for (Phase &phase : phases) {
            const bool is_matrix = window.rows * window.columns == 1 && !planes && !phase.planes;
            if (is_matrix)
                panels.transpose_to(phase.panels, PlainValues<real>{weight.value.data()}, phase.flipped.data());
            for (size_t i = 0; !is_matrix && i < phase.from.size(); i++)
                if (phase.from[i] >= 0) phase.flipped[i] = weight.value[phase.from[i]];
        }
    }

    void accumulate_planes(int64_t b) {
        planes->accumulate(planes_of(b), *gradient_planes, plane_gradients.data());
        const FeatureMap &map = gradient_planes->map;
        for (int64_t o = 0; o < int64_t(bias.gradient.size()) && o < outputs; o++) {
            vector<real> sum = {};
            for (int64_t r = 0; r < map.rows; r++)
                for (int64_t c = 0; c < map.columns; c += LANES<real>)
                    sum += unaligned(&plane_gradients[o * map.size() + map.place(r, c)]);
            bias.gradient[o] += sum_of<real>(sum);
        }
    }

    void give_planes(int64_t b, Phase &phase) {
        Value<real> &input = *this->inputs[0];
        const real *results = phase.planes->correlate(plane_gradients.data(), phase.flipped.data(), nullptr);
        phase.planes->out.for_each_vector(results, [&](int64_t r, int64_t c, int64_t i, vector<real> value) {
            const int64_t row = phase.first.rows + r * stride.rows, column = phase.first.columns + c * stride.columns;
            this->give(input, input.gradient_of(b) + this->input_map.place(row, column) + i, value);
        });
    }

    void accumulate_gradient(const real *x, const real *gradients) {
        constexpr int64_t lanes = LANES<real>;
        const FeatureMap &in = this->in;
        const bool single = window.rows * window.columns == 1 && in.size() / in.padded_channels == out.rows * out.columns &&
                            gradient_map.size() == out.size();
        if (single)
            accumulator.add(x, in.padded_channels, gradients, out.padded_channels, out.rows * out.columns, panels,
                            weight.gradient.data());
        const int64_t some = std::max<int64_t>(1, POSITIONS / out.columns);
        for (int64_t r = 0; !single && r < out.rows; r += some) {
            const int64_t rows = std::min(some, out.rows - r);
            for (int64_t v = 0; v < panels.vectors(); v += 2) {
                const Rectangle<real> inputs{x + r * stride.rows * in.line(), stride.rows * in.line(),
                                             stride.columns * in.padded_channels};
                const int64_t vectors = std::min<int64_t>(2, panels.vectors() - v);
                const Rectangle<real> own = packed.pack({gradients + gradient_map.place(r, 0) + v * lanes, gradient_map.line(),
                                                         gradient_map.padded_channels},
                                                        rows, out.columns, vectors);
                accumulate(inputs, offsets.data(), offsets.size(), own, rows, out.columns, vectors,
                           &weight.gradient[panels.start(v / 2)]);
            }
        }
        for (int64_t i = 0; i < int64_t(bias.gradient.size()); i += 4 * lanes) {
            const int64_t some = std::min<int64_t>(4, (int64_t(bias.gradient.size()) - i) / lanes);
            vector<real> sums[4] = {};  // that do not wait for each other
            for (int64_t r = 0; r < out.rows; r++)
                for (int64_t c = 0; c < out.columns; c++) {
                    const real *own = gradients + gradient_map.place(r, c) + i;
                    if (some == 4)
                        for (int64_t v = 0; v < 4; v++) sums[v] += at(own + v * lanes);
                    else
                        for (int64_t v = 0; v < some; v++) sums[v] += at(own + v * lanes);
                }
            for (int64_t v = 0; v < some; v++) at(&bias.gradient[i + v * lanes]) += sums[v];
        }
    }
};

// Every channel has its own window. parameters: weight, bias.
template <typename real>
struct DepthwiseConvolution final : Windowed<real> {
    using Base = Windowed<real>;
    using Base::channels, Base::window, Base::padding, Base::stride, Base::dilation, Base::out, Base::in, Base::relu;
    Parameter<real> weight, bias;  // taps x padded channels, and padded channels
    AlignedVector<real> gradients, input_gradients;  // of one sample

    DepthwiseConvolution(const NodeContext<real> &context, const Value<real> &)
        : Base(context, padded<real>(context.spec.numbers[0])), gradients(out.size()), input_gradients(in.size()) {
        const int64_t taps = window.rows * window.columns;
        ParameterLayout layout;  // a row of the weight is a channel
        layout.size = taps * out.padded_channels;
        for (int64_t c = 0; c < channels; c++) layout.start.push_back(c), layout.stride.push_back(out.padded_channels);
        for (int64_t tap = 0; tap < taps; tap++) layout.column.push_back(tap);
        context.load(weight, 0, layout);
        context.load(bias, 1, channels);
    }

    std::vector<Parameter<real> *> parameters() override { return {&weight, &bias}; }

    int64_t corner(int64_t r, int64_t c) const {
        return r * stride.rows * in.line() + c * stride.columns * in.padded_channels;
    }
    int64_t tap_place(int64_t r, int64_t c) const {
        return r * dilation.rows * in.line() + c * dilation.columns * in.padded_channels;
    }

    void forward(const Pass &pass) override {
        constexpr int64_t lanes = LANES<real>;
        const vector<real> zero = {};
        for (int64_t b = 0; b < pass.samples; b++) {
            this->copy_input(b);
            const real *x = this->input_of(b);
            real *y = &this->output->data[b * this->output->size];
            for (int64_t r = 0; r < out.rows; r++)
                for (int64_t c = 0; c < out.columns; c++)
                    for (int64_t i = 0; i < out.padded_channels; i += lanes) {
                        const real *from = x + corner(r, c) + i, *w = &weight.value[i];
                        vector<real> sum = bias.exists() ? at(&bias.value[i]) : zero;
                        for (int64_t kr = 0; kr < window.rows; kr++)
                            for (int64_t kc = 0; kc < window.columns; kc++, w += out.padded_channels)
                                sum += at(from + tap_place(kr, kc)) * at(w);
                        at(y + out.place(r, c) + i) = relu ? rectified<real>(sum) : sum;
                    }
        }
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        constexpr int64_t lanes = LANES<real>;
        Value<real> &input = *this->inputs[0];
        weight.begin_gradient(), bias.begin_gradient();
        for (int64_t b = 0; b < pass.samples; b++) {
            this->gradient_before_relu(b, gradients.data(), out);
            const real *x = this->input_of(b);
            if (input.needs_gradient) std::fill(input_gradients.begin(), input_gradients.end(), real(0));
            for (int64_t i = 0; i < out.padded_channels; i += lanes) {
                for (int64_t kr = 0; kr < window.rows; kr++)
                    for (int64_t kc = 0; kc < window.columns; kc++) {
                        const int64_t tap = (kr * window.columns + kc) * out.padded_channels + i;
                        const vector<real> w = at(&weight.value[tap]);
                        vector<real> sum = at(&weight.gradient[tap]);
                        for (int64_t r = 0; r < out.rows; r++) {
                            const real *gradient = &gradients[out.place(r, 0) + i];
                            const int64_t first = corner(r, 0) + tap_place(kr, kc) + i, step = stride.columns * in.padded_channels;
                            for (int64_t c = 0; c < out.columns; c++)
                                sum += at(gradient + c * out.padded_channels) * at(x + first + c * step);
                            for (int64_t c = 0; c < out.columns && input.needs_gradient; c++)
                                at(&input_gradients[first + c * step]) += at(gradient + c * out.padded_channels) * w;
                        }
                        at(&weight.gradient[tap]) = sum;
                    }
                if (!bias.exists()) continue;
                vector<real> sum = at(&bias.gradient[i]);
                for (int64_t p = 0; p < out.rows * out.columns; p++) sum += at(&gradients[p * out.padded_channels + i]);
                at(&bias.gradient[i]) = sum;
            }
            for (int64_t r = 0; r < in.rows && input.needs_gradient; r++)
                for (int64_t i = 0; i < in.columns * in.padded_channels; i += lanes) {
                    real *place = input.gradient_of(b) + r * in.columns * in.padded_channels + i;
                    Node<real>::give(input, place, at(&input_gradients[in.place(r, 0) + i]));
                }
        }
    }
};

}  // namespace
