// Convolutions and pooling, sample by sample.
//
// A sample is a feature map: rows x columns x channels. The channels are padded with zeros to full vectors, and there is a
// border of zeros where the next convolution pads. Weights stand in panels of two vectors of outputs: one such pair per tap
// and input.

#pragma once

#include <type_traits>

#include "compiled_vectors.hpp"

namespace {

struct FeatureMap {
    int64_t rows, columns, channels;
    int64_t padded_channels;
    int64_t border_rows = 0, border_columns = 0;  // on both sides

    int64_t line() const { return (columns + 2 * border_columns) * padded_channels; }
    int64_t size() const { return (rows + 2 * border_rows) * line(); }
    int64_t place(int64_t r, int64_t c) const { return (r + border_rows) * line() + (c + border_columns) * padded_channels; }
};

struct Span {  // contiguous values of a window
    int64_t first, count;
};

// Rows `first` to `last` of a window with this many columns.
inline std::vector<Span> window(const FeatureMap &x, int64_t first, int64_t last, int64_t columns) {
    std::vector<Span> spans;
    const bool unpadded = x.padded_channels == x.channels;
    for (int64_t r = first; r < last; r++) {
        if (unpadded) spans.push_back({r * x.line(), columns * x.channels});
        for (int64_t c = 0; c < columns && !unpadded; c++) spans.push_back({r * x.line() + c * x.padded_channels, x.channels});
    }
    return spans;
}

// Positions whose windows have the same rows in the border, which are skipped: they are zero.
struct WindowGroup {
    int64_t first, last;  // the rows of a window outside the border
    std::vector<Span> spans;
    std::vector<int64_t> from, to;  // where the windows begin, and where the results belong
};

// The windows of a feature map, the first of which begins at (r0, c0) with the border, and their results in another one.
inline std::vector<WindowGroup> grouped(const FeatureMap &x, int64_t r0, int64_t c0, int64_t rows, int64_t columns,
                                        const FeatureMap &y) {
    std::vector<WindowGroup> groups;
    for (int64_t r = 0; r < y.rows; r++) {
        const int64_t first = std::clamp<int64_t>(x.border_rows - r0 - r, 0, rows);
        const int64_t last = std::clamp<int64_t>(x.border_rows + x.rows - r0 - r, first, rows);
        if (groups.empty() || groups.back().first != first || groups.back().last != last)
            groups.push_back({first, last, window(x, first, last, columns), {}, {}});
        for (int64_t c = 0; c < y.columns; c++) {
            groups.back().from.push_back((r0 + r) * x.line() + (c0 + c) * x.padded_channels);
            groups.back().to.push_back(y.place(r, c));
        }
    }
    return groups;
}

// The weights of `inputs` values of a window and `outputs` channels, and the place of each.
template <typename real>
struct WeightPanels {
    int64_t inputs, outputs;
    int64_t vectors() const { return padded<real>(outputs) / LANES<real>; }
    int64_t size() const { return inputs * vectors() * LANES<real>; }
    int64_t start(int64_t panel) const { return panel * 2 * LANES<real> * inputs; }
    int64_t width(int64_t output) const {  // of the panel an output is in
        return output / (2 * LANES<real>) * 2 + 1 == vectors() ? LANES<real> : 2 * LANES<real>;
    }
    int64_t place(int64_t input, int64_t output) const {
        const int64_t panel = output / (2 * LANES<real>);
        return start(panel) + input * width(output) + output % (2 * LANES<real>);
    }
};

// y[p] = start + the weighted sum over the window at x + from[p], for P positions and V vectors of outputs.
template <typename real, int P, int V>
__attribute__((noinline)) void correlate_block(const real *x, const int64_t *from, real *y, const int64_t *to, const real *w,
                                               const std::vector<Span> &spans, const real *start, bool relu) {
    constexpr int64_t lanes = LANES<real>;
    const vector<real> zero = {};
    vector<real> sums[P][V];
    for (int p = 0; p < P; p++)
        for (int v = 0; v < V; v++) sums[p][v] = start ? at(start + v * lanes) : zero;
    for (const Span &span : spans) {
        const real *inputs[P];
        for (int p = 0; p < P; p++) inputs[p] = x + from[p] + span.first;
        for (int64_t k = 0; k < span.count; k++, w += V * lanes)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < V; v++) sums[p][v] += inputs[p][k] * at(w + v * lanes);
    }
    for (int p = 0; p < P; p++)
        for (int v = 0; v < V; v++) at(y + to[p] + v * lanes) = relu ? (sums[p][v] < zero ? zero : sums[p][v]) : sums[p][v];
}

template <typename real, int P, int V>
inline void correlate_rest(int64_t count, const real *x, const int64_t *from, real *y, const int64_t *to, const real *w,
                           const std::vector<Span> &spans, const real *start, bool relu) {
    if constexpr (P > 0) {
        if (count == P)
            correlate_block<real, P, V>(x, from, y, to, w, spans, start, relu);
        else
            correlate_rest<real, P - 1, V>(count, x, from, y, to, w, spans, start, relu);
    }
}

template <typename real, int P, int V>
inline void correlate_panel(const real *x, real *y, const real *w, const WindowGroup &group, const real *start, bool relu) {
    const int64_t count = group.from.size(), *from = group.from.data(), *to = group.to.data();
    int64_t p = 0;
    for (; p + P <= count; p += P) correlate_block<real, P, V>(x, from + p, y, to + p, w, group.spans, start, relu);
    correlate_rest<real, P - 1, V>(count - p, x, from + p, y, to + p, w, group.spans, start, relu);
}

// A feature map of outputs; the sums stay in registers.
template <typename real>
void correlate(const real *x, real *y, const real *w, const WeightPanels<real> &panels, const std::vector<WindowGroup> &groups,
               int64_t row, const real *start, bool relu) {  // `row`: inputs in a row of a window
    for (int64_t v = 0; v < panels.vectors(); v += 2) {
        const int64_t first = v * LANES<real>, vectors = std::min<int64_t>(2, panels.vectors() - v);
        const real *own = start ? start + first : nullptr;
        for (const WindowGroup &group : groups) {
            const real *weights = w + panels.start(v / 2) + group.first * row * vectors * LANES<real>;
            if (vectors == 2)
                correlate_panel<real, 6, 2>(x, y + first, weights, group, own, relu);
            else
                correlate_panel<real, 8, 1>(x, y + first, weights, group, own, relu);
        }
    }
}

// A rectangle of a feature map: where it begins, and the distance of two rows and of two positions.
template <typename real>
struct Rectangle {
    const real *first;
    int64_t line, padded_channels;
};

// gradient[k] += the sum over a rectangle of x[offsets[k]] * output_gradients, for K inputs and V vectors of outputs.
template <typename real, int K, int V>
__attribute__((noinline)) void accumulate_block(const Rectangle<real> &x, const int64_t *offsets,
                                                const Rectangle<real> &output_gradients, int64_t rows, int64_t columns,
                                                real *gradient) {
    constexpr int64_t lanes = LANES<real>;
    vector<real> sums[K][V];
    for (int k = 0; k < K; k++)
        for (int v = 0; v < V; v++) sums[k][v] = at(gradient + (k * V + v) * lanes);
    for (int64_t r = 0; r < rows; r++) {
        const real *inputs[K], *gradients = output_gradients.first + r * output_gradients.line;
        for (int k = 0; k < K; k++) inputs[k] = x.first + r * x.line + offsets[k];
        const int64_t far = output_gradients.padded_channels, padded_channels = x.padded_channels;
        for (int64_t c = 0, i = 0; c < columns; c++, i += padded_channels, gradients += far)
            for (int k = 0; k < K; k++)
                for (int v = 0; v < V; v++) sums[k][v] += inputs[k][i] * at(gradients + v * lanes);
    }
    for (int k = 0; k < K; k++)
        for (int v = 0; v < V; v++) at(gradient + (k * V + v) * lanes) = sums[k][v];
}

template <typename real, int K, int V>
inline void accumulate_rest(int64_t count, const Rectangle<real> &x, const int64_t *offsets,
                            const Rectangle<real> &output_gradients, int64_t rows, int64_t columns, real *gradient) {
    if constexpr (K > 0) {
        if (count == K)
            accumulate_block<real, K, V>(x, offsets, output_gradients, rows, columns, gradient);
        else
            accumulate_rest<real, K - 1, V>(count, x, offsets, output_gradients, rows, columns, gradient);
    }
}

// All inputs of a panel, in blocks of nearly the same size.
template <typename real, int K, int V>
inline void accumulate_panel(const Rectangle<real> &x, const std::vector<int64_t> &offsets,
                             const Rectangle<real> &output_gradients, int64_t rows, int64_t columns, real *gradient) {
    const int64_t inputs = offsets.size(), blocks = (inputs + K - 1) / K;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t k = inputs * block / blocks, next = inputs * (block + 1) / blocks;
        accumulate_rest<real, K, V>(next - k, x, &offsets[k], output_gradients, rows, columns, gradient + k * V * LANES<real>);
    }
}

enum LayerType : int64_t { LINEAR, CONVOLUTION, POOL };  // as in execution/compiled.py

struct LayerSpec {  // as in execution/compiled.py
    int64_t layer_type, inputs, outputs;
    int64_t window_rows, window_columns, padding_rows, padding_columns;
    int64_t activation;
    double dropout;
    int64_t seed;
};

// A convolution or max-pooling, with its activation and dropout.
template <typename real>
struct SpatialLayer {
    typedef typename std::conditional<sizeof(real) == 4, int32_t, int64_t>::type index;
    static constexpr int64_t POSITIONS = 256;  // whose gradients, one panel wide, stay in the nearest cache

    LayerSpec spec;
    FeatureMap in, out;
    FeatureMap input_gradient_map, gradient_map;  // of the gradients of one sample, by inputs and by outputs
    Dropout dropout;
    bool is_first;  // the gradients of its inputs are not needed
    WeightPanels<real> panels, flipped_panels;
    std::vector<int64_t> offsets;  // of every input in a window
    std::vector<WindowGroup> windows, gradient_windows;
    std::vector<int64_t> flipped_from;  // the place of each flipped weight among the weights
    ParameterLayout layout;
    Parameter<real> weight, bias;
    AlignedVector<real> flipped;  // weights of the convolution that computes the gradients of the inputs
    AlignedVector<real> outputs, mask, dropped;  // batch x feature map
    AlignedVector<real> output_gradients;  // of one sample
    std::vector<index> argmax;  // batch x feature map: the tap of the largest value of a window

    // `next` is the layer after it, if that is a convolution or pooling too.
    SpatialLayer(const LayerSpec &spec, const FeatureMap &in, const LayerSpec *next, bool is_first, int64_t batch)
        : spec(spec), in(in), dropout{spec.dropout, uint64_t(spec.seed)}, is_first(is_first) {
        const bool pools = spec.layer_type == POOL;
        out = {pools ? in.rows / spec.window_rows : in.rows + 2 * in.border_rows - spec.window_rows + 1,
               pools ? in.columns / spec.window_columns : in.columns + 2 * in.border_columns - spec.window_columns + 1,
               spec.outputs, padded<real>(spec.outputs)};
        gradient_map = out;
        if (next) out.border_rows = next->padding_rows, out.border_columns = next->padding_columns;
        outputs.resize(batch * out.size());
        if (dropout.p) mask.resize(outputs.size()), dropped.resize(outputs.size());
        if (pools)
            argmax.resize(outputs.size());
        else
            prepare();
        output_gradients.resize(gradient_map.size());
    }

    void prepare() {
        const int64_t taps = spec.window_rows * spec.window_columns;
        if (!is_first) {
            gradient_map.border_rows = std::max<int64_t>(0, spec.window_rows - 1 - spec.padding_rows);
            gradient_map.border_columns = std::max<int64_t>(0, spec.window_columns - 1 - spec.padding_columns);
        }
        panels = {taps * spec.inputs, spec.outputs};
        windows = grouped(in, 0, 0, spec.window_rows, spec.window_columns, out);
        for (const Span &span : window(in, 0, spec.window_rows, spec.window_columns))
            for (int64_t i = 0; i < span.count; i++) offsets.push_back(span.first + i);
        layout.size = panels.size();
        for (int64_t o = 0; o < spec.outputs; o++) {
            layout.start.push_back(panels.place(0, o));
            layout.stride.push_back(panels.width(o));
        }
        for (int64_t c = 0; c < spec.inputs; c++)
            for (int64_t tap = 0; tap < taps; tap++) layout.column.push_back(tap * spec.inputs + c);
    }

    // Prepare for the gradients of the inputs, whose feature map is that of the layer before.
    void connect(const FeatureMap &map) {
        input_gradient_map = map;
        if (spec.layer_type == POOL) return;
        const int64_t taps = spec.window_rows * spec.window_columns;
        flipped_panels = {taps * spec.outputs, spec.inputs};
        flipped.resize(flipped_panels.size());
        const int64_t r0 = spec.padding_rows + gradient_map.border_rows - (spec.window_rows - 1);
        const int64_t c0 = spec.padding_columns + gradient_map.border_columns - (spec.window_columns - 1);
        gradient_windows = grouped(gradient_map, r0, c0, spec.window_rows, spec.window_columns, input_gradient_map);
        flipped_from.assign(flipped.size(), -1);
        for (int64_t tap = 0; tap < taps; tap++)
            for (int64_t c = 0; c < spec.inputs; c++)
                for (int64_t o = 0; o < spec.outputs; o++)
                    flipped_from[flipped_panels.place(tap * spec.outputs + o, c)] =
                        panels.place((taps - 1 - tap) * spec.inputs + c, o);
    }

    // Before the backward pass of a batch: clear the gradients and flip the current weights.
    void begin_backward() {
        std::fill(weight.gradient.begin(), weight.gradient.end(), real(0));
        std::fill(bias.gradient.begin(), bias.gradient.end(), real(0));
        for (size_t i = 0; i < flipped_from.size(); i++)
            if (flipped_from[i] >= 0) flipped[i] = weight.value[flipped_from[i]];
    }

    void forward(const real *x, int64_t b, int64_t draw) {
        real *y = &outputs[b * out.size()];
        if (spec.layer_type == POOL)
            pool(x, b);
        else
            correlate<real>(x, y, weight.value.data(), panels, windows, spec.window_columns * spec.inputs,
                            bias.value.empty() ? nullptr : bias.value.data(), spec.activation == RELU);
        if (spec.activation != NONE && (spec.activation != RELU || spec.layer_type == POOL))
            for (int64_t r = 0; r < out.rows; r++)
                for (int64_t c = 0; c < out.columns; c++) {
                    real *z = y + out.place(r, c);
                    for (int64_t i = 0; i < out.channels; i++) z[i] = activate(spec.activation, z[i]);
                }
        if (!dropout.p || draw == EVALUATION) return;
        const auto drawn = dropout.mask<real>(draw);
        const int64_t area = out.rows * out.columns, first = b * out.channels * area;
        for (int64_t r = 0; r < out.rows; r++)
            for (int64_t c = 0; c < out.columns; c++) {
                const int64_t place = b * out.size() + out.place(r, c);
                const uint32_t own = uint32_t(first + r * out.columns + c);
                for (int64_t i = 0; i < out.channels; i++) mask[place + i] = drawn.at(own + uint32_t(i) * uint32_t(area));
                for (int64_t i = 0; i < out.channels; i++) dropped[place + i] = outputs[place + i] * mask[place + i];
            }
    }

    const real *output_of(int64_t b, int64_t draw) const {
        return &(!dropout.p || draw == EVALUATION ? outputs : dropped)[b * out.size()];
    }

    void pool(const real *x, int64_t b) {
        constexpr int64_t lanes = LANES<real>;
        typedef index indices __attribute__((vector_size(BYTES), aligned(sizeof(index)), may_alias));
        for (int64_t r = 0; r < out.rows; r++)
            for (int64_t c = 0; c < out.columns; c++) {
                const real *corner = x + in.place(r * spec.window_rows, c * spec.window_columns);
                const int64_t place = b * out.size() + out.place(r, c);
                for (int64_t i = 0; i < out.padded_channels; i += lanes) {
                    vector<real> best = at(corner + i);
                    indices largest = {};
                    for (int64_t tap = 1; tap < spec.window_rows * spec.window_columns; tap++) {
                        const int64_t r = tap / spec.window_columns, c = tap % spec.window_columns;
                        const vector<real> other = at(corner + r * in.line() + c * in.padded_channels + i);
                        const auto better = (other > best) | (other != other);  // NaN wins, as in torch
                        best = better ? other : best;
                        largest = better ? indices{} + index(tap) : largest;
                    }
                    at(&outputs[place + i]) = best;
                    *reinterpret_cast<indices *>(&argmax[place + i]) = largest;
                }
            }
    }

    // From the gradients of the outputs to those of the parameters and, unless null, of the inputs.
    void backward(const real *x, int64_t b, real *input_gradients) {
        constexpr int64_t lanes = LANES<real>;
        for (int64_t r = 0; r < out.rows; r++)
            for (int64_t c = 0; c < out.columns; c++) {
                const int64_t place = b * out.size() + out.place(r, c);
                real *gradients = &output_gradients[gradient_map.place(r, c)];
                for (int64_t i = 0; dropout.p && i < out.channels; i++) gradients[i] *= mask[place + i];
                if (spec.activation == RELU) {
                    const vector<real> zero = {};
                    for (int64_t i = 0; i < out.padded_channels; i += lanes)
                        at(gradients + i) = at(&outputs[place + i]) > zero ? at(gradients + i) : zero;
                } else if (spec.activation != NONE) {
                    for (int64_t i = 0; i < out.channels; i++)
                        gradients[i] = activation_gradient(spec.activation, outputs[place + i], gradients[i]);
                }
            }
        if (spec.layer_type == POOL) return unpool(b, input_gradients);
        accumulate_gradient(x);
        const int64_t row = spec.window_columns * spec.outputs;
        if (input_gradients)
            correlate<real>(output_gradients.data(), input_gradients, flipped.data(), flipped_panels, gradient_windows, row,
                            nullptr, false);
    }

    void accumulate_gradient(const real *x) {
        constexpr int64_t lanes = LANES<real>;
        const int64_t some = std::max<int64_t>(1, POSITIONS / out.columns);
        for (int64_t r = 0; r < out.rows; r += some) {
            const int64_t rows = std::min(some, out.rows - r);
            for (int64_t v = 0; v < panels.vectors(); v += 2) {
                const Rectangle<real> inputs{x + r * in.line(), in.line(), in.padded_channels};
                const Rectangle<real> own{&output_gradients[gradient_map.place(r, 0) + v * lanes], gradient_map.line(),
                                          gradient_map.padded_channels};
                real *gradient = &weight.gradient[panels.start(v / 2)];
                if (v + 1 < panels.vectors())
                    accumulate_panel<real, 6, 2>(inputs, offsets, own, rows, out.columns, gradient);
                else
                    accumulate_panel<real, 8, 1>(inputs, offsets, own, rows, out.columns, gradient);
            }
        }
        for (int64_t i = 0; i < int64_t(bias.gradient.size()); i += lanes) {
            vector<real> sum = at(&bias.gradient[i]);
            for (int64_t r = 0; r < out.rows; r++)
                for (int64_t c = 0; c < out.columns; c++) sum += at(&output_gradients[gradient_map.place(r, c) + i]);
            at(&bias.gradient[i]) = sum;
        }
    }

    void unpool(int64_t b, real *input_gradients) const {
        constexpr int64_t lanes = LANES<real>;
        typedef index indices __attribute__((vector_size(BYTES), aligned(sizeof(index)), may_alias));
        const vector<real> zero = {};
        const FeatureMap &map = input_gradient_map;
        for (int64_t r = 0; r < map.rows; r++)
            std::fill_n(input_gradients + map.place(r, 0), map.columns * map.padded_channels, real(0));
        for (int64_t r = 0; r < out.rows; r++)
            for (int64_t c = 0; c < out.columns; c++) {
                real *corner = input_gradients + map.place(r * spec.window_rows, c * spec.window_columns);
                const real *gradients = &output_gradients[gradient_map.place(r, c)];
                const index *largest = &argmax[b * out.size() + out.place(r, c)];
                for (int64_t tap = 0; tap < spec.window_rows * spec.window_columns; tap++) {
                    const int64_t row = tap / spec.window_columns, column = tap % spec.window_columns;
                    real *to = corner + row * map.line() + column * map.padded_channels;
                    for (int64_t i = 0; i < out.padded_channels; i += lanes) {
                        const auto won = *reinterpret_cast<const indices *>(largest + i) == index(tap);
                        at(to + i) = won ? at(gradients + i) : zero;
                    }
                }
            }
    }
};

}  // namespace
