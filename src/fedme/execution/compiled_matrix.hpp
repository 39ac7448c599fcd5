// Matrix products whose sums stay in registers, for convolutions, layers over sequences, attention and recurrent layers.
//
// The right factor stands in panels of two vectors of outputs: one such pair per input.

#pragma once

#include "compiled_vectors.hpp"

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

    // work(place, input, first output, count) for every input and panel: `count` outputs stand next to each other.
    template <typename Work>
    void for_each(const Work &work) const {
        for (int64_t v = 0, place = 0; v < vectors(); v += 2) {
            const int64_t first = v * LANES<real>, step = std::min<int64_t>(2, vectors() - v) * LANES<real>;
            const int64_t count = std::min(step, outputs - first);
            for (int64_t k = 0; k < inputs; k++, place += step) work(place, k, first, count);
        }
    }

    // From a matrix whose inputs and outputs are at these distances.
    void pack(const real *from, int64_t input_step, int64_t output_step, real *to) const {
        for_each([&](int64_t place, int64_t k, int64_t first, int64_t count) {
            const real *row = from + k * input_step + first * output_step;
            for (int64_t i = 0; i < count; i++) to[place + i] = row[i * output_step];
        });
    }

    void add_to(real *to, int64_t input_step, int64_t output_step, const real *from) const {
        for_each([&](int64_t place, int64_t k, int64_t first, int64_t count) {
            real *row = to + k * input_step + first * output_step;
            for (int64_t i = 0; i < count; i++) row[i * output_step] += from[place + i];
        });
    }

    // The same weights in the panels of the transposed matrix.
    void transpose(const WeightPanels &other, const real *from, real *to) const {
        for_each([&](int64_t place, int64_t k, int64_t first, int64_t count) {
            real *column = to + other.place(first, k);
            const int64_t step = other.width(k);
            for (int64_t i = 0; i < count; i++) column[i * step] = from[place + i];
        });
    }
};

// y[p] = start + the weighted sum over the window at x + from[p], for P positions and V vectors of outputs.
template <typename real, int P, int V>
__attribute__((noinline)) void correlate_block(const real *x, const int64_t *from, real *y, const int64_t *to, const real *w,
                                               const std::vector<Span> &spans, const real *start, Finish finish) {
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
        for (int v = 0; v < V; v++) {
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

// A feature map of outputs; the sums stay in registers.
template <typename real>
void correlate(const real *x, real *y, const real *w, const WeightPanels<real> &panels, const std::vector<WindowGroup> &groups,
               int64_t row, const real *start, Finish finish) {  // `row`: inputs in a row of a window
    for (int64_t v = 0; v < panels.vectors(); v += 2) {
        const int64_t first = v * LANES<real>, vectors = std::min<int64_t>(2, panels.vectors() - v);
        const real *own = start ? start + first : nullptr;
        for (const WindowGroup &group : groups) {
            const real *weights = w + panels.start(v / 2) + group.first * row * vectors * LANES<real>;
            if (vectors == 2)
                correlate_panel<real, 6, 2>(x, y + first, weights, group, own, finish);
            else
                correlate_panel<real, 8, 1>(x, y + first, weights, group, own, finish);
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

// Rows of `inputs` values at a distance, one result per row: y = x w.
inline WindowGroup rows_group(int64_t rows, int64_t inputs, int64_t from_step, int64_t to_step) {
    WindowGroup group;
    group.spans = {{0, inputs}};
    for (int64_t r = 0; r < rows; r++) group.from.push_back(r * from_step), group.to.push_back(r * to_step);
    return group;
}

}  // namespace
