// Matrix products whose sums stay in registers, for convolutions, layers over sequences, attention and recurrent layers.
//
// The right factor stands in panels of two vectors of outputs: one such pair per input.

#pragma once

#include "compiled_optimizers.hpp"

namespace {

struct Span {  // contiguous values of a window
    int64_t first, count;
};

// Positions with the same spans.
struct WindowGroup {
    int64_t first = 0;  // rows of a window that are skipped: they are in a border of zeros
    int64_t last = 1;   // the end of those that are not
    std::vector<Span> spans;
    std::vector<int64_t> from, to;  // where the windows begin, and where the results belong
};

enum Finish { ASSIGN, RECTIFY, ADD_TO };  // what is done with a sum: `ADD_TO` adds it to the result

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

    // square(place, step, input, output) for squares as wide as a vector, whose inputs are `step` apart; single(place, input,
    // output) for all other weights.
    template <typename Square, typename Single>
    void for_each(const Square &square, const Single &single, bool squares = true) const {
        constexpr int64_t lanes = LANES<real>;
        for (int64_t o = 0; o < outputs; o += lanes)
            for (int64_t k = 0, step = width(o); k < inputs; k += lanes) {
                const int64_t first = place(k, o), rows = std::min(lanes, inputs - k), columns = std::min(lanes, outputs - o);
                if (squares && rows == lanes && columns == lanes) {
                    square(first, step, k, o);
                    continue;
                }
                for (int64_t i = 0; i < rows; i++)
                    for (int64_t j = 0; j < columns; j++) single(first + i * step + j, k + i, o + j);
            }
    }

    // From a matrix whose inputs and outputs are at these distances.
    void pack(const real *from, int64_t input_step, int64_t output_step, real *to) const {
        for_each(
            [&](int64_t place, int64_t step, int64_t k, int64_t o) {
                const real *corner = from + k * input_step + o * output_step;
                if (output_step == 1)
                    for (int64_t i = 0; i < LANES<real>; i++) at(to + place + i * step) = at(corner + i * input_step);
                else
                    copy_transposed<real>(corner, output_step, to + place, step);
            },
            [&](int64_t place, int64_t k, int64_t o) { to[place] = from[k * input_step + o * output_step]; },
            input_step == 1 || output_step == 1);
    }

    void add_to(real *to, int64_t input_step, int64_t output_step, const real *from) const {
        for_each(
            [&](int64_t place, int64_t step, int64_t k, int64_t o) {
                real *corner = to + k * input_step + o * output_step;
                vector<real> rows[LANES<real>];
                for (int64_t i = 0; i < LANES<real>; i++) rows[i] = at(from + place + i * step);
                if (output_step != 1) transpose<real>(rows);
                const int64_t distance = output_step == 1 ? input_step : output_step;
                for (int64_t i = 0; i < LANES<real>; i++) at(corner + i * distance) += rows[i];
            },
            [&](int64_t place, int64_t k, int64_t o) { to[k * input_step + o * output_step] += from[place]; },
            input_step == 1 || output_step == 1);
    }

    // The same weights in the panels of the transposed matrix.
    template <typename Values>
    void transpose_to(const WeightPanels &other, const Values &values, real *to) const {  // `PlainValues` or `Mixture`
        for_each(
            [&](int64_t place, int64_t step, int64_t k, int64_t o) {
                vector<real> rows[LANES<real>];
                for (int64_t i = 0; i < LANES<real>; i++) rows[i] = values.some(place + i * step);
                transpose<real>(rows);
                for (int64_t i = 0; i < LANES<real>; i++) at(to + other.place(o, k) + i * other.width(k)) = rows[i];
            },
            [&](int64_t place, int64_t k, int64_t o) { to[other.place(o, k)] = values.one(place); });
    }
};

// y[p] = start + the weighted sum over the window at x + from[p], for P positions and V vectors of outputs.
template <typename real, int P, int V>
__attribute__((noinline)) void correlate_block(const real *x, const int64_t *from, real *y, const int64_t *to, const real *w,
                                               const std::vector<Span> &spans, const real *start, Finish finish) {
    constexpr int64_t lanes = LANES<real>;
    const vector<real> zero = {};
    vector<real> sums[P][V];
    UNROLLED for (int p = 0; p < P; p++)
        UNROLLED for (int v = 0; v < V; v++) sums[p][v] = start ? at(start + v * lanes) : zero;
    for (const Span &span : spans) {
        const real *inputs[P];
        UNROLLED for (int p = 0; p < P; p++) inputs[p] = x + from[p] + span.first;
        for (int64_t k = 0; k < span.count; k++, w += V * lanes)
            UNROLLED for (int p = 0; p < P; p++)
                UNROLLED for (int v = 0; v < V; v++) sums[p][v] += inputs[p][k] * at(w + v * lanes);
    }
    UNROLLED for (int p = 0; p < P; p++)
        UNROLLED for (int v = 0; v < V; v++) {
            vector<real> &result = at(y + to[p] + v * lanes);
            result = finish == RECTIFY ? rectified<real>(sums[p][v]) : finish == ADD_TO ? result + sums[p][v] : sums[p][v];
        }
}

template <typename real, int P, int V>
inline void correlate_rest(int64_t count, const real *x, const int64_t *from, real *y, const int64_t *to, const real *w,
                           const std::vector<Span> &spans, const real *start, Finish finish) {
    if constexpr (P > 0) {
        if (count == P)
            correlate_block<real, P, V>(x, from, y, to, w, spans, start, finish);
        else
            correlate_rest<real, P - 1, V>(count, x, from, y, to, w, spans, start, finish);
    }
}

// All positions of a group, in blocks of nearly the same size: a small block would wait for its sums.
template <typename real, int P, int V>
inline void correlate_panel(const real *x, real *y, const real *w, const WindowGroup &group, const real *start, Finish finish) {
    const int64_t count = group.from.size(), *from = group.from.data(), *to = group.to.data(), blocks = (count + P - 1) / P;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t p = count * block / blocks, next = count * (block + 1) / blocks;
        correlate_rest<real, P, V>(next - p, x, from + p, y, to + p, w, group.spans, start, finish);
    }
}

// A feature map of outputs; the sums stay in registers. `row`: inputs in a row of a window. `step`: from one panel of results to
// the next.
template <typename real>
void correlate(const real *x, real *y, const real *w, const WeightPanels<real> &panels, const std::vector<WindowGroup> &groups,
               int64_t row, const real *start, Finish finish, int64_t step = 2 * LANES<real>) {
    for (int64_t v = 0; v < panels.vectors(); v += 2) {
        const int64_t first = v * LANES<real>, vectors = std::min<int64_t>(2, panels.vectors() - v);
        const real *own = start ? start + first : nullptr;
        for (const WindowGroup &group : groups) {
            const real *weights = w + panels.start(v / 2) + group.first * row * vectors * LANES<real>;
            if (vectors == 2)
                correlate_panel<real, 6, 2>(x, y + v / 2 * step, weights, group, own, finish);
            else
                correlate_panel<real, 8, 1>(x, y + v / 2 * step, weights, group, own, finish);
        }
    }
}

// A rectangle of a feature map: where it begins, and the distance of two rows and of two positions.
template <typename real>
struct Rectangle {
    const real *first;
    int64_t line, padded_channels;
};

// What sums begin with: nothing, what is there, or what is there after decay and a pull towards an anchor.
template <typename real>
struct Start {
    bool fresh = false;
    real decay = 0, pull = 0;
    const real *anchor = nullptr;  // null: neither decay nor pull

    Start from(int64_t place) const { return {fresh, decay, pull, anchor ? anchor + place : nullptr}; }
};

// gradient[k] += the sum over a rectangle of x[offsets[k]] * output_gradients, for K inputs and V vectors of outputs.
template <typename real, int K, int V>
__attribute__((noinline)) void accumulate_block(const Rectangle<real> &x, const int64_t *offsets,
                                                const Rectangle<real> &output_gradients, int64_t rows, int64_t columns,
                                                real *gradient, const Start<real> &start) {
    constexpr int64_t lanes = LANES<real>;
    alignas(64) static constexpr real zeros[K * V * lanes] = {};
    const real *before = start.fresh ? zeros : gradient;
    vector<real> sums[K][V];
    UNROLLED for (int k = 0; k < K; k++)
        UNROLLED for (int v = 0; v < V; v++) sums[k][v] = at(before + (k * V + v) * lanes);
    if (start.anchor)
        UNROLLED for (int k = 0; k < K; k++)
            UNROLLED for (int v = 0; v < V; v++)
                sums[k][v] -= start.decay * sums[k][v] - start.pull * at(start.anchor + (k * V + v) * lanes);
    for (int64_t r = 0; r < rows; r++) {
        const real *inputs[K], *gradients = output_gradients.first + r * output_gradients.line;
        UNROLLED for (int k = 0; k < K; k++) inputs[k] = x.first + r * x.line + offsets[k];
        const int64_t far = output_gradients.padded_channels, padded_channels = x.padded_channels;
        for (int64_t c = 0, i = 0; c < columns; c++, i += padded_channels, gradients += far)
            UNROLLED for (int k = 0; k < K; k++)
                UNROLLED for (int v = 0; v < V; v++) sums[k][v] += inputs[k][i] * at(gradients + v * lanes);
    }
    UNROLLED for (int k = 0; k < K; k++)
        UNROLLED for (int v = 0; v < V; v++) at(gradient + (k * V + v) * lanes) = sums[k][v];
}

template <typename real, int K, int V>
inline void accumulate_rest(int64_t count, const Rectangle<real> &x, const int64_t *offsets,
                            const Rectangle<real> &output_gradients, int64_t rows, int64_t columns, real *gradient,
                            const Start<real> &start) {
    if constexpr (K > 0) {
        if (count == K)
            accumulate_block<real, K, V>(x, offsets, output_gradients, rows, columns, gradient, start);
        else
            accumulate_rest<real, K - 1, V>(count, x, offsets, output_gradients, rows, columns, gradient, start);
    }
}

// All inputs of a panel, in blocks of nearly the same size.
template <typename real, int K, int V>
inline void accumulate_blocks(const Rectangle<real> &x, const int64_t *offsets, int64_t inputs,
                              const Rectangle<real> &output_gradients, int64_t rows, int64_t columns, real *gradient,
                              const Start<real> &start) {
    const int64_t blocks = (inputs + K - 1) / K;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t k = inputs * block / blocks, next = inputs * (block + 1) / blocks, place = k * V * LANES<real>;
        accumulate_rest<real, K, V>(next - k, x, offsets + k, output_gradients, rows, columns, gradient + place,
                                    start.from(place));
    }
}

template <typename real>
void accumulate(const Rectangle<real> &x, const int64_t *offsets, int64_t inputs, const Rectangle<real> &output_gradients,
                int64_t rows, int64_t columns, int64_t vectors, real *gradient, const Start<real> &start = {}) {
    if (vectors == 2)
        accumulate_blocks<real, 6, 2>(x, offsets, inputs, output_gradients, rows, columns, gradient, start);
    else
        accumulate_blocks<real, 8, 1>(x, offsets, inputs, output_gradients, rows, columns, gradient, start);
}

// The same values with one panel of outputs next to each other: rows far apart may compete for the same lines of the cache.
template <typename real>
struct PackedPanel {
    AlignedVector<real> values;

    Rectangle<real> pack(const Rectangle<real> &from, int64_t rows, int64_t columns, int64_t vectors) {
        const int64_t width = vectors * LANES<real>;
        values.resize(rows * columns * width);
        real *to = values.data();
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++, to += width)
                for (int64_t i = 0; i < width; i += LANES<real>)
                    at(to + i) = at(from.first + r * from.line + c * from.padded_channels + i);
        return {values.data(), columns * width, width};
    }
};

inline std::vector<int64_t> counted(int64_t count) {
    std::vector<int64_t> numbers(count);
    for (int64_t i = 0; i < count; i++) numbers[i] = i;
    return numbers;
}

// Gradients of the weights of a product: gradient[input][output] += the sum over rows of x[input] * output_gradients[output].
template <typename real>
struct Accumulator {
    static constexpr int64_t SOME = 256;  // rows whose gradients, one panel wide, stay in the nearest cache
    static constexpr int64_t LINE = 64 / sizeof(real);
    PackedPanel<real> packed;
    AlignedVector<real> lines;  // a line of the cache of every row, then the next line of every row, and so on
    std::vector<int64_t> offsets;

    void pack(const real *x, int64_t x_step, int64_t rows, int64_t inputs) {
        lines.resize((inputs + LINE - 1) / LINE * LINE * rows);
        offsets.resize(inputs);
        for (int64_t k = 0; k < inputs; k++) offsets[k] = k / LINE * LINE * rows + k % LINE;
        for (int64_t k = 0; k < inputs; k += LINE)
            for (int64_t r = 0; r < rows; r++) {
                const real *from = x + r * x_step + k;
                real *to = &lines[k * rows + r * LINE];
                if (k + LINE <= inputs)
                    for (int64_t i = 0; i < LINE; i += LANES<real>) at(to + i) = at(from + i);
                else
                    std::copy_n(from, inputs - k, to);
            }
    }

    void add(const real *x, int64_t x_step, const real *output_gradients, int64_t gradient_step, int64_t rows,
             const WeightPanels<real> &panels, real *gradient, bool fresh = false) {
        constexpr int64_t lanes = LANES<real>;
        for (int64_t r = 0; r < rows; r += SOME) {
            const int64_t some = std::min(SOME, rows - r);
            pack(x + r * x_step, x_step, some, panels.inputs);
            for (int64_t v = 0; v < panels.vectors(); v += 2) {
                const int64_t vectors = std::min<int64_t>(2, panels.vectors() - v);
                const Rectangle<real> own =
                    packed.pack({output_gradients + r * gradient_step + v * lanes, 0, gradient_step}, 1, some, vectors);
                accumulate<real>({lines.data(), 0, LINE}, offsets.data(), panels.inputs, own, 1, some, vectors,
                                 gradient + panels.start(v / 2), Start<real>{fresh && !r});
            }
        }
    }
};

// Rows of `inputs` values at a distance, one result per row: y = x w.
inline WindowGroup rows_group(int64_t rows, int64_t inputs, int64_t from_step, int64_t to_step) {
    WindowGroup group;
    group.spans = {{0, inputs}};
    for (int64_t r = 0; r < rows; r++) group.from.push_back(r * from_step), group.to.push_back(r * to_step);
    return group;
}

}  // namespace
