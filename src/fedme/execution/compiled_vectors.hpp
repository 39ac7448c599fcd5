// What all compiled code is made of: vectors, activations, dropout, and weights with the rule that changes them.

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

constexpr int BYTES = 32;  // of a vector

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

inline float total(vector<float> sum) {
    typedef int32_t places __attribute__((vector_size(BYTES)));
    sum += __builtin_shuffle(sum, places{4, 5, 6, 7, 0, 1, 2, 3});
    sum += __builtin_shuffle(sum, places{2, 3, 0, 1, 6, 7, 4, 5});
    sum += __builtin_shuffle(sum, places{1, 0, 3, 2, 5, 4, 7, 6});
    return sum[0];
}

inline double total(vector<double> sum) {
    typedef int64_t places __attribute__((vector_size(BYTES)));
    sum += __builtin_shuffle(sum, places{2, 3, 0, 1});
    sum += __builtin_shuffle(sum, places{1, 0, 3, 2});
    return sum[0];
}

template <typename real>
int64_t padded(int64_t width) {
    return (width + LANES<real> - 1) / LANES<real> * LANES<real>;
}

// Numbers that begin where a line of the cache does: a vector across two lines takes two loads.
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
using Numbers = std::vector<real, Aligned<real>>;

enum Activation : int64_t { NONE, RELU, TANH, SIGMOID };  // the numbers that execution/compiled.py gives them

template <typename real>
real activated(int64_t kind, real z) {
    switch (kind) {
        case RELU: return z < 0 ? real(0) : z;  // what is not a number stays so
        case TANH: return std::tanh(z);
        case SIGMOID: return 1 / (1 + std::exp(-z));
        default: return z;
    }
}

template <typename real>
real slope_below(int64_t kind, real output, real slope) {
    switch (kind) {
        case RELU: return slope * (output > 0);
        case TANH: return slope * (1 - output * output);
        case SIGMOID: return slope * output * (1 - output);
        default: return slope;
    }
}

// Dropout as in core/dropout.py: masks are a hash of a seed and of the place of a number in its batch.
struct Dropout {
    double p = 0;
    uint64_t seed = 0;

    template <typename real>
    struct Mask {
        uint32_t low, high, least;
        real kept;

        // What the number at a place is multiplied by.
        real at(uint32_t place) const {
            uint32_t x = (place + 1) ^ low;
            x = (x ^ (x >> 16)) * 0x7FEB352Du;
            x = (x ^ (x >> 15) ^ high) * 0x846CA68Bu;
            return ((x ^ (x >> 16)) >> 8) >= least ? kept : real(0);
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

constexpr int64_t NO_DRAW = -1;  // outputs without dropout

// What a step does with a gradient g: v <- momentum v + g + decay w - pull anchor, w <- w - rate v.
template <typename real>
struct Rule {
    real rate, momentum, decay, pull;  // `decay` has the proximal pull in it
    real limit = std::numeric_limits<real>::infinity();  // of the norm of the gradient of a network
    real inside = 0;                                     // a pull that belongs to what is limited, then not to `decay`
    bool clips() const { return limit < std::numeric_limits<real>::infinity(); }
    bool plain() const { return !momentum && !decay; }
};

// One tensor of a network and what belongs to it; empty where the rule has no use for it.
template <typename real>
struct Weights {
    Numbers<real> now, speed, anchor;
    Numbers<real> gradient;  // where it is gathered before the step

    // The step that belongs to a gradient, for the vector at a place; the momentum is changed.
    vector<real> step(const Rule<real> &rule, int64_t place, vector<real> slope) {
        if (rule.decay) slope += rule.decay * at(&now[place]);
        if (rule.pull) slope -= rule.pull * at(&anchor[place]);
        if (rule.momentum) at(&speed[place]) = slope += rule.momentum * at(&speed[place]);
        return slope;
    }

    void descend(const Rule<real> &rule) {
        for (size_t i = 0; i < gradient.size(); i += LANES<real>)
            at(&now[i]) -= rule.rate * step(rule, i, at(&gradient[i]));
    }
};

// Where the numbers of a tensor stand: that of row r and column c at start[r] + stride[r] * column[c].
struct Layout {
    std::vector<int64_t> start, stride, column;
    int64_t size;

    template <typename real>
    Numbers<real> taken(const void *given) const {
        Numbers<real> numbers(given ? size : 0);
        const real *from = static_cast<const real *>(given);
        if (given)
            for (size_t r = 0; r < start.size(); r++)
                for (size_t c = 0; c < column.size(); c++) numbers[start[r] + stride[r] * column[c]] = *from++;
        return numbers;
    }

    template <typename real>
    void give(const Numbers<real> &numbers, void *place) const {
        real *to = static_cast<real *>(place);
        if (place)
            for (size_t r = 0; r < start.size(); r++)
                for (size_t c = 0; c < column.size(); c++) *to++ = numbers[start[r] + stride[r] * column[c]];
    }
};

// Rows one after another, each padded to a width.
inline Layout in_rows(int64_t rows, int64_t columns, int64_t wide) {
    Layout layout{std::vector<int64_t>(rows), std::vector<int64_t>(rows, 1), std::vector<int64_t>(columns), rows * wide};
    for (int64_t r = 0; r < rows; r++) layout.start[r] = r * wide;
    for (int64_t c = 0; c < columns; c++) layout.column[c] = c;
    return layout;
}

}  // namespace
