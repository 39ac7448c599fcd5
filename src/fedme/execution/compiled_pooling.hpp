// The maximum or the mean of windows of a feature map.

#pragma once

#include "compiled_graph.hpp"

namespace {

// numbers: columns of the input, channels, rows and columns of the output, whether it is the mean. table: the first row and the
// end of the rows of every row of windows, the same for columns, and, for means, the divisor of every window.
template <typename real>
struct Pool final : Node<real> {
    typedef typename std::conditional<sizeof(real) == 4, int32_t, int64_t>::type index;
    typedef index indices __attribute__((vector_size(BYTES), aligned(sizeof(index)), may_alias));

    int64_t line, width, rows, columns;  // `width`: channels with padding; `line`: numbers in a row of the input
    bool mean;
    const int64_t *row_begin, *row_end, *column_begin, *column_end, *divisors;
    bool apart = true;  // every number of the input is in one window
    std::vector<index> argmax;  // batch x output: the tap of the largest value of a window

    Pool(const NodeContext<real> &context, const Value<real> &input) {
        const int64_t *n = context.spec.numbers;
        width = padded<real>(n[1]), line = n[0] * width, rows = n[2], columns = n[3], mean = n[4];
        row_begin = context.spec.table, row_end = row_begin + rows, column_begin = row_end + rows;
        column_end = column_begin + columns, divisors = column_end + columns;
        if (!mean) argmax.resize(context.batch * rows * columns * width);
        for (int64_t r = 0; r < rows; r++) apart &= row_begin[r] == (r ? row_end[r - 1] : 0);
        for (int64_t c = 0; c < columns; c++) apart &= column_begin[c] == (c ? column_end[c - 1] : 0);
        apart &= row_end[rows - 1] * line == input.size && column_end[columns - 1] * width == line;
    }

    template <typename Work>
    void for_each_window(const Work &work) const {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++) work(r, c, (r * columns + c) * width);
    }

    bool computes_by_sample() const override { return true; }
    bool needs_inputs() const override { return false; }
    bool needs_output() const override { return false; }

    void forward(const Pass &pass) override {
        for (int64_t s = pass.first; s < pass.samples; s++) {
            const real *x = this->in().of(s);
            real *y = this->output->result_of(s);
            for_each_window([&](int64_t r, int64_t c, int64_t place) {
                const int64_t r0 = row_begin[r], r1 = row_end[r], c0 = column_begin[c], c1 = column_end[c];
                for (int64_t i = 0; i < width; i += LANES<real>) {
                    const real *corner = x + r0 * line + c0 * width + i;
                    vector<real> result = {};
                    indices largest = {};
                    if (mean) {
                        for (int64_t wr = 0; wr < r1 - r0; wr++)
                            for (int64_t wc = 0; wc < c1 - c0; wc++) result += at(corner + wr * line + wc * width);
                        result /= real(divisors[r * columns + c]);
                    } else {
                        result = at(corner);
                        index tap = 0;
                        for (int64_t wr = 0; wr < r1 - r0; wr++)
                            for (int64_t wc = 0; wc < c1 - c0; wc++, tap++) {
                                const vector<real> other = at(corner + wr * line + wc * width);
                                const auto better = (other > result) | (other != other);  // NaN wins, as in torch
                                result = better ? other : result;
                                largest = better ? indices{} + tap : largest;
                            }
                        *reinterpret_cast<indices *>(&argmax[s * this->output->size + place + i]) = largest;
                    }
                    at(y + place + i) = result;
                }
            });
        }
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        Value<real> &input = *this->inputs[0];
        const vector<real> zero = {};
        if (!input.needs_gradient) return;
        const bool adds = input.sums || !apart;
        for (int64_t s = pass.first; s < pass.samples; s++) {
            real *to = input.gradient_of(s);
            if (adds && !input.sums) std::fill_n(to, input.size, real(0));
            const real *gradients = this->output->gradient_of(s);
            for_each_window([&](int64_t r, int64_t c, int64_t place) {
                const int64_t r0 = row_begin[r], r1 = row_end[r], c0 = column_begin[c], c1 = column_end[c];
                for (int64_t i = 0; i < width; i += LANES<real>) {
                    real *corner = to + r0 * line + c0 * width + i;
                    vector<real> gradient = at(gradients + place + i);
                    indices largest = {};
                    if (mean)
                        gradient /= real(divisors[r * columns + c]);
                    else
                        largest = *reinterpret_cast<const indices *>(&argmax[s * this->output->size + place + i]);
                    index tap = 0;
                    for (int64_t wr = 0; wr < r1 - r0; wr++)
                        for (int64_t wc = 0; wc < c1 - c0; wc++, tap++) {
                            vector<real> &place = at(corner + wr * line + wc * width);
                            const vector<real> own = mean ? gradient : largest == tap ? gradient : zero;
                            place = adds ? place + own : own;
                        }
                }
            });
        }
    }
};

}  // namespace
