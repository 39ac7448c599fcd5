// Convolutions with a window of 3 x 3 and no stride by Winograd's method, F(2 x 2, 3 x 3).
//
// A tile of 2 x 2 results is y = A' [sum over channels of (G w G') * (B' x B)] A, where x are the 4 x 4 inputs around it and * is by
// element: 16 products for each pair of channels instead of 36. The sums are 16 products of matrices, tiles x channels times
// channels x outputs; gradients take the same way back through the transposed maps. The numbers of these maps are 0, 1, -1 and
// 1/2, so that rounding errors stay those of the plain sums.

#pragma once

#include "compiled_graph.hpp"
#include "compiled_matrix.hpp"

namespace {

// Each map in one direction.
struct WeightsToTile {  // G
    static constexpr int IN = 3, OUT = 4;
    template <typename V>
    static void line(const V *x, V *y) {
        const V ends = x[0] + x[2];
        y[0] = x[0], y[1] = (ends + x[1]) / 2, y[2] = (ends - x[1]) / 2, y[3] = x[2];
    }
};

struct TileToWeights {  // G'
    static constexpr int IN = 4, OUT = 3;
    template <typename V>
    static void line(const V *x, V *y) {
        const V half = (x[1] + x[2]) / 2;
        y[0] = x[0] + half, y[1] = (x[1] - x[2]) / 2, y[2] = half + x[3];
    }
};

struct InputsToTile {  // B'
    static constexpr int IN = 4, OUT = 4;
    template <typename V>
    static void line(const V *x, V *y) {
        y[0] = x[0] - x[2], y[1] = x[1] + x[2], y[2] = x[2] - x[1], y[3] = x[1] - x[3];
    }
};

struct TileToInputs {  // B
    static constexpr int IN = 4, OUT = 4;
    template <typename V>
    static void line(const V *x, V *y) {
        y[0] = x[0], y[1] = x[1] - x[2] + x[3], y[2] = x[1] + x[2] - x[0], y[3] = -x[3];
    }
};

struct TileToOutputs {  // A'
    static constexpr int IN = 4, OUT = 2;
    template <typename V>
    static void line(const V *x, V *y) {
        y[0] = x[0] + x[1] + x[2], y[1] = x[1] - x[2] - x[3];
    }
};

struct OutputsToTile {  // A
    static constexpr int IN = 2, OUT = 4;
    template <typename V>
    static void line(const V *x, V *y) {
        y[0] = x[0], y[1] = x[0] + x[1], y[2] = x[0] - x[1], y[3] = -x[1];
    }
};

// A map in both directions, from load(row, column) to store(row, column, value).
template <typename Map, typename real, typename Load, typename Store>
inline __attribute__((always_inline)) void map_tile(const Load &load, const Store &store) {
    vector<real> middle[Map::OUT][Map::IN], line[4], mapped[4];
    UNROLLED for (int c = 0; c < Map::IN; c++) {
        UNROLLED for (int r = 0; r < Map::IN; r++) line[r] = load(r, c);
        Map::line(line, mapped);
        UNROLLED for (int r = 0; r < Map::OUT; r++) middle[r][c] = mapped[r];
    }
    UNROLLED for (int r = 0; r < Map::OUT; r++) {
        Map::line(middle[r], mapped);
        UNROLLED for (int c = 0; c < Map::OUT; c++) store(r, c, mapped[c]);
    }
}

// numbers of a convolution: as in `Windowed`.
template <typename real>
struct Winograd {
    static constexpr int64_t TILES = 48;  // at a time: what is made of them stays in the cache
    static constexpr int64_t LINE = 2 * LANES<real>, PLACES = 16;
    struct Map {
        int64_t rows, columns, width;  // `width`: channels with padding
    };
    // TILES x channels for each of the 16 places, in blocks of some channels, as products read and write them. There is a line more
    // per place, or the same tile of all places would compete for the same lines of the cache.
    struct Sheets {
        static constexpr int64_t STEP = (TILES + 1) * LINE, BLOCK = PLACES * STEP;
        AlignedVector<real> values;
        explicit Sheets(int64_t channels) : values((channels + LINE - 1) / LINE * BLOCK) {}
        real *of(int64_t place) { return &values[place * STEP]; }
        static int64_t place(int64_t tile, int64_t channel) { return channel / LINE * BLOCK + tile * LINE + channel % LINE; }
    };

    Map in, out;
    int64_t padding_rows, padding_columns, tile_columns, tiles;  // `tiles`: of a sample
    bool relu;
    WeightPanels<real> panels, transposed_panels;
    AlignedVector<real> weights, transposed, gradient;  // of the 16 places
    Sheets inputs, outputs;
    std::vector<int64_t> offsets;
    AlignedVector<real> zeros, nowhere;  // are read, and written to, instead of pixels outside of a map

    // Where the products that are saved are worth more than the maps.
    static bool is_worth(const int64_t *n) {
        const bool plain = n[7] == 3 && n[8] == 3 && n[11] == 1 && n[12] == 1 && n[13] == 1 && n[14] == 1 && n[16];
        const int64_t rows = n[1] + 2 * n[9] - 2, columns = n[2] + 2 * n[10] - 2, tiles = (rows + 1) / 2 * ((columns + 1) / 2);
        return plain && std::min(n[0], n[6]) >= 16 && 2 * 9 * rows * columns >= 3 * PLACES * tiles;
    }

    Winograd(const int64_t *n, bool needs_gradient)
        : in{n[1], n[2], padded<real>(n[0])}, out{n[1] + 2 * n[9] - 2, n[2] + 2 * n[10] - 2, padded<real>(n[6])},
          padding_rows(n[9]), padding_columns(n[10]), tile_columns((out.columns + 1) / 2),
          tiles((out.rows + 1) / 2 * tile_columns), relu(n[15]), panels{n[0], n[6]}, transposed_panels{n[6], n[0]},
          weights(PLACES * panels.size()), transposed(needs_gradient ? PLACES * transposed_panels.size() : 0),
          gradient(weights.size()), inputs(n[0]), outputs(n[6]), zeros(std::max(in.width, out.width)), nowhere(zeros.size()) {
        for (int64_t k = 0; k < n[0]; k++) offsets.push_back(Sheets::place(0, k));
    }

    // work(map of a vector of weights: channel, place of its first tap and the distance of taps, place among the panels).
    template <typename Work>
    void for_each_weight(const WeightPanels<real> &taps, const Work &work) const {
        for (int64_t o = 0; o < panels.outputs; o += LANES<real>)
            for (int64_t c = 0; c < panels.inputs; c++)
                work(taps.place(c, o), panels.inputs * taps.width(o), panels.place(c, o));
    }

    void load(const real *from, const WeightPanels<real> &taps) {
        const int64_t size = panels.size();
        for_each_weight(taps, [&](int64_t tap, int64_t step, int64_t place) {
            map_tile<WeightsToTile, real>([&](int r, int c) { return at(from + tap + (3 * r + c) * step); },
                                          [&](int r, int c, vector<real> value) { at(&weights[(4 * r + c) * size + place]) = value; });
        });
        for (int64_t i = 0; !transposed.empty() && i < PLACES; i++)
            panels.transpose_to(transposed_panels, PlainValues<real>{&weights[i * size]}, &transposed[i * transposed_panels.size()]);
    }

    void add_gradient(real *to, const WeightPanels<real> &taps) const {
        const int64_t size = panels.size();
        for_each_weight(taps, [&](int64_t tap, int64_t step, int64_t place) {
            map_tile<TileToWeights, real>([&](int r, int c) { return at(&gradient[(4 * r + c) * size + place]); },
                                          [&](int r, int c, vector<real> value) { at(to + tap + (3 * r + c) * step) += value; });
        });
    }

    // work(tile, pixels) for tiles of SIZE x SIZE pixels of the maps at of(sample).
    template <int SIZE, typename Place, typename Of, typename Work>
    void for_each_tile(int64_t first, int64_t count, const Map &map, int64_t rows_before, int64_t columns_before, Place *outside,
                       const Of &of, const Work &work) const {
        for (int64_t t = 0; t < count; t++) {
            const int64_t tile = (first + t) % tiles, top = tile / tile_columns * 2 - rows_before;
            const int64_t left = tile % tile_columns * 2 - columns_before;
            Place *begin = of((first + t) / tiles), *pixels[SIZE][SIZE];
            for (int64_t r = 0; r < SIZE; r++)
                for (int64_t c = 0; c < SIZE; c++) {
                    const bool inside = top + r >= 0 && top + r < map.rows && left + c >= 0 && left + c < map.columns;
                    pixels[r][c] = inside ? begin + ((top + r) * map.columns + left + c) * map.width : outside;
                }
            for (int64_t i = 0, width = map.width; i < width; i += LANES<real>) work(t, i, pixels);
        }
    }

    // Each of the 16 products of `count` tiles.
    void multiply(Sheets &from, const AlignedVector<real> &factors, const WeightPanels<real> &shape, Sheets &to, int64_t count) {
        std::vector<WindowGroup> rows = {rows_group(count, 0, LINE, LINE)};
        rows[0].spans.clear();
        for (int64_t k = 0; k < shape.inputs; k += LINE) rows[0].spans.push_back({Sheets::place(0, k), std::min(LINE, shape.inputs - k)});
        for (int64_t i = 0; i < PLACES; i++)
            correlate<real>(from.of(i), to.of(i), &factors[i * shape.size()], shape, rows, 1, nullptr, ASSIGN, Sheets::BLOCK);
    }

    void load_inputs(const Value<real> &input, int64_t first, int64_t count) {
        real *sheets = inputs.of(0);
        for_each_tile<4>(first, count, in, padding_rows, padding_columns, static_cast<const real *>(zeros.data()),
                         [&](int64_t s) { return input.of(s); }, [&](int64_t t, int64_t i, const real *const (&pixels)[4][4]) {
            real *to = sheets + Sheets::place(t, i);
            map_tile<InputsToTile, real>([&](int r, int c) { return at(pixels[r][c] + i); },
                                         [&](int r, int c, vector<real> value) { at(to + (4 * r + c) * Sheets::STEP) = value; });
        });
    }

    void forward(const Value<real> &input, Value<real> &output, const real *bias, int64_t samples) {
        for (int64_t first = 0; first < samples * tiles; first += TILES) {
            const int64_t count = std::min(TILES, samples * tiles - first);
            load_inputs(input, first, count);
            multiply(inputs, weights, panels, outputs, count);
            const real *results = outputs.of(0);
            for_each_tile<2>(first, count, out, 0, 0, nowhere.data(), [&](int64_t s) { return &output.data[s * output.size]; },
                             [&](int64_t t, int64_t i, real *const (&pixels)[2][2]) {
                const real *from = results + Sheets::place(t, i);
                const vector<real> start = bias ? at(bias + i) : vector<real>{};
                map_tile<TileToOutputs, real>([&](int r, int c) { return at(from + (4 * r + c) * Sheets::STEP); },
                                              [&](int r, int c, vector<real> value) {
                    at(pixels[r][c] + i) = relu ? rectified<real>(start + value) : start + value;
                });
            });
        }
    }

    // `gradient` becomes that of the weights of the 16 places; the other gradients are added to.
    void backward(Value<real> &input, Value<real> &output, AlignedVector<real> &bias_gradient, int64_t samples) {
        for (int64_t first = 0; first < samples * tiles; first += TILES) {
            const int64_t count = std::min(TILES, samples * tiles - first);
            load_inputs(input, first, count);
            load_output_gradients(output, first, count);
            for (int64_t v = 0; v < panels.vectors(); v += 2)
                for (int64_t i = 0; i < PLACES; i++)
                    accumulate<real>({inputs.of(i), 0, LINE}, offsets.data(), panels.inputs,
                                     {outputs.of(i) + v / 2 * Sheets::BLOCK, 0, LINE}, 1, count,
                                     std::min<int64_t>(2, panels.vectors() - v), &gradient[i * panels.size() + panels.start(v / 2)],
                                     Start<real>{!first});
            for (int64_t i = 0; i < int64_t(bias_gradient.size()); i += LANES<real>)  // one of the places has the sum of the tile
                for (int64_t t = 0; t < count; t++) at(&bias_gradient[i]) += at(outputs.of(5) + Sheets::place(t, i));
            if (!input.needs_gradient) continue;
            multiply(outputs, transposed, transposed_panels, inputs, count);
            const real *gradients = inputs.of(0);
            for (int64_t s = (first + tiles - 1) / tiles; s * tiles < first + count && !input.sums; s++)
                std::fill_n(input.gradient_of(s), input.size, real(0));
            for_each_tile<4>(first, count, in, padding_rows, padding_columns, nowhere.data(),
                             [&](int64_t s) { return input.gradient_of(s); },
                             [&](int64_t t, int64_t i, real *const (&pixels)[4][4]) {
                const real *from = gradients + Sheets::place(t, i);
                map_tile<TileToInputs, real>([&](int r, int c) { return at(from + (4 * r + c) * Sheets::STEP); },
                                             [&](int r, int c, vector<real> value) { at(pixels[r][c] + i) += value; });
            });
        }
    }

    void load_output_gradients(Value<real> &output, int64_t first, int64_t count) {
        real *sheets = outputs.of(0);
        for_each_tile<2>(first, count, out, 0, 0, static_cast<const real *>(zeros.data()),
                         [&](int64_t s) { return output.gradient_of(s); },
                         [&](int64_t t, int64_t i, const real *const (&pixels)[2][2]) {
            real *to = sheets + Sheets::place(t, i);
            map_tile<OutputsToTile, real>([&](int r, int c) { return at(pixels[r][c] + i); },
                                          [&](int r, int c, vector<real> value) { at(to + (4 * r + c) * Sheets::STEP) = value; });
        });
    }
};

}  // namespace
