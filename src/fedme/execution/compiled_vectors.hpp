// Vectors, activations, dropout, and parameters with their update rule.

#pragma once

#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC target("avx2,fma")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#if defined(__x86_64__) && defined(__clang__)  // until the end of compiled.cpp; after the headers above, which are not for it
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#endif

namespace {

constexpr int BYTES = 32;  // per vector

template <typename real>
struct Vector {
    typedef real type __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));
};

template <typename real>
using vector = typename Vector<real>::type;

template <typename real>
constexpr int64_t LANES = BYTES / sizeof(real);

template <typename real>
inline vector<real> &at(real *place) {
    return *reinterpret_cast<vector<real> *>(place);
}

template <typename real>
inline const vector<real> &at(const real *place) {
    return *reinterpret_cast<const vector<real> *>(place);
}

inline float sum_of(vector<float> sum) {
    sum += __builtin_shufflevector(sum, sum, 4, 5, 6, 7, 0, 1, 2, 3);
    sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5);
    sum += __builtin_shufflevector(sum, sum, 1, 0, 3, 2, 5, 4, 7, 6);
    return sum[0];
}

inline double sum_of(vector<double> sum) {
    sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1);
    sum += __builtin_shufflevector(sum, sum, 1, 0, 3, 2);
    return sum[0];
}

template <typename real>
inline vector<real> rectified(vector<real> x) {
    const vector<real> zero = {};
    return x < zero ? zero : x;  // NaN stays NaN
}

template <typename real>
int64_t padded(int64_t width) {
    return (width + LANES<real> - 1) / LANES<real> * LANES<real>;
}

// AlignedVector that begin where a line of the cache does: a vector across two lines takes two loads.
template <typename real>
struct Aligned {
    typedef real value_type;
    Aligned() = default;
    template <typename other>
    Aligned(const Aligned<other> &) {}
    real *allocate(size_t count) { return static_cast<real *>(::operator new(count * sizeof(real), std::align_val_t(64))); }
    void deallocate(real *place, size_t) { ::operator delete(place, std::align_val_t(64)); }
    friend bool operator==(const Aligned &, const Aligned &) { return true; }
    friend bool operator!=(const Aligned &, const Aligned &) { return false; }
};

template <typename real>
using AlignedVector = std::vector<real, Aligned<real>>;

// Dropout as in core/dropout.py: a mask is a hash of a seed and of the position in the batch.
struct Dropout {
    double p = 0;
    uint64_t seed = 0;

    template <typename real>
    struct Mask {
        uint32_t low, high, threshold;
        real scale;

        // The factor of the value at a place.
        real at(uint32_t place) const {
            uint32_t x = (place + 1) ^ low;
            x = (x ^ (x >> 16)) * 0x7FEB352Du;
            x = (x ^ (x >> 15) ^ high) * 0x846CA68Bu;
            return ((x ^ (x >> 16)) >> 8) >= threshold ? scale : real(0);
        }
    };

    static uint64_t at_draw(uint64_t seed, uint64_t draw) {
        uint64_t x = seed + draw * 0x9E3779B97F4A7C15u;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
        return x ^ (x >> 31);
    }

    // `call` counts the calls of the layer in one forward pass.
    template <typename real>
    Mask<real> mask(int64_t draw, int64_t call) const {
        uint64_t x = at_draw(seed, uint64_t(draw));
        if (call) x = at_draw(x, uint64_t(-call));
        return {uint32_t(x), uint32_t(x >> 32), uint32_t(std::ceil(float(p) * 0x1p24)), p < 1 ? real(1 / (1 - p)) : real(0)};
    }
};


// Where the values of a tensor stand: that of row r and column c at start[r] + stride[r] * column[c].
struct ParameterLayout {
    std::vector<int64_t> start, stride, column;
    int64_t size;

    template <typename real>
    AlignedVector<real> load(const void *tensor) const {
        AlignedVector<real> values(tensor ? size : 0);
        const real *from = static_cast<const real *>(tensor);
        if (tensor)
            for (size_t r = 0; r < start.size(); r++)
                for (size_t c = 0; c < column.size(); c++) values[start[r] + stride[r] * column[c]] = *from++;
        return values;
    }

    template <typename real>
    void store(const AlignedVector<real> &values, void *tensor) const {
        real *to = static_cast<real *>(tensor);
        if (tensor)
            for (size_t r = 0; r < start.size(); r++)
                for (size_t c = 0; c < column.size(); c++) *to++ = values[start[r] + stride[r] * column[c]];
    }
};

// Rows one after another, each padded.
inline ParameterLayout row_layout(int64_t rows, int64_t columns, int64_t padded_columns) {
    ParameterLayout layout{std::vector<int64_t>(rows), std::vector<int64_t>(rows, 1), std::vector<int64_t>(columns),
                           rows * padded_columns};
    for (int64_t r = 0; r < rows; r++) layout.start[r] = r * padded_columns;
    for (int64_t c = 0; c < columns; c++) layout.column[c] = c;
    return layout;
}

enum RuleType : int64_t { MOMENTUM, ADAM };

// One step with a gradient g, as in learning/optimizers.py.
// MOMENTUM: v <- momentum v + g + weight_decay w - prox anchor, w <- w - lr v (Nesterov: w <- w - lr (g' + momentum v)).
// ADAM: m and s are the running means of the gradient and its square; w <- w - lr (m / correction1) / (sqrt(s / correction2) + eps).
template <typename real>
struct UpdateRule {
    real lr, momentum, weight_decay, prox;  // `weight_decay` includes the proximal term
    real clip = std::numeric_limits<real>::infinity();  // the largest norm of the gradient of a network
    real clipped_prox = 0;                              // a proximal term inside the clipping, then not in `weight_decay`
    bool nesterov = false;
    RuleType type = MOMENTUM;
    real beta2 = 0, eps = 0, decoupled_decay = 0;  // of ADAM, whose beta1 is `momentum`
    real correction1 = 1, correction2 = 1;
    bool clips() const { return clip < std::numeric_limits<real>::infinity(); }
    bool is_plain() const { return type == MOMENTUM && !momentum && !weight_decay; }
};

struct ParameterSpec {  // as in execution/compiled.py; null where there is none, and all are written to
    void *value, *momentum, *second, *anchor;
    int64_t trained;
};

// A parameter of a network with its optimizer state and anchor, which are empty if the rule does not use them.
template <typename real>
struct Parameter {
    ParameterLayout layout;
    int64_t index = -1;  // among the parameters of the network; -1: there is none
    AlignedVector<real> value, momentum, second, anchor;
    AlignedVector<real> gradient;  // summed here before the step
    bool trained = false;

    bool exists() const { return index >= 0; }

    void load(int64_t number, const ParameterLayout &places, const ParameterSpec *specs) {
        if ((index = number) < 0) return;
        layout = places;
        const ParameterSpec &spec = specs[index];
        value = layout.load<real>(spec.value), momentum = layout.load<real>(spec.momentum);
        second = layout.load<real>(spec.second), anchor = layout.load<real>(spec.anchor);
        trained = spec.trained;
    }

    void store(const ParameterSpec *specs) const {
        if (index < 0) return;
        const ParameterSpec &spec = specs[index];
        layout.store(value, spec.value), layout.store(momentum, spec.momentum);
        layout.store(second, spec.second), layout.store(anchor, spec.anchor);
    }

    // The step for the gradient of the vector at a place; updates the optimizer state.
    vector<real> step(const UpdateRule<real> &rule, int64_t place, vector<real> gradient) {
        if (rule.weight_decay) gradient += rule.weight_decay * at(&value[place]);
        if (rule.prox) gradient -= rule.prox * at(&anchor[place]);
        if (rule.type == ADAM) return adam_step(rule, place, gradient);
        if (!rule.momentum) return gradient;
        const vector<real> velocity = at(&momentum[place]) = gradient + rule.momentum * at(&momentum[place]);
        return rule.nesterov ? gradient + rule.momentum * velocity : velocity;
    }

    __attribute__((noinline)) vector<real> adam_step(const UpdateRule<real> &rule, int64_t place, vector<real> gradient) {
        const vector<real> mean = at(&momentum[place]) += (1 - rule.momentum) * (gradient - at(&momentum[place]));
        const vector<real> square = at(&second[place]) =
            rule.beta2 * at(&second[place]) + (1 - rule.beta2) * (gradient * gradient);
        vector<real> root = square / rule.correction2;
        for (int64_t i = 0; i < LANES<real>; i++) root[i] = std::sqrt(root[i]);
        vector<real> step = (mean / rule.correction1) / (root + rule.eps);
        if (rule.decoupled_decay) step += rule.decoupled_decay * at(&value[place]);
        return step;
    }

    void begin_gradient() {
        gradient.resize(value.size());
        std::fill(gradient.begin(), gradient.end(), real(0));
    }

    void update(const UpdateRule<real> &rule) {
        for (size_t i = 0; trained && i < gradient.size(); i += LANES<real>)
            at(&value[i]) -= rule.lr * step(rule, i, at(&gradient[i]));
    }
};

}  // namespace
