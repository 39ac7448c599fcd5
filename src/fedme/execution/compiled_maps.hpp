// Feature maps, and the windows of a convolution in them.

#pragma once

#include "compiled_matrix.hpp"

namespace {

struct FeatureMap {
    int64_t rows, columns, channels;
    int64_t padded_channels;
    int64_t border_rows = 0, border_columns = 0;  // on both sides

    int64_t line() const { return (columns + 2 * border_columns) * padded_channels; }
    int64_t size() const { return (rows + 2 * border_rows) * line(); }
    int64_t place(int64_t r, int64_t c) const { return (r + border_rows) * line() + (c + border_columns) * padded_channels; }
};

struct Pair {
    int64_t rows, columns;
};

// Rows `first` to `last` of a window whose taps are `dilation` apart.
inline std::vector<Span> spans_of(const FeatureMap &x, int64_t first, int64_t last, int64_t columns, Pair dilation) {
    std::vector<Span> spans;
    const bool contiguous = x.padded_channels == x.channels && dilation.columns == 1;
    for (int64_t r = first; r < last; r++) {
        const int64_t line = r * dilation.rows * x.line();
        if (contiguous) spans.push_back({line, columns * x.channels});
        for (int64_t c = 0; c < columns && !contiguous; c++)
            spans.push_back({line + c * dilation.columns * x.padded_channels, x.channels});
    }
    return spans;
}

// The windows of a grid of results: the first begins at (r0, c0) of `x` with its border, the next are `step` apart. Result
// (r, c) belongs at y0 + r * y_step.rows + c * y_step.columns.
inline std::vector<WindowGroup> windows_of(const FeatureMap &x, int64_t r0, int64_t c0, Pair step, Pair window, Pair dilation,
                                           Pair count, int64_t y0, Pair y_step) {
    std::vector<WindowGroup> groups;
    for (int64_t r = 0; r < count.rows; r++) {
        int64_t first = 0, last = window.rows;
        const int64_t top = r0 + r * step.rows, d = dilation.rows;
        while (first < last && top + first * d < x.border_rows) first++;
        while (last > first && top + (last - 1) * d >= x.border_rows + x.rows) last--;
        if (groups.empty() || groups.back().first != first || groups.back().last != last)
            groups.push_back({first, last, spans_of(x, first, last, window.columns, dilation), {}, {}});
        for (int64_t c = 0; c < count.columns; c++) {
            groups.back().from.push_back(top * x.line() + (c0 + c * step.columns) * x.padded_channels);
            groups.back().to.push_back(y0 + r * y_step.rows + c * y_step.columns);
        }
    }
    return groups;
}

}  // namespace
