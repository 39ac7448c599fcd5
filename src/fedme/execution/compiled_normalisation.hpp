// Normalisation by mean and variance, of channels over a batch or over a sample, and of rows; and softmax of rows.

#pragma once

#include "compiled_elementwise.hpp"

namespace {

// Batch, group and instance normalisation.
// numbers: positions, channels, groups (0: batch normalisation), whether ReLU follows, whether there are running statistics.
// reals: eps, momentum of the running statistics. parameters: weight, bias, running mean, running variance.
template <typename real>
struct ChannelNormalisation final : Node<real> {
    int64_t positions, channels, width, groups;  // `width`: channels with padding
    bool relu, runs;
    real eps, momentum;
    Parameter<real> weight, bias, running_mean, running_variance;
    AlignedVector<real> scale, shift;        // the weight and the bias, or 1 and 0
    AlignedVector<real> mean, deviation;     // units x width: the mean, and 1 / standard deviation
    AlignedVector<real> sums, products, a, b;  // width

    ChannelNormalisation(const NodeContext<real> &context, const Value<real> &)
        : positions(context.spec.numbers[0]), channels(context.spec.numbers[1]), width(padded<real>(channels)),
          groups(context.spec.numbers[2]), relu(context.spec.numbers[3]), runs(context.spec.numbers[4]),
          eps(real(context.spec.reals[0])), momentum(real(context.spec.reals[1])), scale(width), shift(width),
          mean((groups ? context.batch : 1) * width), deviation(mean.size()), sums(width), products(width), a(width), b(width) {
        context.load(weight, 0, channels), context.load(bias, 1, channels);
        context.load(running_mean, 2, channels), context.load(running_variance, 3, channels);
    }

    std::vector<Parameter<real> *> parameters() override { return {&weight, &bias, &running_mean, &running_variance}; }

    // Statistics of the batch: always, except in evaluation or for a single sample if there are running statistics.
    bool uses_batch(const Pass &pass) const { return groups || !runs || (pass.trains() && pass.samples > 1); }

    int64_t units(const Pass &pass) const { return groups ? pass.samples : 1; }
    int64_t unit_samples(const Pass &pass) const { return groups ? 1 : pass.samples; }

    // For every channel the sums of term(sample, place, channel) over the samples of a unit and all positions. Two vectors of
    // channels are taken together, as they stand in one line of the cache.
    template <int COUNT, typename Term>
    void sum_over(real *const (&results)[COUNT], int64_t unit, const Pass &pass, const Term &term) const {
        for (int64_t i = 0; i < width; i += 2 * LANES<real>)
            if (i + LANES<real> < width)
                sum_channels<2, COUNT>(results, unit, pass, i, term);
            else
                sum_channels<1, COUNT>(results, unit, pass, i, term);
    }

    template <int V, int COUNT, typename Term>
    void sum_channels(real *const (&results)[COUNT], int64_t unit, const Pass &pass, int64_t i, const Term &term) const {
        constexpr int64_t lanes = LANES<real>;
        constexpr int CHAINS = 4 / COUNT;  // sums that do not wait for each other
        vector<real> total[CHAINS][V][COUNT] = {};
        const int64_t first = groups ? unit : 0, last = first + unit_samples(pass);
        const auto add = [&](int64_t s, int64_t p, vector<real> (&sums)[V][COUNT]) {
            for (int v = 0; v < V; v++) {
                const Sums<COUNT> terms = term(s, p * width + i + v * lanes, i + v * lanes);
                for (int k = 0; k < COUNT; k++) sums[v][k] += terms.values[k];
            }
        };
        for (int64_t s = first; s < last; s++) {
            int64_t p = 0;
            for (; p + CHAINS <= positions; p += CHAINS)
                for (int chain = 0; chain < CHAINS; chain++) add(s, p + chain, total[chain]);
            for (; p < positions; p++) add(s, p, total[0]);
        }
        for (int v = 0; v < V; v++)
            for (int k = 0; k < COUNT; k++) {
                vector<real> sum = total[0][v][k];
                for (int chain = 1; chain < CHAINS; chain++) sum += total[chain][v][k];
                at(results[k] + i + v * lanes) = sum;
            }
    }

    template <int COUNT>
    struct Sums {
        vector<real> values[COUNT];
    };

    // Replace the sums of channels by those of their groups.
    void add_groups(AlignedVector<real> &values) const {
        if (!groups) return;
        const int64_t size = channels / groups;
        for (int64_t g = 0; g < groups; g++) {
            real sum = 0;
            for (int64_t c = g * size; c < (g + 1) * size; c++) sum += values[c];
            for (int64_t c = g * size; c < (g + 1) * size; c++) values[c] = sum;
        }
    }

    real count(const Pass &pass) const { return real(positions * unit_samples(pass) * (groups ? channels / groups : 1)); }

    void statistics(const Pass &pass, int64_t unit) {
        const Value<real> &x = this->in();
        real *own_mean = &mean[unit * width], *own_deviation = &deviation[unit * width];
        if (!uses_batch(pass)) {
            std::copy_n(running_mean.value.begin(), width, own_mean);
            for (int64_t c = 0; c < channels; c++) own_deviation[c] = 1 / std::sqrt(running_variance.value[c] + eps);
            return;
        }
        const real n = count(pass);
        sum_over<1>({sums.data()}, unit, pass,
                    [&](int64_t s, int64_t place, int64_t) { return Sums<1>{{at(x.of(s) + place)}}; });
        add_groups(sums);
        for (int64_t c = 0; c < channels; c++) own_mean[c] = sums[c] / n;
        sum_over<1>({products.data()}, unit, pass, [&](int64_t s, int64_t place, int64_t i) {
            const vector<real> centred = at(x.of(s) + place) - at(own_mean + i);
            return Sums<1>{{centred * centred}};
        });
        add_groups(products);
        for (int64_t c = 0; c < channels; c++) own_deviation[c] = 1 / std::sqrt(products[c] / n + eps);
        if (!runs || !pass.trains()) return;
        for (int64_t c = 0; c < channels; c++) {
            running_mean.value[c] += momentum * (own_mean[c] - running_mean.value[c]);
            running_variance.value[c] += momentum * (products[c] / (n - 1) - running_variance.value[c]);
        }
    }

    void forward(const Pass &pass) override {
        constexpr int64_t lanes = LANES<real>;
        for (int64_t c = 0; c < channels; c++) {
            scale[c] = weight.exists() ? weight.value[c] : real(1);
            shift[c] = bias.exists() ? bias.value[c] : real(0);
        }
        for (int64_t unit = 0; unit < units(pass); unit++) {
            statistics(pass, unit);
            const real *own_mean = &mean[unit * width], *own_deviation = &deviation[unit * width];
            for (int64_t i = 0; i < width; i += lanes) at(&a[i]) = at(&scale[i]) * at(own_deviation + i);
            const int64_t first = groups ? unit : 0;
            for (int64_t s = first; s < first + unit_samples(pass); s++) {
                const real *x = this->in().of(s);
                real *y = &this->output->data[s * this->output->size];
                for (int64_t p = 0; p < positions; p++, x += width, y += width)
                    for (int64_t i = 0; i < width; i += lanes) {
                        const vector<real> z = (at(x + i) - at(own_mean + i)) * at(&a[i]) + at(&shift[i]);
                        at(y + i) = relu ? rectified<real>(z) : z;
                    }
            }
        }
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        constexpr int64_t lanes = LANES<real>;
        Value<real> &input = *this->inputs[0], &output = *this->output;
        const vector<real> zero = {};
        weight.begin_gradient(), bias.begin_gradient();
        for (int64_t unit = 0; unit < units(pass); unit++) {
            const real *own_mean = &mean[unit * width], *own_deviation = &deviation[unit * width];
            sum_over<2>({sums.data(), products.data()}, unit, pass, [&](int64_t s, int64_t place, int64_t i) {
                vector<real> &gradient = at(output.gradient_of(s) + place);
                if (relu) gradient = at(output.of(s) + place) > zero ? gradient : zero;
                return Sums<2>{{gradient, gradient * (at(input.of(s) + place) - at(own_mean + i))}};
            });
            for (int64_t c = 0; c < channels; c++) {
                if (weight.exists()) weight.gradient[c] += products[c] * own_deviation[c];
                if (bias.exists()) bias.gradient[c] += sums[c];
                sums[c] *= scale[c], products[c] *= scale[c] * own_deviation[c];
            }
            if (!input.needs_gradient) continue;
            add_groups(sums), add_groups(products);
            // x' = deviation (scale g - mean(scale g) - (x - mean) deviation mean(scale g (x - mean) deviation))
            const real n = count(pass);
            const bool moves = uses_batch(pass);  // the statistics depend on the inputs
            for (int64_t i = 0; i < width; i += lanes) {
                at(&a[i]) = moves ? at(own_deviation + i) * at(&sums[i]) / n : zero;
                at(&b[i]) = moves ? at(own_deviation + i) * at(own_deviation + i) * at(&products[i]) / n : zero;
                at(&sums[i]) = at(&scale[i]) * at(own_deviation + i);
            }
            const int64_t first = groups ? unit : 0;
            for (int64_t s = first; s < first + unit_samples(pass); s++) {
                const real *x = input.of(s), *gradient = output.gradient_of(s);
                real *to = input.gradient_of(s);
                for (int64_t p = 0; p < positions; p++, x += width, gradient += width, to += width)
                    for (int64_t i = 0; i < width; i += lanes)
                        this->give(input, to + i,
                                   at(&sums[i]) * at(gradient + i) - at(&a[i]) - (at(x + i) - at(own_mean + i)) * at(&b[i]));
            }
        }
    }
};

// Layer normalisation: of every row by itself. numbers: rows, width of a row. reals: eps. parameters: weight, bias.
template <typename real>
struct RowNormalisation final : Node<real> {
    int64_t rows, width, padded_width;
    real eps;
    Parameter<real> weight, bias;
    AlignedVector<real> scale, shift, ones;  // `ones`: 0 where there is padding
    AlignedVector<real> mean, deviation;     // batch x rows

    RowNormalisation(const NodeContext<real> &context, const Value<real> &)
        : rows(context.spec.numbers[0]), width(context.spec.numbers[1]), padded_width(padded<real>(width)),
          eps(real(context.spec.reals[0])), scale(padded_width), shift(padded_width), ones(padded_width),
          mean(context.batch * rows), deviation(mean.size()) {
        context.load(weight, 0, width), context.load(bias, 1, width);
        std::fill_n(ones.begin(), width, real(1));
    }

    std::vector<Parameter<real> *> parameters() override { return {&weight, &bias}; }

    bool computes_by_sample() const override { return true; }
    bool gives_all() const override { return true; }
    bool needs_output() const override { return false; }

    template <typename Term>
    real sum_over(const Term &term) const {
        vector<real> total = {};
        for (int64_t i = 0; i < padded_width; i += LANES<real>) total += term(i);
        return sum_of<real>(total);
    }

    void forward(const Pass &pass) override {
        for (int64_t i = 0; i < width; i++) {
            scale[i] = weight.exists() ? weight.value[i] : real(1);
            shift[i] = bias.exists() ? bias.value[i] : real(0);
        }
        for (int64_t s = pass.first; s < pass.samples; s++)
            for (int64_t r = 0; r < rows; r++) {
                const real *x = this->in().of(s) + r * padded_width;
                real *y = this->output->result_of(s) + r * padded_width;
                const real own = mean[s * rows + r] = sum_over([&](int64_t i) { return at(x + i); }) / width;
                const real squares = sum_over([&](int64_t i) {
                    const vector<real> centred = (at(x + i) - own) * at(&ones[i]);
                    return centred * centred;
                });
                const real inverse = deviation[s * rows + r] = 1 / std::sqrt(squares / width + eps);
                for (int64_t i = 0; i < padded_width; i += LANES<real>)
                    at(y + i) = (at(x + i) - own) * inverse * at(&scale[i]) + at(&shift[i]);
            }
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        Value<real> &input = *this->inputs[0];
        if (!pass.first) weight.begin_gradient(), bias.begin_gradient();
        for (int64_t s = pass.first; s < pass.samples; s++)
            for (int64_t r = 0; r < rows; r++) {
                const real *x = input.of(s) + r * padded_width;
                const real *gradient = this->output->gradient_of(s) + r * padded_width;
                const real own = mean[s * rows + r], inverse = deviation[s * rows + r];
                for (int64_t i = 0; weight.exists() && i < padded_width; i += LANES<real>)
                    at(&weight.gradient[i]) += at(gradient + i) * (at(x + i) - own) * inverse;
                for (int64_t i = 0; bias.exists() && i < padded_width; i += LANES<real>)
                    at(&bias.gradient[i]) += at(gradient + i);
                if (!input.needs_gradient) continue;
                const real sum = sum_over([&](int64_t i) { return at(gradient + i) * at(&scale[i]); }) / width;
                const real product =
                    sum_over([&](int64_t i) { return at(gradient + i) * at(&scale[i]) * (at(x + i) - own); }) / width;
                real *to = input.gradient_of(s) + r * padded_width;
                for (int64_t i = 0; i < padded_width; i += LANES<real>)
                    this->give(input, to + i,
                               inverse * (at(gradient + i) * at(&scale[i]) - sum -
                                          (at(x + i) - own) * (inverse * inverse * product)));
                for (int64_t i = width; i < padded_width; i++) to[i] = 0;
            }
    }
};

// Softmax of every row, or its logarithm. numbers: rows, width of a row, whether it is the logarithm, rows of a causal matrix (0:
// it is not one), in which row r has r + 1 numbers.
template <typename real>
struct Softmax final : Node<real> {
    int64_t rows, width, padded_width;
    bool logarithm;
    int64_t causal;

    Softmax(const NodeContext<real> &context, const Value<real> &)
        : rows(context.spec.numbers[0]), width(context.spec.numbers[1]), padded_width(padded<real>(width)),
          logarithm(context.spec.numbers[2]), causal(context.spec.numbers[3]) {}

    bool computes_by_sample() const override { return true; }
    bool gives_all() const override { return true; }
    bool needs_inputs() const override { return false; }

    int64_t count(int64_t row) const { return causal ? std::min(width, row % causal + 1) : width; }

    static real largest(const real *x, int64_t count) {
        real top = x[0];
        int64_t i = 0;
        if (count >= LANES<real>) {
            vector<real> tops = at(x);
            for (i = LANES<real>; i + LANES<real> <= count; i += LANES<real>) tops = at(x + i) > tops ? at(x + i) : tops;
            for (int64_t k = 0; k < LANES<real>; k++) top = tops[k] > top ? tops[k] : top;
        }
        for (; i < count; i++) top = x[i] > top ? x[i] : top;
        return top;
    }

    void forward(const Pass &pass) override {
        for (int64_t s = pass.first; s < pass.samples; s++)
            for (int64_t r = 0; r < rows; r++) {
                const real *x = this->in().of(s) + r * padded_width;
                real *y = this->output->result_of(s) + r * padded_width;
                const int64_t n = count(r);  // numbers behind them are zero
                const real top = largest(x, n);
                for (int64_t i = 0; i < n; i += LANES<real>) at(y + i) = exp_of<real>(at(x + i) - top);
                std::fill(y + n, y + padded_width, real(0));
                vector<real> sums = {};
                for (int64_t i = 0; i < padded_width; i += LANES<real>) sums += at(y + i);
                const real sum = sum_of<real>(sums), scale = 1 / sum;
                if (!logarithm) {
                    for (int64_t i = 0; i < n; i += LANES<real>) at(y + i) *= scale;
                    continue;
                }
                const real log_sum = std::log(sum);
                for (int64_t i = 0; i < n; i += LANES<real>) at(y + i) = at(x + i) - top - log_sum;
                std::fill(y + n, y + padded_width, real(0));
            }
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        Value<real> &input = *this->inputs[0];
        if (!input.needs_gradient) return;
        for (int64_t s = pass.first; s < pass.samples; s++)
            for (int64_t r = 0; r < rows; r++) {
                const real *y = this->output->of(s) + r * padded_width;
                const real *gradient = this->output->gradient_of(s) + r * padded_width;
                const int64_t n = count(r);
                real *to = input.gradient_of(s) + r * padded_width;
                vector<real> sums = {};
                for (int64_t i = 0; i < padded_width; i += LANES<real>)  // behind the numbers of a row, y is zero
                    sums += logarithm ? at(gradient + i) : at(gradient + i) * at(y + i);
                const real sum = sum_of<real>(sums);
                for (int64_t i = 0; i < padded_width; i += LANES<real>) {
                    const vector<real> own = logarithm ? at(gradient + i) - exp_of<real>(at(y + i)) * sum
                                                       : at(y + i) * (at(gradient + i) - sum);
                    this->give(input, to + i, own);
                }
                if (logarithm) std::fill(to + n, to + padded_width, real(0));
            }
    }
};

}  // namespace
