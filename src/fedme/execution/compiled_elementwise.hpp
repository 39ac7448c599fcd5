// Functions of single numbers, sums and products of values, dropout, and copies from place to place.

#pragma once

#include "compiled_graph.hpp"

namespace {

template <typename real>
struct Exponent;

template <>
struct Exponent<float> {
    typedef int32_t integer;
    static constexpr int TERMS = 8, MANTISSA = 23, BIAS = 127;
    static constexpr float LOW = -87, HIGH = 88, ROUND = 12582912;  // adding 1.5 * 2^23 rounds to an integer
    static constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
};

template <>
struct Exponent<double> {
    typedef int64_t integer;
    static constexpr int TERMS = 14, MANTISSA = 52, BIAS = 1023;
    static constexpr double LOW = -708, HIGH = 709, ROUND = 6755399441055744;
    static constexpr double LN2_HIGH = 6.93145751953125e-1, LN2_LOW = 1.42860682030941723212e-6;
};

// 1 / k! for every power k.
template <typename real, int COUNT>
struct ExponentialSeries {
    real terms[COUNT];
    constexpr ExponentialSeries() : terms{} {
        double factorial = 1;
        for (int k = 0; k < COUNT; factorial *= ++k) terms[k] = real(1 / factorial);
    }
};

template <typename real>
inline __attribute__((always_inline)) vector<real> exp_of(vector<real> x) {
    typedef Exponent<real> E;
    typedef typename E::integer integers __attribute__((vector_size(BYTES)));
    const vector<real> low = vector<real>{} + E::LOW, high = vector<real>{} + E::HIGH;
    x = x < low ? low : x > high ? high : x;  // NaN stays NaN
    const vector<real> shifted = x * real(1.4426950408889634074) + E::ROUND, n = shifted - E::ROUND;
    const vector<real> r = x - n * E::LN2_HIGH - n * E::LN2_LOW;
    constexpr ExponentialSeries<real, E::TERMS> series;
    vector<real> sum = vector<real>{} + series.terms[E::TERMS - 1];
    for (int k = E::TERMS - 2; k >= 0; k--) sum = series.terms[k] + r * sum;
    integers bits, base;
    const vector<real> round = vector<real>{} + E::ROUND;
    std::memcpy(&bits, &shifted, sizeof bits), std::memcpy(&base, &round, sizeof base);
    const integers power = (bits - base + E::BIAS) << E::MANTISSA;
    vector<real> scale;
    std::memcpy(&scale, &power, sizeof scale);
    return sum * scale;
}

template <typename real>
inline vector<real> sigmoid(vector<real> x) {
    return 1 / (1 + exp_of<real>(-x));
}

template <typename real>
inline vector<real> tanh_of(vector<real> x) {
    return 1 - 2 / (1 + exp_of<real>(x + x));
}

// The normal distribution at x: the share below it, and the density.
template <typename real>
struct Normal {
    vector<real> below, density;
};

inline Normal<double> normal(vector<double> x) {
    vector<double> below;
    for (int i = 0; i < LANES<double>; i++) below[i] = 0.5 + 0.5 * std::erf(x[i] * 0.70710678118654752440);
    return {below, 0.39894228040143267794 * exp_of<double>(-0.5 * x * x)};
}

// The error function as in Abramowitz and Stegun 7.1.26: the error is below 1.5e-7, that of a float near 1.
inline Normal<float> normal(vector<float> x) {
    const vector<float> zero = {}, size = x < zero ? -x : x, t = 1 / (1 + 0.3275911f * 0.70710678f * size);
    const vector<float> sum =
        t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const vector<float> exponential = exp_of<float>(-0.5f * x * x), tail = 0.5f * sum * exponential;
    return {x < zero ? tail : 1 - tail, 0.39894228f * exponential};
}

// A function of every number by itself, of the standard library.
template <typename real, real function(real)>
inline vector<real> each(vector<real> x) {
    for (int i = 0; i < LANES<real>; i++) x[i] = function(x[i]);
    return x;
}

template <typename real>
inline vector<real> log_of(vector<real> x) {
    return each<real, std::log>(x);
}

// As in execution/program.py. AFFINE is a x + b, LEAKY_RELU has the slope a. ELU: b x, or a (exp(c x) - 1). CLAMP: between a and
// b; there the slope is c. SOFTPLUS: log(1 + exp(a x)) / a, or x where a x > b. GREATER, AT_LEAST, EQUAL: 1 if x is that compared
// with a, else 0. CHOOSE: a, or b where x is 0.
enum Function : int64_t { AFFINE, RELU, TANH, SIGMOID, GELU, GELU_TANH, SILU, LEAKY_RELU, ELU, HARDSWISH, HARDSIGMOID, CLAMP, SOFTPLUS,
                          MISH, EXP, LOG, SQUARE_ROOT, ABSOLUTE, SQUARE, RECIPROCAL, SINE, COSINE, GREATER, AT_LEAST, EQUAL, CHOOSE,
                          FUNCTIONS };

// Whether the function of zero is something else.
inline bool moves_zero(int64_t function, double a, double b) {
    switch (function) {
        case AFFINE: return b != 0;
        case CLAMP: return a > 0 || b < 0;
        case GREATER: return a < 0;
        case AT_LEAST: return a <= 0;
        case EQUAL: return a == 0;
        case CHOOSE: return b != 0;
        case SIGMOID: case HARDSIGMOID: case SOFTPLUS: case EXP: case LOG: case RECIPROCAL: case COSINE: return true;
        default: return false;
    }
}

// log(1 + exp(x)); exp(-|x|) is at most 1.
template <typename real>
inline vector<real> softplus(vector<real> x) {
    const vector<real> zero = {};
    return rectified<real>(x) + each<real, std::log1p>(exp_of<real>(x < zero ? x : -x));
}

template <typename real>
inline vector<real> clamped(vector<real> x, real low, real high) {
    const vector<real> lowest = vector<real>{} + low, highest = vector<real>{} + high;
    return x < lowest ? lowest : x > highest ? highest : x;
}

template <typename real>
inline vector<real> gelu_argument(vector<real> x) {
    return real(0.79788456080286535588) * (x + real(0.044715) * x * x * x);
}

// work(constant) with the function as a constant: a loop inside is compiled for every function by itself.
template <int64_t FUNCTION = 0, typename Work>
inline void for_function(int64_t function, const Work &work) {
    if (function == FUNCTION)
        work(std::integral_constant<int64_t, FUNCTION>());
    else if constexpr (FUNCTION + 1 < FUNCTIONS)
        for_function<FUNCTION + 1>(function, work);
}

template <typename real>
inline vector<real> apply(int64_t function, vector<real> x, real a, real b, real c) {
    const vector<real> zero = {}, one = zero + real(1);
    switch (function) {
        case AFFINE: return a * x + b;
        case RELU: return rectified<real>(x);
        case TANH: return tanh_of<real>(x);
        case SIGMOID: return sigmoid<real>(x);
        case GELU: return x * normal(x).below;
        case GELU_TANH: return real(0.5) * x * (1 + tanh_of<real>(gelu_argument<real>(x)));
        case SILU: return x * sigmoid<real>(x);
        case LEAKY_RELU: return x > zero ? x : a * x;
        case ELU: return x > zero ? b * x : a * (exp_of<real>(c * x) - 1);
        case CLAMP: return clamped<real>(x, a, b);
        case SOFTPLUS: return a * x > zero + b ? x : softplus<real>(a * x) / a;
        case MISH: return x * tanh_of<real>(softplus<real>(x));
        case EXP: return exp_of<real>(x);
        case LOG: return log_of<real>(x);
        case SQUARE_ROOT: return root_of<real>(x);
        case ABSOLUTE: return x < zero ? -x : x;
        case SQUARE: return x * x;
        case RECIPROCAL: return 1 / x;
        case SINE: return each<real, std::sin>(x);
        case COSINE: return each<real, std::cos>(x);
        case GREATER: return x > zero + a ? one : zero;
        case AT_LEAST: return x >= zero + a ? one : zero;
        case EQUAL: return x == zero + a ? one : zero;
        case CHOOSE: return x != zero ? zero + a : zero + b;
        case HARDSWISH: return x * clamped<real>(x + 3, 0, 6) / 6;
        default: return clamped<real>(x + 3, 0, 6) / 6;
    }
}

// The derivative at x, where y is the result.
template <typename real>
inline vector<real> slope(int64_t function, vector<real> x, vector<real> y, real a, real b, real c) {
    const vector<real> zero = {}, one = zero + real(1);
    switch (function) {
        case AFFINE: return zero + a;
        case RELU: return y > zero ? one : zero;
        case TANH: return 1 - y * y;
        case SIGMOID: return y * (1 - y);
        case GELU: {
            const Normal<real> at_x = normal(x);
            return at_x.below + x * at_x.density;
        }
        case GELU_TANH: {
            const vector<real> t = tanh_of<real>(gelu_argument<real>(x));
            const vector<real> inner = real(0.79788456080286535588) * (1 + real(3 * 0.044715) * x * x);
            return real(0.5) * (1 + t) + real(0.5) * x * (1 - t * t) * inner;
        }
        case SILU: {
            const vector<real> s = sigmoid<real>(x);
            return s * (1 + x * (1 - s));
        }
        case LEAKY_RELU: return x > zero ? one : zero + a;
        case ELU: return x > zero ? zero + b : c * (y + a);
        case CLAMP: return ((x > zero + a) & (x < zero + b)) ? one : ((x < zero + a) | (x > zero + b)) ? zero : zero + c;
        case SOFTPLUS: return a * x > zero + b ? one : sigmoid<real>(a * x);
        case MISH: {
            const vector<real> t = tanh_of<real>(softplus<real>(x));
            return t + x * sigmoid<real>(x) * (1 - t * t);
        }
        case EXP: return y;
        case LOG: return 1 / x;
        case SQUARE_ROOT: return real(0.5) / y;
        case ABSOLUTE: return x < zero ? -one : x > zero ? one : zero;
        case SQUARE: return 2 * x;
        case RECIPROCAL: return -y * y;
        case SINE: return each<real, std::cos>(x);
        case COSINE: return -each<real, std::sin>(x);
        case GREATER: case AT_LEAST: case EQUAL: case CHOOSE: return zero;
        case HARDSWISH: return x < -3 * one ? zero : x > 3 * one ? one : x / 3 + real(0.5);
        default: return ((x > -3 * one) & (x < 3 * one)) ? zero + real(1.0f / 6) : zero;  // in single precision, as in torch
    }
}

// numbers: function, width of a row without and with padding. reals: a, b, c.
template <typename real>
struct Elementwise final : Node<real> {
    int64_t function, width, padded_width;
    real a, b, c;
    bool clears;  // the padding is computed with, and must become zero again

    Elementwise(const NodeContext<real> &context, const Value<real> &)
        : function(context.spec.numbers[0]), width(context.spec.numbers[1]), padded_width(context.spec.numbers[2]),
          a(real(context.spec.reals[0])), b(real(context.spec.reals[1])), c(real(context.spec.reals[2])),
          clears(width < padded_width && moves_zero(function, a, b)) {}

    bool computes_by_sample() const override { return true; }
    bool gives_all() const override { return true; }

    void clear_padding(real *rows) const {
        for (int64_t i = 0; i < this->output->size; i += padded_width) std::fill_n(rows + i + width, padded_width - width, real(0));
    }

    void forward(const Pass &pass) override {
        const int64_t size = this->output->size;
        for (int64_t s = pass.first; s < pass.samples; s++) {
            const real *x = this->in().of(s);
            real *y = this->output->result_of(s);
            for_function(function, [&](auto known) {
                for (int64_t i = 0; i < size; i += LANES<real>) at(y + i) = apply<real>(known, at(x + i), a, b, c);
            });
            if (clears) clear_padding(y);
        }
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        Value<real> &input = *this->inputs[0];
        if (!input.needs_gradient) return;
        for (int64_t s = pass.first; s < pass.samples; s++) {
            const real *x = input.of(s), *y = this->output->of(s), *gradient = this->output->gradient_of(s);
            real *to = input.gradient_of(s);
            for_function(function, [&](auto known) {
                for (int64_t i = 0; i < this->output->size; i += LANES<real>)
                    this->give(input, to + i, at(gradient + i) * slope<real>(known, at(x + i), at(y + i), a, b, c));
            });
            // Zero times infinity is not zero.
            if (width < padded_width && (function == LOG || function == SQUARE_ROOT || function == RECIPROCAL)) clear_padding(to);
        }
    }
};

enum Operation : int64_t { SUM, PRODUCT, SELECTION };  // SELECTION: the first number, or 0 where the second is 0

// numbers: operation, whether ReLU follows. reals: the factor of the second value in a sum.
template <typename real>
struct Binary final : Node<real> {
    int64_t operation;
    bool relu;
    real factor;

    Binary(const NodeContext<real> &context, const Value<real> &)
        : operation(context.spec.numbers[0]), relu(context.spec.numbers[1]), factor(real(context.spec.reals[0])) {}

    bool computes_by_sample() const override { return true; }
    bool gives_all() const override { return true; }
    bool needs_inputs() const override { return operation != SUM; }
    bool needs_output() const override { return relu; }

    void forward(const Pass &pass) override {
        const vector<real> zero = {};
        for (int64_t s = pass.first; s < pass.samples; s++) {
            const real *x = this->in(0).of(s), *z = this->in(1).of(s);
            real *y = this->output->result_of(s);
            for (int64_t i = 0; i < this->output->size; i += LANES<real>) {
                const vector<real> result = operation == SUM       ? at(x + i) + factor * at(z + i)
                                            : operation == PRODUCT ? at(x + i) * at(z + i)
                                                                   : (at(z + i) != zero ? at(x + i) : zero);
                at(y + i) = relu ? rectified<real>(result) : result;
            }
        }
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        const vector<real> zero = {};
        for (int64_t s = pass.first; s < pass.samples; s++) {
            const real *x = this->in(0).of(s), *z = this->in(1).of(s), *y = this->output->of(s);
            real *gradients = this->output->gradient_of(s);
            for (int64_t i = 0; relu && i < this->output->size; i += LANES<real>)
                at(gradients + i) = at(y + i) > zero ? at(gradients + i) : zero;
            for (int input = 0; input < 2; input++) {
                Value<real> &value = *this->inputs[input];
                if (!value.needs_gradient) continue;
                const real *other = input ? x : z;
                const real weight = input ? factor : real(1);
                real *to = value.gradient_of(s);
                for (int64_t i = 0; i < this->output->size; i += LANES<real>)
                    this->give(value, to + i,
                               operation == SUM       ? at(gradients + i) * weight
                               : operation == PRODUCT ? at(gradients + i) * at(other + i)
                               : input                ? zero
                                                      : (at(z + i) != zero ? at(gradients + i) : zero));
            }
        }
    }
};

// numbers: which call of its layer in a forward pass; numbers of a sample without padding, and of those that follow one another
// in the order of torch, which has the batch before them. reals: p. table: the number of every place in this order; -1: padding.
template <typename real>
struct DropoutNode final : Node<real> {
    Dropout dropout;
    int64_t call, elements, together;
    const int64_t *order;
    AlignedVector<real> mask;  // batch x size

    DropoutNode(const NodeContext<real> &context, const Value<real> &input)
        : dropout{context.spec.reals[0], uint64_t(context.seeds ? context.seeds[context.spec.seed] : 0)},
          call(context.spec.numbers[0]), elements(context.spec.numbers[1]), together(context.spec.numbers[2]), order(context.spec.table),
          mask(context.batch * input.size) {}

    void forward(const Pass &pass) override {
        const int64_t size = this->output->size;
        const auto drawn = dropout.mask<real>(pass.draw, call);
        for (int64_t s = 0; s < pass.samples; s++) {
            const real *x = this->in().of(s);
            real *y = &this->output->data[s * size], *own = &mask[s * size];
            if (!pass.trains()) {
                std::copy_n(x, size, y);
                continue;
            }
            if (together == elements) {
                for (int64_t i = 0; i < size; i++) own[i] = drawn.at(uint32_t(s * elements + order[i]));
            } else {
                for (int64_t i = 0; i < size; i++) {
                    const int64_t before = order[i] / together;  // of the batch dimension
                    own[i] = drawn.at(uint32_t((before * pass.samples + s) * together + order[i] % together));
                }
            }
            for (int64_t i = 0; i < size; i++) y[i] = x[i] * own[i];  // padding is zero
        }
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        Value<real> &input = *this->inputs[0];
        if (!input.needs_gradient) return;
        const real *gradients = this->output->gradient.data();
        for (int64_t i = 0; i < pass.samples * input.size; i += LANES<real>)
            this->give(input, &input.gradient[i], at(gradients + i) * at(&mask[i]));
    }
};

// Copies of numbers from place to place. table: the places they come from, then those they go to.
struct Runs {
    struct Run {
        int64_t from, to, count;
    };
    std::vector<Run> runs;

    explicit Runs(const NodeSpec &spec) {
        const int64_t count = spec.table_size / 2, *from = spec.table, *to = from + count;
        for (int64_t i = 0; i < count; i++) {
            const bool follows = i && from[i] == from[i - 1] + 1 && to[i] == to[i - 1] + 1;
            if (follows)
                runs.back().count++;
            else
                runs.push_back({from[i], to[i], 1});
        }
    }

    template <typename real>
    void copy(const real *from, real *to) const {
        for (const Run &run : runs) std::copy_n(from + run.from, run.count, to + run.to);
    }

    // The way back.
    template <typename real>
    void add(const real *from, real *to) const {
        for (const Run &run : runs)
            for (int64_t i = 0; i < run.count; i++) to[run.from + i] += from[run.to + i];
    }
};

// Copies numbers to other places of another value. table: as above.
template <typename real>
struct Gather final : Node<real> {
    Runs runs;

    Gather(const NodeContext<real> &context, const Value<real> &) : runs(context.spec) {}

    bool computes_by_sample() const override { return true; }
    bool needs_inputs() const override { return false; }
    bool needs_output() const override { return false; }

    void forward(const Pass &pass) override {
        for (int64_t s = pass.first; s < pass.samples; s++) runs.copy(this->in().of(s), this->output->result_of(s));
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        Value<real> &input = *this->inputs[0];
        if (!input.needs_gradient) return;
        for (int64_t s = pass.first; s < pass.samples; s++) {
            const real *from = this->output->gradient_of(s);
            real *to = input.gradient_of(s);
            if (input.sums)
                runs.add(from, to);
            else
                for (const Runs::Run &run : runs.runs) std::copy_n(from + run.to, run.count, to + run.from);
        }
    }
};

// Copies numbers of a parameter, the same for every sample. numbers: how many the parameter has. table: as above.
template <typename real>
struct Broadcast final : Node<real> {
    Parameter<real> parameter;
    Runs runs;

    Broadcast(const NodeContext<real> &context, const Value<real> &) : runs(context.spec) {
        context.load(parameter, 0, context.spec.numbers[0]);
    }

    std::vector<Parameter<real> *> parameters() override { return {&parameter}; }

    void forward(const Pass &pass) override {
        for (int64_t s = 0; s < pass.samples; s++) runs.copy(parameter.value.data(), this->output->result_of(s));
    }

    void backward(const Pass &pass, const UpdateRule<real> &) override {
        if (!parameter.trained) return;
        parameter.begin_gradient();
        for (int64_t s = 0; s < pass.samples; s++) runs.add(this->output->gradient_of(s), parameter.gradient.data());
    }
};

}  // namespace
