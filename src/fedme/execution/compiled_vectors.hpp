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
#include <map>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__) && defined(__clang__)  // until the end of compiled.cpp; after the headers above, which are not for it
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#endif

// Before loops over arrays of registers: unrolled late, they would leave these arrays in memory.
#ifdef __clang__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
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

inline void transpose(vector<float> (&rows)[8]) {  // exchange blocks off the diagonal, of 1, 2 and 4 columns
    for (int i = 0; i < 8; i += 2) {
        const vector<float> a = rows[i], b = rows[i + 1];
        rows[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
        rows[i + 1] = __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 6; i += i % 4 ? 3 : 1) {
        const vector<float> a = rows[i], b = rows[i + 2];
        rows[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
        rows[i + 2] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < 4; i++) {
        const vector<float> a = rows[i], b = rows[i + 4];
        rows[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
        rows[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

inline void transpose(vector<double> (&rows)[4]) {
    for (int i = 0; i < 4; i += 2) {
        const vector<double> a = rows[i], b = rows[i + 1];
        rows[i] = __builtin_shufflevector(a, b, 0, 4, 2, 6);
        rows[i + 1] = __builtin_shufflevector(a, b, 1, 5, 3, 7);
    }
    for (int i = 0; i < 2; i++) {
        const vector<double> a = rows[i], b = rows[i + 2];
        rows[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
        rows[i + 2] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    }
}

// A square as wide as a vector, from rows at a distance to columns at a distance. They may begin anywhere, as weights in the
// middle of a tensor do: Clang takes what `at` refers to for aligned.
template <typename real>
inline void copy_transposed(const real *from, int64_t from_step, real *to, int64_t to_step) {
    vector<real> rows[LANES<real>];
    for (int64_t i = 0; i < LANES<real>; i++) std::memcpy(&rows[i], from + i * from_step, BYTES);
    transpose(rows);
    for (int64_t i = 0; i < LANES<real>; i++) std::memcpy(to + i * to_step, &rows[i], BYTES);
}

template <typename real>
inline vector<real> rectified(vector<real> x) {
    const vector<real> zero = {};
    return x < zero ? zero : x;  // NaN stays NaN
}

template <typename real>
inline vector<real> root_of(vector<real> x) {
    for (int64_t i = 0; i < LANES<real>; i++) x[i] = std::sqrt(x[i]);
    return x;
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
        AlignedVector<real> values;
        load_to(values, tensor);
        return values;
    }

    template <typename real>
    void load_to(AlignedVector<real> &values, const void *tensor) const {
        values.assign(tensor ? size : 0, real(0));
        if (tensor)
            for_each_block<real>([&](int64_t place, int64_t step, int64_t index) {
                copy_transposed<real>(static_cast<const real *>(tensor) + index, column.size(), &values[place], step);
            }, [&](int64_t place, int64_t index) { values[place] = static_cast<const real *>(tensor)[index]; });
    }

    template <typename real>
    void store(const AlignedVector<real> &values, void *tensor) const {
        if (tensor)
            for_each_block<real>([&](int64_t place, int64_t step, int64_t index) {
                copy_transposed<real>(&values[place], step, static_cast<real *>(tensor) + index, column.size());
            }, [&](int64_t place, int64_t index) { static_cast<real *>(tensor)[index] = values[place]; });
    }

    // block(place, step, index) for squares whose columns stand side by side at `place`, one row after `step` numbers;
    // single(place, index) for all other numbers. `index` is the place in the tensor.
    template <typename real, typename Block, typename Single>
    void for_each_block(const Block &block, const Single &single) const {
        const int64_t rows = start.size(), columns = column.size(), lanes = LANES<real>;
        for (int64_t r = 0; r < rows; r += lanes) {
            const int64_t some = std::min(lanes, rows - r);
            bool together = some == lanes;
            for (int64_t i = 1; together && i < lanes; i++)
                together = start[r + i] == start[r] + i && stride[r + i] == stride[r];
            for (int64_t c = 0; c < columns; c += lanes) {
                const int64_t count = std::min(lanes, columns - c);
                bool square = together && count == lanes;
                for (int64_t i = 1; square && i < lanes; i++) square = column[c + i] == column[c] + i;
                if (square)
                    block(start[r] + stride[r] * column[c], stride[r], r * columns + c);
                else
                    for (int64_t i = 0; i < some; i++)
                        for (int64_t j = 0; j < count; j++)
                            single(start[r + i] + stride[r + i] * column[c + j], (r + i) * columns + c + j);
            }
        }
    }

    template <typename real>
    void add_to(real *to, const AlignedVector<real> &values) const {
        for (size_t r = 0; r < start.size(); r++)
            for (size_t c = 0; c < column.size(); c++) *to++ += values[start[r] + stride[r] * column[c]];
    }

    int64_t count() const { return int64_t(start.size() * column.size()); }
};

// Rows one after another, each padded.
inline ParameterLayout row_layout(int64_t rows, int64_t columns, int64_t padded_columns) {
    ParameterLayout layout{std::vector<int64_t>(rows), std::vector<int64_t>(rows, 1), std::vector<int64_t>(columns),
                           rows * padded_columns};
    for (int64_t r = 0; r < rows; r++) layout.start[r] = r * padded_columns;
    for (int64_t c = 0; c < columns; c++) layout.column[c] = c;
    return layout;
}

// Call a function with a constant that is true or false.
template <typename Function>
inline void choose(bool flag, const Function &function) {
    flag ? function(std::true_type()) : function(std::false_type());
}

enum RuleType : int64_t { MOMENTUM, ADAM };

// One step with a gradient g, as in learning/optimizers.py.
// MOMENTUM: v <- momentum v + g + weight_decay w - prox anchor, w <- w - lr v (Nesterov: w <- w - lr (g' + momentum v)).
// ADAM: m and s are the running means of the gradient and its square; w <- w - lr (m / correction1) / (sqrt(s / correction2) + eps),
// which is w - lr m / (root_factor sqrt(s) + scaled_eps).
template <typename real>
struct UpdateRule {
    real lr, momentum, weight_decay, prox;  // `weight_decay` includes the proximal term
    real clip = std::numeric_limits<real>::infinity();  // the largest norm of the gradient of a network
    real clipped_prox = 0;                              // a proximal term inside the clipping, then not in `weight_decay`
    bool nesterov = false;
    bool stores = false;  // gradients are stored, without a step
    bool measures = false;  // the derivative by the own part in a mixture is summed up
    RuleType type = MOMENTUM;
    real beta2 = 0, decoupled_decay = 0;  // of ADAM, whose beta1 is `momentum`
    real root_factor = 1, scaled_eps = 0;  // of ADAM: correction1 / sqrt(correction2), and correction1 eps
    bool clips() const { return clip < std::numeric_limits<real>::infinity(); }
    bool is_plain() const { return type == MOMENTUM && !momentum && !weight_decay && !prox; }
};

// Where a parameter is in memory; null where there is none, and all are written to.
struct ParameterSpec {
    void *value, *momentum, *second, *anchor;
    int64_t trained;  // 1; 0: a buffer; -1: a constant, which is not written to
};

// The same as execution/compiled_networks.py gives it: bytes after the bases of the network, or -1. Clients of one architecture share it.
struct ParameterPlaces {
    int64_t value, momentum, second, anchor, trained;
};

struct Bases {  // null if all places are addresses
    char *value, *momentum, *second, *anchor;

    static void *at(char *base, int64_t place) { return place < 0 ? nullptr : reinterpret_cast<void *>(intptr_t(base) + place); }
    ParameterSpec of(const ParameterPlaces &p) const {
        return {at(value, p.value), at(momentum, p.momentum), at(second, p.second), at(anchor, p.anchor), p.trained};
    }
};

// A parameter of a network with its optimizer state and anchor, which are empty if the rule does not use them.
template <typename real>
struct Parameter {
    ParameterLayout layout;
    int64_t index = -1;  // among the parameters of the network; -1: there is none
    int64_t first = 0;   // where the part of the tensor begins that is used
    bool shared = false; // several nodes use the tensor
    AlignedVector<real> value, momentum, second, anchor;
    AlignedVector<real> gradient;  // summed here before the step
    bool trained = false;
    const real *mixed_with = nullptr;  // the values are those of a mixture with these, and the own ones are in the anchor
    double derivative = 0;             // of the loss by the own part in the mixture

    bool exists() const { return index >= 0; }

    AlignedVector<real> &own() { return mixed_with ? anchor : value; }

    // Add to the derivative what these gradients of the mixture are in it, and take a plain step with them.
    void measure(int64_t place, int64_t count, const real *gradients, real lr = 0) {
        const real *w = mixed_with + place;
        real *own_values = &own()[place];
        vector<real> sum = {}, other = {};  // in turns: one addition need not wait for the last
        for (int64_t i = 0; i < count; i += LANES<real>) {
            const vector<real> v = at(own_values + i), gradient = at(gradients + i);
            std::swap(sum, other);
            sum += (v - at(w + i)) * gradient;
            at(own_values + i) = v - lr * gradient;
        }
        derivative += double(sum_of(sum + other));
    }

    double end_mixture() {
        std::swap(value, anchor);
        mixed_with = nullptr;
        return std::exchange(derivative, 0);
    }

    void *part(void *tensor) const { return tensor ? static_cast<real *>(tensor) + first : nullptr; }

    void load(int64_t number, int64_t start, const ParameterLayout &places, const ParameterSpec *specs) {
        if ((index = number) < 0) return;
        layout = places, first = start;
        reload(specs);
    }

    // The numbers of another network.
    void reload(const ParameterSpec *specs) {
        const ParameterSpec &spec = specs[index];
        layout.load_to(value, part(spec.value)), layout.load_to(momentum, part(spec.momentum));
        layout.load_to(second, part(spec.second)), layout.load_to(anchor, part(spec.anchor));
        trained = spec.trained > 0;
    }

    void store(const ParameterSpec *specs) const {
        if (index < 0 || specs[index].trained < 0) return;
        const ParameterSpec &spec = specs[index];
        layout.store(value, part(spec.value)), layout.store(momentum, part(spec.momentum));
        layout.store(second, part(spec.second)), layout.store(anchor, part(spec.anchor));
    }

    vector<real> adam_step(const UpdateRule<real> &rule, int64_t place, vector<real> gradient) {
        if (rule.weight_decay) gradient += rule.weight_decay * at(&value[place]);
        if (rule.prox) gradient -= rule.prox * at(&anchor[place]);
        const vector<real> mean = at(&momentum[place]) += (1 - rule.momentum) * (gradient - at(&momentum[place]));
        const vector<real> square = at(&second[place]) =
            rule.beta2 * at(&second[place]) + (1 - rule.beta2) * (gradient * gradient);
        vector<real> step = mean / (root_of<real>(square) * rule.root_factor + rule.scaled_eps);
        if (rule.decoupled_decay) step += rule.decoupled_decay * at(&value[place]);
        return step;
    }

    void begin_gradient() {
        gradient.resize(value.size());
        std::fill(gradient.begin(), gradient.end(), real(0));
    }

    // A step for `count` values from a place on, with these gradients.
    void descend(const UpdateRule<real> &rule, int64_t place, int64_t count, const real *gradients) {
        if (rule.measures) return measure(place, count, gradients, rule.lr);
        if (rule.type == ADAM) {
            for (int64_t i = 0; i < count; i += LANES<real>)
                at(&value[place + i]) -= rule.lr * adam_step(rule, place + i, at(gradients + i));
            return;
        }
        choose(rule.weight_decay != 0, [&](auto decays) {
            choose(rule.prox != 0, [&](auto has_anchor) {
                choose(rule.momentum != 0, [&](auto has_momentum) {
                    descend_by<decays.value, has_anchor.value, has_momentum.value>(rule, place, count, gradients);
                });
            });
        });
    }

    // With no question in the loop.
    template <bool DECAYS, bool HAS_ANCHOR, bool HAS_MOMENTUM>
    void descend_by(const UpdateRule<real> &rule, int64_t place, int64_t count, const real *gradients) {
        real *w = own().data() + place, *v = momentum.data() + place;
        const real *a = anchor.data() + place, lr = rule.lr, decay = rule.weight_decay, prox = rule.prox, part = rule.momentum;
        const bool nesterov = rule.nesterov;
        for (int64_t i = 0; i < count; i += LANES<real>) {
            vector<real> step = at(gradients + i);
            if (DECAYS) step += decay * at(w + i);
            if (HAS_ANCHOR) step -= prox * at(a + i);
            if (HAS_MOMENTUM) {
                const vector<real> velocity = at(v + i) = step + part * at(v + i);
                step = nesterov ? step + part * velocity : velocity;
            }
            at(w + i) -= lr * step;
        }
    }

    void update(const UpdateRule<real> &rule) {
        if (trained) descend(rule, 0, gradient.size(), gradient.data());
    }
};

}  // namespace
