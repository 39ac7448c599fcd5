// Vectors, activations, dropout, and parameters with their update rule.

#pragma once

#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

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
    typedef int32_t places __attribute__((vector_size(BYTES)));
    sum += __builtin_shuffle(sum, places{4, 5, 6, 7, 0, 1, 2, 3});
    sum += __builtin_shuffle(sum, places{2, 3, 0, 1, 6, 7, 4, 5});
    sum += __builtin_shuffle(sum, places{1, 0, 3, 2, 5, 4, 7, 6});
    return sum[0];
}

inline double sum_of(vector<double> sum) {
    typedef int64_t places __attribute__((vector_size(BYTES)));
    sum += __builtin_shuffle(sum, places{2, 3, 0, 1});
    sum += __builtin_shuffle(sum, places{1, 0, 3, 2});
    return sum[0];
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

enum Activation : int64_t { NONE, RELU, TANH, SIGMOID };  // as in execution/compiled.py

template <typename real>
real activate(int64_t activation, real z) {
    switch (activation) {
        case RELU: return z < 0 ? real(0) : z;  // NaN stays NaN
        case TANH: return std::tanh(z);
        case SIGMOID: return 1 / (1 + std::exp(-z));
        default: return z;
    }
}

template <typename real>
real activation_gradient(int64_t activation, real output, real gradient) {
    switch (activation) {
        case RELU: return gradient * (output > 0);
        case TANH: return gradient * (1 - output * output);
        case SIGMOID: return gradient * output * (1 - output);
        default: return gradient;
    }
}

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

    template <typename real>
    Mask<real> mask(int64_t draw) const {
        uint64_t x = seed + uint64_t(draw) * 0x9E3779B97F4A7C15u;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
        x ^= x >> 31;
        return {uint32_t(x), uint32_t(x >> 32), uint32_t(std::ceil(float(p) * 0x1p24)), p < 1 ? real(1 / (1 - p)) : real(0)};
    }
};

constexpr int64_t EVALUATION = -1;  // in place of the number of a dropout mask

// One step with a gradient g: v <- momentum v + g + weight_decay w - prox anchor, w <- w - lr v.
template <typename real>
struct UpdateRule {
    real lr, momentum, weight_decay, prox;  // `weight_decay` includes the proximal term
    real clip = std::numeric_limits<real>::infinity();  // the largest norm of the gradient of a network
    real clipped_prox = 0;                              // a proximal term inside the clipping, then not in `weight_decay`
    bool clips() const { return clip < std::numeric_limits<real>::infinity(); }
    bool is_plain() const { return !momentum && !weight_decay; }
};

// A parameter of a network with its momentum buffer and anchor, which are empty if the rule does not use them.
template <typename real>
struct Parameter {
    AlignedVector<real> value, momentum, anchor;
    AlignedVector<real> gradient;  // summed here before the step

    // The step for the gradient of the vector at a place; updates the momentum buffer.
    vector<real> step(const UpdateRule<real> &rule, int64_t place, vector<real> gradient) {
        if (rule.weight_decay) gradient += rule.weight_decay * at(&value[place]);
        if (rule.prox) gradient -= rule.prox * at(&anchor[place]);
        if (rule.momentum) at(&momentum[place]) = gradient += rule.momentum * at(&momentum[place]);
        return gradient;
    }

    void update(const UpdateRule<real> &rule) {
        for (size_t i = 0; i < gradient.size(); i += LANES<real>)
            at(&value[i]) -= rule.lr * step(rule, i, at(&gradient[i]));
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

}  // namespace
