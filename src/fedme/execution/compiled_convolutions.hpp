// Convolutions and pooling, sample by sample.
//
// A sample is a field: rows x columns x channels, channels padded with zeros to whole vectors, with a border of zeros where the
// next convolution pads. Weights stand in panels of two vectors of outputs: for every tap and input one such pair.

#pragma once

#include <type_traits>

#include "compiled_vectors.hpp"

namespace {

struct Field {
    int64_t rows, columns, channels;
    int64_t deep;               // channels with their padding
    int64_t top = 0, left = 0;  // the border, on both sides

    int64_t line() const { return (columns + 2 * left) * deep; }
    int64_t size() const { return (rows + 2 * top) * line(); }
    int64_t place(int64_t r, int64_t c) const { return (r + top) * line() + (c + left) * deep; }
};

struct Run {  // numbers that stand side by side in a window
    int64_t first, count;
};

// Rows `first` to `last` of a window.
inline std::vector<Run> window(const Field &field, int64_t first, int64_t last, int64_t wide) {
    std::vector<Run> runs;
    const bool whole = field.deep == field.channels;
    for (int64_t r = first; r < last; r++) {
        if (whole) runs.push_back({r * field.line(), wide * field.deep});
        for (int64_t c = 0; c < wide && !whole; c++) runs.push_back({r * field.line() + c * field.deep, field.channels});
    }
    return runs;
}

// Positions whose windows have the same rows in the border, which need not be looked at.
struct Group {
    int64_t first, last;  // the rows of a window that are not
    std::vector<Run> runs;
    std::vector<int64_t> from, to;  // where the windows begin, and where the results belong
};

// The windows of a field, the first of which begins at (r0, c0), counted with the border, and their results in another field.
inline std::vector<Group> grouped(const Field &x, int64_t r0, int64_t c0, int64_t high, int64_t wide, const Field &y) {
    std::vector<Group> groups;
    for (int64_t r = 0; r < y.rows; r++) {
        const int64_t first = std::clamp<int64_t>(x.top - r0 - r, 0, high);
        const int64_t last = std::clamp<int64_t>(x.top + x.rows - r0 - r, first, high);
        if (groups.empty() || groups.back().first != first || groups.back().last != last)
            groups.push_back({first, last, window(x, first, last, wide), {}, {}});
        for (int64_t c = 0; c < y.columns; c++) {
            groups.back().from.push_back((r0 + r) * x.line() + (c0 + c) * x.deep);
            groups.back().to.push_back(y.place(r, c));
        }
    }
    return groups;
}

// Weights of `inputs` numbers of a window and `outputs` channels, and where each stands.
template <typename real>
struct Panels {
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

// y[p] = start + the sum over a window at x + from[p] of numbers times weights, for P positions and V vectors of outputs.
template <typename real, int P, int V>
__attribute__((noinline)) void correlate_block(const real *x, const int64_t *from, real *y, const int64_t *to, const real *w,
                                               const std::vector<Run> &runs, const real *start, bool relu) {
    constexpr int64_t lanes = LANES<real>;
    const vector<real> zero = {};
    vector<real> sums[P][V];
    for (int p = 0; p < P; p++)
        for (int v = 0; v < V; v++) sums[p][v] = start ? at(start + v * lanes) : zero;
    for (const Run &run : runs) {
        const real *inputs[P];
        for (int p = 0; p < P; p++) inputs[p] = x + from[p] + run.first;
        for (int64_t k = 0; k < run.count; k++, w += V * lanes)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < V; v++) sums[p][v] += inputs[p][k] * at(w + v * lanes);
    }
    for (int p = 0; p < P; p++)
        for (int v = 0; v < V; v++) at(y + to[p] + v * lanes) = relu ? (sums[p][v] < zero ? zero : sums[p][v]) : sums[p][v];
}

template <typename real, int P, int V>
inline void correlate_rest(int64_t count, const real *x, const int64_t *from, real *y, const int64_t *to, const real *w,
                           const std::vector<Run> &runs, const real *start, bool relu) {
    if constexpr (P > 0) {
        if (count == P)
            correlate_block<real, P, V>(x, from, y, to, w, runs, start, relu);
        else
            correlate_rest<real, P - 1, V>(count, x, from, y, to, w, runs, start, relu);
    }
}

template <typename real, int P, int V>
inline void correlate_panel(const real *x, real *y, const real *w, const Group &group, const real *start, bool relu) {
    const int64_t count = group.from.size(), *from = group.from.data(), *to = group.to.data();
    int64_t p = 0;
    for (; p + P <= count; p += P) correlate_block<real, P, V>(x, from + p, y, to + p, w, group.runs, start, relu);
    correlate_rest<real, P - 1, V>(count - p, x, from + p, y, to + p, w, group.runs, start, relu);
}

// A field of outputs: the sums stay in registers, as many as those hold.
template <typename real>
void correlate(const real *x, real *y, const real *w, const Panels<real> &panels, const std::vector<Group> &groups, int64_t row,
               const real *start, bool relu) {  // `row`: inputs in a row of a window
    for (int64_t v = 0; v < panels.vectors(); v += 2) {
        const int64_t first = v * LANES<real>, vectors = std::min<int64_t>(2, panels.vectors() - v);
        const real *own = start ? start + first : nullptr;
        for (const Group &group : groups) {
            const real *weights = w + panels.start(v / 2) + group.first * row * vectors * LANES<real>;
            if (vectors == 2)
                correlate_panel<real, 6, 2>(x, y + first, weights, group, own, relu);
            else
                correlate_panel<real, 8, 1>(x, y + first, weights, group, own, relu);
        }
    }
}

// A rectangle of two fields: where it begins, and how far one row and one position are from the next.
template <typename real>
struct Patch {
    const real *first;
    int64_t line, deep;
};

// gradient[k] += the sum over a rectangle of x[offsets[k]] * slopes, for K inputs and V vectors of outputs.
template <typename real, int K, int V>
__attribute__((noinline)) void gather_block(const Patch<real> &x, const int64_t *offsets, const Patch<real> &slopes, int64_t rows,
                                            int64_t columns, real *gradient) {
    constexpr int64_t lanes = LANES<real>;
    vector<real> sums[K][V];
    for (int k = 0; k < K; k++)
        for (int v = 0; v < V; v++) sums[k][v] = at(gradient + (k * V + v) * lanes);
    for (int64_t r = 0; r < rows; r++) {
        const real *inputs[K], *slope = slopes.first + r * slopes.line;
        for (int k = 0; k < K; k++) inputs[k] = x.first + r * x.line + offsets[k];
        const int64_t far = slopes.deep, deep = x.deep;
        for (int64_t c = 0, i = 0; c < columns; c++, i += deep, slope += far)
            for (int k = 0; k < K; k++)
                for (int v = 0; v < V; v++) sums[k][v] += inputs[k][i] * at(slope + v * lanes);
    }
    for (int k = 0; k < K; k++)
        for (int v = 0; v < V; v++) at(gradient + (k * V + v) * lanes) = sums[k][v];
}

template <typename real, int K, int V>
inline void gather_some(int64_t count, const Patch<real> &x, const int64_t *offsets, const Patch<real> &slopes, int64_t rows,
                        int64_t columns, real *gradient) {
    if constexpr (K > 0) {
        if (count == K)
            gather_block<real, K, V>(x, offsets, slopes, rows, columns, gradient);
        else
            gather_some<real, K - 1, V>(count, x, offsets, slopes, rows, columns, gradient);
    }
}

// All inputs of a panel, in blocks of nearly the same size.
template <typename real, int K, int V>
inline void gather_panel(const Patch<real> &x, const std::vector<int64_t> &offsets, const Patch<real> &slopes, int64_t rows,
                         int64_t columns, real *gradient) {
    const int64_t inputs = offsets.size(), blocks = (inputs + K - 1) / K;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t k = inputs * block / blocks, next = inputs * (block + 1) / blocks;
        gather_some<real, K, V>(next - k, x, &offsets[k], slopes, rows, columns, gradient + k * V * LANES<real>);
    }
}

enum Kind : int64_t { LINEAR, CONVOLUTION, POOL };  // the numbers that execution/compiled.py gives them

struct Shape {  // a layer, as execution/compiled.py describes it
    int64_t kind, in, out;
    int64_t rows, columns;  // of the window
    int64_t above, beside;  // rows and columns of zeros around a field
    int64_t activation;
    double p;  // of dropout
    int64_t seed;
};

// A convolution, or the largest number of each window; with its activation and dropout.
template <typename real>
struct Plane {
    typedef typename std::conditional<sizeof(real) == 4, int32_t, int64_t>::type whole;
    static constexpr int64_t POSITIONS = 256;  // whose slopes, one panel wide, stay in the nearest cache

    Shape shape;
    Field in, out;
    Field below, slope;  // fields of slopes, of one sample: by what it is given, and by what it computes
    Dropout dropout;
    bool lowest;         // nobody wants the slopes below it
    Panels<real> panels, turned_panels;
    std::vector<int64_t> offsets;  // of every input in a window
    std::vector<Group> windows, slope_windows;
    std::vector<int64_t> turns;  // where the weights stand that slopes go back through
    Layout layout;
    Weights<real> weight, bias;
    Numbers<real> turned;                 // weights, for slopes on their way back
    Numbers<real> outputs, mask, dropped;  // batch x field
    Numbers<real> slopes;                 // one field
    std::vector<whole> winners;           // batch x field: which number of a window was the largest

    // `next` is the layer after it, if that is another of these.
    Plane(const Shape &shape, const Field &in, const Shape *next, bool lowest, int64_t batch)
        : shape(shape), in(in), dropout{shape.p, uint64_t(shape.seed)}, lowest(lowest) {
        const bool pools = shape.kind == POOL;
        out = {pools ? in.rows / shape.rows : in.rows + 2 * in.top - shape.rows + 1,
               pools ? in.columns / shape.columns : in.columns + 2 * in.left - shape.columns + 1, shape.out,
               padded<real>(shape.out)};
        slope = out;
        if (next) out.top = next->above, out.left = next->beside;
        outputs.resize(batch * out.size());
        if (dropout.p) mask.resize(outputs.size()), dropped.resize(outputs.size());
        if (pools)
            winners.resize(outputs.size());
        else
            prepare();
        slopes.resize(slope.size());
    }

    void prepare() {
        const int64_t taps = shape.rows * shape.columns;
        if (!lowest) {
            slope.top = std::max<int64_t>(0, shape.rows - 1 - shape.above);
            slope.left = std::max<int64_t>(0, shape.columns - 1 - shape.beside);
        }
        panels = {taps * shape.in, shape.out};
        windows = grouped(in, 0, 0, shape.rows, shape.columns, out);
        for (const Run &run : window(in, 0, shape.rows, shape.columns))
            for (int64_t i = 0; i < run.count; i++) offsets.push_back(run.first + i);
        layout.size = panels.size();
        for (int64_t o = 0; o < shape.out; o++) {
            layout.start.push_back(panels.place(0, o));
            layout.stride.push_back(panels.width(o));
        }
        for (int64_t c = 0; c < shape.in; c++)
            for (int64_t tap = 0; tap < taps; tap++) layout.column.push_back(tap * shape.in + c);
    }

    // What slopes need to go back into the fields of the layer below.
    void connect(const Field &field) {
        below = field;
        if (shape.kind == POOL) return;
        const int64_t taps = shape.rows * shape.columns;
        turned_panels = {taps * shape.out, shape.in};
        turned.resize(turned_panels.size());
        const int64_t r0 = shape.above + slope.top - (shape.rows - 1), c0 = shape.beside + slope.left - (shape.columns - 1);
        slope_windows = grouped(slope, r0, c0, shape.rows, shape.columns, below);
        turns.assign(turned.size(), -1);
        for (int64_t tap = 0; tap < taps; tap++)
            for (int64_t c = 0; c < shape.in; c++)
                for (int64_t o = 0; o < shape.out; o++)
                    turns[turned_panels.place(tap * shape.out + o, c)] = panels.place((taps - 1 - tap) * shape.in + c, o);
    }

    // Before the slopes of a batch: fresh gradients, and the weights as they are now.
    void begin() {
        std::fill(weight.gradient.begin(), weight.gradient.end(), real(0));
        std::fill(bias.gradient.begin(), bias.gradient.end(), real(0));
        for (size_t i = 0; i < turns.size(); i++)
            if (turns[i] >= 0) turned[i] = weight.now[turns[i]];
    }

    void forward(const real *x, int64_t b, int64_t draw) {
        real *y = &outputs[b * out.size()];
        if (shape.kind == POOL)
            pool(x, b);
        else
            correlate<real>(x, y, weight.now.data(), panels, windows, shape.columns * shape.in,
                            bias.now.empty() ? nullptr : bias.now.data(), shape.activation == RELU);
        if (shape.activation != NONE && (shape.activation != RELU || shape.kind == POOL))
            for (int64_t r = 0; r < out.rows; r++)
                for (int64_t c = 0; c < out.columns; c++) {
                    real *z = y + out.place(r, c);
                    for (int64_t i = 0; i < out.channels; i++) z[i] = activated(shape.activation, z[i]);
                }
        if (!dropout.p || draw == NO_DRAW) return;
        const auto chance = dropout.mask<real>(draw);
        const int64_t area = out.rows * out.columns, first = b * out.channels * area;
        for (int64_t r = 0; r < out.rows; r++)
            for (int64_t c = 0; c < out.columns; c++) {
                const int64_t place = b * out.size() + out.place(r, c);
                const uint32_t own = uint32_t(first + r * out.columns + c);
                for (int64_t i = 0; i < out.channels; i++) mask[place + i] = chance.at(own + uint32_t(i) * uint32_t(area));
                for (int64_t i = 0; i < out.channels; i++) dropped[place + i] = outputs[place + i] * mask[place + i];
            }
    }

    const real *handed(int64_t b, int64_t draw) const {
        return &(!dropout.p || draw == NO_DRAW ? outputs : dropped)[b * out.size()];
    }

    void pool(const real *x, int64_t b) {
        constexpr int64_t lanes = LANES<real>;
        typedef whole numbers __attribute__((vector_size(BYTES), aligned(sizeof(whole)), may_alias));
        for (int64_t r = 0; r < out.rows; r++)
            for (int64_t c = 0; c < out.columns; c++) {
                const real *corner = x + in.place(r * shape.rows, c * shape.columns);
                const int64_t place = b * out.size() + out.place(r, c);
                for (int64_t i = 0; i < out.deep; i += lanes) {
                    vector<real> best = at(corner + i);
                    numbers winner = {};
                    for (int64_t tap = 1; tap < shape.rows * shape.columns; tap++) {
                        const int64_t r = tap / shape.columns, c = tap % shape.columns;
                        const vector<real> other = at(corner + r * in.line() + c * in.deep + i);
                        const auto better = (other > best) | (other != other);  // what is not a number wins, as in torch
                        best = better ? other : best;
                        winner = better ? numbers{} + whole(tap) : winner;
                    }
                    at(&outputs[place + i]) = best;
                    *reinterpret_cast<numbers *>(&winners[place + i]) = winner;
                }
            }
    }

    // `slopes` are by what the layer hands on; on to the gradient, and to the slopes of the layer below if there is one.
    void backward(const real *x, int64_t b, real *onward) {
        constexpr int64_t lanes = LANES<real>;
        for (int64_t r = 0; r < out.rows; r++)
            for (int64_t c = 0; c < out.columns; c++) {
                const int64_t place = b * out.size() + out.place(r, c);
                real *s = &slopes[slope.place(r, c)];
                for (int64_t i = 0; dropout.p && i < out.channels; i++) s[i] *= mask[place + i];
                if (shape.activation == RELU) {
                    const vector<real> zero = {};
                    for (int64_t i = 0; i < out.deep; i += lanes) at(s + i) = at(&outputs[place + i]) > zero ? at(s + i) : zero;
                } else if (shape.activation != NONE) {
                    for (int64_t i = 0; i < out.channels; i++) s[i] = slope_below(shape.activation, outputs[place + i], s[i]);
                }
            }
        if (shape.kind == POOL) return unpool(b, onward);
        gather(x);
        const int64_t row = shape.columns * shape.out;
        if (onward)
            correlate<real>(slopes.data(), onward, turned.data(), turned_panels, slope_windows, row, nullptr, false);
    }

    void gather(const real *x) {
        constexpr int64_t lanes = LANES<real>;
        const int64_t some = std::max<int64_t>(1, POSITIONS / out.columns);
        for (int64_t r = 0; r < out.rows; r += some) {
            const int64_t rows = std::min(some, out.rows - r);
            for (int64_t v = 0; v < panels.vectors(); v += 2) {
                const Patch<real> inputs{x + r * in.line(), in.line(), in.deep};
                const Patch<real> own{&slopes[slope.place(r, 0) + v * lanes], slope.line(), slope.deep};
                real *gradient = &weight.gradient[panels.start(v / 2)];
                if (v + 1 < panels.vectors())
                    gather_panel<real, 6, 2>(inputs, offsets, own, rows, out.columns, gradient);
                else
                    gather_panel<real, 8, 1>(inputs, offsets, own, rows, out.columns, gradient);
            }
        }
        for (int64_t i = 0; i < int64_t(bias.gradient.size()); i += lanes) {
            vector<real> sum = at(&bias.gradient[i]);
            for (int64_t r = 0; r < out.rows; r++)
                for (int64_t c = 0; c < out.columns; c++) sum += at(&slopes[slope.place(r, c) + i]);
            at(&bias.gradient[i]) = sum;
        }
    }

    void unpool(int64_t b, real *onward) const {
        constexpr int64_t lanes = LANES<real>;
        typedef whole numbers __attribute__((vector_size(BYTES), aligned(sizeof(whole)), may_alias));
        const vector<real> zero = {};
        for (int64_t r = 0; r < below.rows; r++) std::fill_n(onward + below.place(r, 0), below.columns * below.deep, real(0));
        for (int64_t r = 0; r < out.rows; r++)
            for (int64_t c = 0; c < out.columns; c++) {
                real *corner = onward + below.place(r * shape.rows, c * shape.columns);
                const real *s = &slopes[slope.place(r, c)];
                const whole *winner = &winners[b * out.size() + out.place(r, c)];
                for (int64_t tap = 0; tap < shape.rows * shape.columns; tap++) {
                    real *to = corner + tap / shape.columns * below.line() + tap % shape.columns * below.deep;
                    for (int64_t i = 0; i < out.deep; i += lanes) {
                        const auto won = *reinterpret_cast<const numbers *>(winner + i) == whole(tap);
                        at(to + i) = won ? at(s + i) : zero;
                    }
                }
            }
    }
};

}  // namespace
