// Convolutions with few outputs: vectors run along the columns of a map.
//
// Vectors along 6 channels would be more than half padding. Here the maps of channels stand one after another, as planes, and every
// product is that of one weight and some neighbouring positions.

#pragma once

#include "compiled_graph.hpp"
#include "compiled_maps.hpp"

namespace {

// The weights of `inputs` values of a window, in blocks of some outputs: one number of each output per input.
template <typename real>
struct PlaneWeights {
    static constexpr int64_t MOST = 6;  // outputs of a block
    int64_t inputs, outputs;

    int64_t blocks() const { return (outputs + MOST - 1) / MOST; }
    int64_t block() const { return (outputs + blocks() - 1) / blocks(); }
    int64_t count() const { return inputs * blocks() * block(); }
    int64_t size() const { return padded<real>(count()); }
    int64_t place(int64_t input, int64_t output) const {
        return output / block() * block() * inputs + input * block() + output % block();
    }
};

// The maps of some channels, one after another.
template <typename real>
struct Planes {
    FeatureMap map;  // of one channel: its rows are padded to full vectors
    int64_t columns, channels;

    Planes(int64_t rows, int64_t columns, Pair border, int64_t channels)
        : map{rows, padded<real>(columns), 1, 1, border.rows, border.columns}, columns(columns), channels(channels) {}

    int64_t size() const { return channels * map.size(); }

    // work(row, first column, columns, first channel) for squares of positions and channels, as wide as a vector.
    template <typename Work>
    void for_each_square(const Work &work) const {
        constexpr int64_t lanes = LANES<real>;
        for (int64_t r = 0; r < map.rows; r++)
            for (int64_t c = 0; c < columns; c += lanes)
                for (int64_t i = 0; i < channels; i += lanes) work(r, c, std::min(lanes, columns - c), i);
    }

    // From vectors of channels: vector_at(row, column, first channel).
    template <typename VectorAt>
    void load(real *to, const VectorAt &vector_at) const {
        for_each_square([&](int64_t r, int64_t c, int64_t count, int64_t channel) {
            const vector<real> zero = {};
            vector<real> square[LANES<real>];
            UNROLLED for (int64_t i = 0; i < LANES<real>; i++) square[i] = i < count ? vector_at(r, c + i, channel) : zero;
            transpose<real>(square);
            real *place = to + channel * map.size() + map.place(r, c);
            UNROLLED for (int64_t i = 0; i < LANES<real>; i++)
                if (i < channels - channel) put_unaligned(place + i * map.size(), square[i]);
        });
    }

    // To vectors of channels: work(row, column, first channel, vector).
    template <typename Work>
    void for_each_vector(const real *from, const Work &work) const {
        for_each_square([&](int64_t r, int64_t c, int64_t count, int64_t channel) {
            const vector<real> zero = {};
            vector<real> square[LANES<real>];
            const real *place = from + channel * map.size() + map.place(r, c);
            UNROLLED for (int64_t i = 0; i < LANES<real>; i++)
                square[i] = i < channels - channel ? unaligned(place + i * map.size()) : zero;
            transpose<real>(square);
            UNROLLED for (int64_t i = 0; i < LANES<real>; i++)
                if (i < count) work(r, c + i, channel, square[i]);
        });
    }
};

// y[o][to[v]] = start[o] + the sum over inputs of w[input][o] * x[from[v] + offsets[input]], for O outputs and V vectors of columns.
template <typename real, int O, int V>
__attribute__((noinline)) void correlate_columns(const real *x, const int64_t *from, real *y, const int64_t *to, int64_t plane,
                                                 const real *w, const int64_t *offsets, int64_t inputs, const real *start) {
    vector<real> sums[O][V];
    UNROLLED for (int o = 0; o < O; o++)
        UNROLLED for (int v = 0; v < V; v++) sums[o][v] = vector<real>{} + (start ? start[o] : real(0));
    const real *places[V];
    UNROLLED for (int v = 0; v < V; v++) places[v] = x + from[v];
    for (int64_t k = 0; k < inputs; k++, w += O) {
        vector<real> values[V];
        UNROLLED for (int v = 0; v < V; v++) values[v] = unaligned(places[v] + offsets[k]);
        UNROLLED for (int o = 0; o < O; o++)
            UNROLLED for (int v = 0; v < V; v++) sums[o][v] += w[o] * values[v];
    }
    UNROLLED for (int o = 0; o < O; o++)
        UNROLLED for (int v = 0; v < V; v++) at(y + o * plane + to[v]) = sums[o][v];
}

// sums[k][o] += x[offsets[k]] * gradients[o], by position, over all rows and columns, for O outputs and K inputs.
template <typename real, int O, int K>
__attribute__((noinline)) void accumulate_columns(const real *x, int64_t x_line, const int64_t *offsets, const real *gradients,
                                                  int64_t line, int64_t plane, int64_t rows, int64_t columns, real *results) {
    constexpr int64_t lanes = LANES<real>;
    vector<real> sums[K][O];
    UNROLLED for (int k = 0; k < K; k++)
        UNROLLED for (int o = 0; o < O; o++) sums[k][o] = at(results + (k * O + o) * lanes);
    for (int64_t r = 0; r < rows; r++, x += x_line, gradients += line)
        for (int64_t c = 0; c < columns; c += lanes) {
            vector<real> values[K];
            UNROLLED for (int k = 0; k < K; k++) values[k] = unaligned(x + offsets[k] + c);
            UNROLLED for (int o = 0; o < O; o++) {
                const vector<real> gradient = unaligned(gradients + o * plane + c);
                UNROLLED for (int k = 0; k < K; k++) sums[k][o] += values[k] * gradient;
            }
        }
    UNROLLED for (int k = 0; k < K; k++)
        UNROLLED for (int o = 0; o < O; o++) at(results + (k * O + o) * lanes) = sums[k][o];
}

// A convolution without stride of planes, and the gradient of its weights.
template <typename real>
struct PlaneConvolution {
    static constexpr int MOST = PlaneWeights<real>::MOST, WIDE = REGISTERS / 8;  // MOST x WIDE sums stay in registers
    PlaneWeights<real> weights;
    Planes<real> in, out;
    Pair window;
    std::vector<int64_t> offsets;  // of every input in a window
    std::vector<WindowGroup> windows;  // of the vectors of columns
    AlignedVector<real> results;
    AlignedVector<real> sums;  // for the gradient: a vector for every weight

    // Where the products that are saved are worth more than the maps from channels to planes and back.
    static bool is_worth(int64_t inputs, int64_t outputs, int64_t columns, int64_t moved_channels) {
        const PlaneWeights<real> weights{inputs, outputs};
        const int64_t computed = weights.blocks() * weights.block() * padded<real>(columns);
        return inputs * (padded<real>(outputs) * columns - computed) >= 8 * moved_channels * padded<real>(columns);
    }

    // `first`: where the first window begins in the planes with their border; `results`: rows and columns.
    PlaneConvolution(const Planes<real> &planes, int64_t outputs, Pair window, Pair dilation, Pair first, Pair size)
        : weights{window.rows * window.columns * planes.channels, outputs}, in(planes),
          out(size.rows, size.columns, {0, 0}, weights.blocks() * weights.block()), window(window), results(out.size()) {
        const FeatureMap &map = in.map;
        for (int64_t r = 0; r < window.rows; r++)
            for (int64_t c = 0; c < window.columns; c++)
                for (int64_t i = 0; i < in.channels; i++)
                    offsets.push_back(r * dilation.rows * map.line() + c * dilation.columns + i * map.size());
        windows = windows_of(map, first.rows, first.columns, {1, LANES<real>}, window, dilation,
                             {size.rows, out.map.columns / LANES<real>}, 0, {out.map.columns, LANES<real>});
    }

    // Numbers that some samples take: the last vectors of a row read beyond it.
    int64_t room(int64_t samples) const { return samples * in.size() + out.map.columns + offsets.back(); }

    // The results, as planes.
    const real *correlate(const real *x, const real *w, const real *start) {
        const int64_t row = window.columns * in.channels, plane = out.map.size();
        for (int64_t o = 0; o < out.channels; o += weights.block())
            for (const WindowGroup &group : windows) {
                const int64_t count = group.from.size(), blocks = (count + WIDE - 1) / WIDE, first = group.first * row;
                for (int64_t block = 0; block < blocks; block++) {
                    const int64_t v = count * block / blocks, next = count * (block + 1) / blocks;
                    with_constant<MOST>(weights.block(), [&](auto outputs) {
                        with_constant<WIDE>(next - v, [&](auto vectors) {
                            correlate_columns<real, outputs.value, vectors.value>(
                                x, &group.from[v], &results[o * plane], &group.to[v], plane, w + weights.place(first, o),
                                &offsets[first], (group.last - group.first) * row, start ? start + o : nullptr);
                        });
                    });
                }
            }
        return results.data();
    }

    void begin_gradient() { sums.assign(weights.count() * LANES<real>, real(0)); }

    // Of one sample. `gradients`: planes of at least as many channels.
    void accumulate(const real *x, const Planes<real> &planes, const real *gradients) {
        const int64_t blocks = (weights.inputs + WIDE - 1) / WIDE;
        for (int64_t o = 0; o < out.channels; o += weights.block())
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t k = weights.inputs * block / blocks, next = weights.inputs * (block + 1) / blocks;
                with_constant<MOST>(weights.block(), [&](auto outputs) {
                    with_constant<WIDE>(next - k, [&](auto inputs) {
                        accumulate_columns<real, outputs.value, inputs.value>(
                            x, in.map.line(), &offsets[k], gradients + o * planes.map.size() + planes.map.place(0, 0),
                            planes.map.line(), planes.map.size(), out.map.rows, out.map.columns,
                            &sums[weights.place(k, o) * LANES<real>]);
                    });
                });
            }
    }

    void add_gradient(real *to) const {
        for (int64_t i = 0; i < weights.count(); i++) to[i] += sum_of<real>(at(&sums[i * LANES<real>]));
    }
};

}  // namespace
