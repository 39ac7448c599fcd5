// The parameters of a network, and their steps by SGD and Adam.

#pragma once

#include "compiled_vectors.hpp"

namespace {

// Where the values of a tensor stand: that of row r and column c at start[r] + stride[r] * column[c].
struct ParameterLayout {
    std::vector<int64_t> start, stride, column;
    int64_t size;
    bool transposed = false;  // the tensor has its columns one after another, not its rows

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
                bool square = together && count == lanes && !transposed;
                for (int64_t i = 1; square && i < lanes; i++) square = column[c + i] == column[c] + i;
                if (square)
                    block(start[r] + stride[r] * column[c], stride[r], r * columns + c);
                else
                    for (int64_t i = 0; i < some; i++)
                        for (int64_t j = 0; j < count; j++)
                            single(start[r + i] + stride[r + i] * column[c + j],
                                   transposed ? (c + j) * rows + r + i : (r + i) * columns + c + j);
            }
        }
    }

    template <typename real>
    void add_to(real *to, const AlignedVector<real> &values) const {
        const size_t rows = start.size(), columns = column.size();
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < columns; c++)
                to[transposed ? c * rows + r : r * columns + c] += values[start[r] + stride[r] * column[c]];
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
    bool has_no_state() const { return type == MOMENTUM && !momentum; }
    bool is_plain() const { return has_no_state() && !weight_decay && !prox; }
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

template <typename real>
struct PlainValues {
    const real *values;
    vector<real> some(int64_t place) const { return at(values + place); }
    real one(int64_t place) const { return values[place]; }
};

// The same of a mixture of two sets of values, of which the first has this part.
template <typename real>
struct Mixture {
    const real *own, *others;
    real part;
    vector<real> some(int64_t place) const { return at(others + place) + part * (at(own + place) - at(others + place)); }
    real one(int64_t place) const { return others[place] + part * (own[place] - others[place]); }
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
    const real *mixed_with = nullptr;  // the network is a mixture with these
    real own_part = 1;                 // in the mixture
    double derivative = 0;             // of the loss by the own part
    bool mixes_late = false;  // the node mixes; otherwise `value` is the mixture, and the own values are in the anchor

    bool exists() const { return index >= 0; }

    AlignedVector<real> &own() { return mixed_with && !mixes_late ? anchor : value; }

    void begin_mixture(const real *others, real part) {
        if (!mixes_late) {
            anchor.resize(value.size());
            mix(0, value.size(), others, part, anchor.data());
            std::swap(value, anchor);
        }
        mixed_with = others, own_part = part;
    }

    void mix(int64_t place, int64_t count, const real *others, real part, real *to) const {
        const Mixture<real> mixture{value.data() + place, others + place, part};
        for (int64_t i = 0; i < count; i += LANES<real>) at(to + i) = mixture.some(i);
    }

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
        derivative += double(sum_of<real>(sum + other));
    }

    double end_mixture() {
        if (!mixes_late) std::swap(value, anchor);
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

    // A state that was not given is zero, and is not stored.
    void begin_state(bool has_second) {
        if (!trained) return;
        if (momentum.empty()) momentum.assign(value.size(), real(0));
        if (has_second && second.empty()) second.assign(value.size(), real(0));
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
