// The training of one client's dense networks, all its steps one after another while its weights stay in the processor's
// cache; and their outputs.
//
// The arithmetic is that of engines/dense.py, engines/stacked.py and learn/*.py, which the tests compare it with.
// A client is the work of one thread, so results depend neither on the number of threads nor on who else trains. Inputs of
// layers are padded with zeros to whole vectors, so that no loop along them has a remainder.

#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
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

enum Activation : int64_t { NONE, RELU, TANH, SIGMOID };  // the numbers that engines/compiled.py gives them

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

// What a step does with a gradient g: v <- momentum v + g + decay w - pull anchor, w <- w - rate v.
template <typename real>
struct Rule {
    real rate, momentum, decay, pull;  // `decay` has the proximal pull in it
    bool plain() const { return !momentum && !decay; }
};

// One tensor of a network and what belongs to it; empty where the rule has no use for it.
template <typename real>
struct Weights {
    Numbers<real> now, speed, anchor;

    // The step that belongs to a gradient, for the vector at a place; the momentum is changed.
    vector<real> step(const Rule<real> &rule, int64_t place, vector<real> gradient) {
        if (rule.decay) gradient += rule.decay * at(&now[place]);
        if (rule.pull) gradient -= rule.pull * at(&anchor[place]);
        if (rule.momentum) at(&speed[place]) = gradient += rule.momentum * at(&speed[place]);
        return gradient;
    }
};

// outputs[b][o] = x[b] . w[o] for B samples and O outputs, whose sums stay in registers.
template <typename real, int B, int O>
__attribute__((noinline)) void dots(const real *const *x, const real *w, int64_t wide, real *outputs, int64_t high) {
    const vector<real> zero = {};
    const real *inputs[B];
    vector<real> sums[B][O];
    for (int b = 0; b < B; b++) {
        inputs[b] = x[b];
        for (int o = 0; o < O; o++) sums[b][o] = zero;
    }
    for (int64_t k = 0; k < wide; k += LANES<real>)
        for (int b = 0; b < B; b++)
            for (int o = 0; o < O; o++) sums[b][o] += at(inputs[b] + k) * at(w + o * wide + k);
    for (int b = 0; b < B; b++)
        for (int o = 0; o < O; o++) outputs[b * high + o] = total(sums[b][o]);
}

// One step of the weights of O outputs and K vectors of inputs; the gradient is the sum of slopes[b][o] * x[b]. A plain rule
// has its slopes multiplied by -rate already, so that the sums start from the weights.
template <typename real, bool PLAIN, int O, int K>
inline __attribute__((always_inline)) void descend_block(const real *const *x, const real *slopes, int64_t high, int64_t samples,
                                                         Weights<real> &weights, int64_t row, int64_t wide, int64_t first,
                                                         const Rule<real> &rule) {
    constexpr int64_t lanes = LANES<real>;
    const vector<real> zero = {};
    real *w = weights.now.data() + row * wide + first;
    vector<real> sums[O][K];
    for (int o = 0; o < O; o++)
        for (int k = 0; k < K; k++) sums[o][k] = PLAIN ? at(w + o * wide + k * lanes) : zero;
    for (int64_t b = 0; b < samples; b++)
        for (int o = 0; o < O; o++)
            for (int k = 0; k < K; k++) sums[o][k] += slopes[b * high + o] * at(x[b] + first + k * lanes);
    for (int o = 0; o < O; o++)
        for (int k = 0; k < K; k++) {
            const int64_t place = o * wide + k * lanes;
            if (PLAIN)
                at(w + place) = sums[o][k];
            else
                at(w + place) -= rule.rate * weights.step(rule, row * wide + first + place, sums[o][k]);
        }
}

template <typename real, bool PLAIN, int O>
__attribute__((noinline)) void descend_rows(const real *const *x, const real *slopes, int64_t high, int64_t samples,
                                            Weights<real> &weights, int64_t row, int64_t wide, const Rule<real> &rule) {
    constexpr int64_t lanes = LANES<real>;
    int64_t k = 0;
    for (; k + 3 * lanes <= wide; k += 3 * lanes)
        descend_block<real, PLAIN, O, 3>(x, slopes, high, samples, weights, row, wide, k, rule);
    for (; k < wide; k += lanes) descend_block<real, PLAIN, O, 1>(x, slopes, high, samples, weights, row, wide, k, rule);
}

template <typename real>
struct Layer {
    int64_t in, out, wide, high;  // inputs and outputs, and the same padded
    int64_t activation;
    Weights<real> weight, bias;  // out x wide, and high; there may be no bias
    Numbers<real> outputs;   // batch x high
    Numbers<real> slopes;    // batch x high: of the loss, by what the layer computes before its activation
    std::vector<const real *> x;  // its inputs: a pointer for each sample

    Layer(int64_t in, int64_t out, int64_t activation, int64_t batch)
        : in(in), out(out), wide(padded<real>(in)), high(padded<real>(out)), activation(activation), outputs(batch * high),
          slopes(batch * high), x(batch) {}

    template <int B>
    void forward_block(int64_t b) {
        constexpr int O = 12 / B;  // twelve sums and what they are made of are what the registers hold
        int64_t o = 0;
        for (; o + O <= out; o += O) dots<real, B, O>(&x[b], &weight.now[o * wide], wide, &outputs[b * high + o], high);
        for (; o + 2 <= out; o += 2) dots<real, B, 2>(&x[b], &weight.now[o * wide], wide, &outputs[b * high + o], high);
        for (; o < out; o++) dots<real, B, 1>(&x[b], &weight.now[o * wide], wide, &outputs[b * high + o], high);
    }

    void forward(int64_t samples) {
        int64_t b = 0;
        if (samples % 3 == 1 && samples > 3) forward_block<4>(b), b += 4;
        for (; b + 3 <= samples; b += 3) forward_block<3>(b);
        for (; b + 2 <= samples; b += 2) forward_block<2>(b);
        for (; b < samples; b++) forward_block<1>(b);
        for (b = 0; b < samples; b++)
            for (int64_t o = 0; o < out; o++) {
                real &z = outputs[b * high + o];
                z = activated(activation, bias.now.empty() ? z : z + bias.now[o]);
            }
    }

    template <bool PLAIN>
    void descend(int64_t samples, const Rule<real> &rule) {
        if (PLAIN)
            for (int64_t i = 0; i < samples * high; i++) slopes[i] *= -rule.rate;
        int64_t o = 0;
        for (; o + 4 <= out; o += 4) descend_rows<real, PLAIN, 4>(x.data(), &slopes[o], high, samples, weight, o, wide, rule);
        for (; o < out; o++) descend_rows<real, PLAIN, 1>(x.data(), &slopes[o], high, samples, weight, o, wide, rule);
        for (o = 0; o < int64_t(bias.now.size()); o += LANES<real>) {
            vector<real> gradient = at(&slopes[o]);
            for (int64_t b = 1; b < samples; b++) gradient += at(&slopes[b * high + o]);
            at(&bias.now[o]) += PLAIN ? gradient : -rule.rate * bias.step(rule, o, gradient);
        }
    }

    // The slope of the loss by the inputs of the layer: below[b] = sum of slopes[b][o] * w[o].
    template <int B>
    void propagate_block(real *below, int64_t b0) const {
        const vector<real> zero = {};
        for (int64_t k = 0; k < wide; k += LANES<real>) {
            vector<real> sums[B];
            for (int b = 0; b < B; b++) sums[b] = zero;
            for (int64_t o = 0; o < out; o++)
                for (int b = 0; b < B; b++) sums[b] += slopes[(b0 + b) * high + o] * at(&weight.now[o * wide + k]);
            for (int b = 0; b < B; b++) at(below + (b0 + b) * wide + k) = sums[b];
        }
    }

    void propagate(Layer &below, int64_t samples) const {
        int64_t b = 0;
        for (; b + 5 <= samples; b += 5) propagate_block<5>(below.slopes.data(), b);
        for (; b < samples; b++) propagate_block<1>(below.slopes.data(), b);
        for (b = 0; b < samples; b++)
            for (int64_t o = 0; o < below.out; o++) {
                const int64_t place = b * below.high + o;
                below.slopes[place] = slope_below(below.activation, below.outputs[place], below.slopes[place]);
            }
    }
};

template <typename real>
struct Network {
    std::vector<Layer<real>> layers;
    real labels, peer;  // how much the labels count in its loss, and the other network
    double loss = 0;    // the sum over all samples
    Numbers<real> p, log_p;  // batch x classes

    void forward(const std::vector<const real *> &x, int64_t samples) {
        std::copy_n(x.begin(), samples, layers[0].x.begin());
        for (size_t i = 0; i < layers.size(); i++) {
            layers[i].forward(samples);
            if (i + 1 < layers.size())
                for (int64_t b = 0; b < samples; b++) layers[i + 1].x[b] = &layers[i].outputs[b * layers[i].high];
        }
    }

    void softmax(int64_t samples) {
        const Layer<real> &last = layers.back();
        for (int64_t b = 0; b < samples; b++) {
            const real *z = &last.outputs[b * last.high];
            real *q = &p[b * last.out], *log_q = &log_p[b * last.out];
            const real top = *std::max_element(z, z + last.out);
            real sum = 0;
            for (int64_t c = 0; c < last.out; c++) sum += q[c] = std::exp(z[c] - top);
            const real whole = std::log(sum), share = 1 / sum;
            for (int64_t c = 0; c < last.out; c++) q[c] *= share, log_q[c] = z[c] - top - whole;
        }
    }

    // The slope of the mean loss by the logits: (labels + peer) p - peer q - labels y.
    void differentiate(const Network *other, const int64_t *y, int64_t samples) {
        Layer<real> &last = layers.back();
        const real share = real(1) / samples;
        for (int64_t b = 0; b < samples; b++) {
            const int64_t first = b * last.out;
            loss -= labels * log_p[first + y[b]];
            for (int64_t c = 0; c < last.out; c++) {
                const int64_t i = first + c;
                real slope = labels * (p[i] - (c == y[b]));
                if (other) {
                    slope += peer * (p[i] - other->p[i]);
                    loss += peer * other->p[i] * (other->log_p[i] - log_p[i]);
                }
                last.slopes[b * last.high + c] = slope * share;
            }
        }
    }

    void backward(int64_t samples, const Rule<real> &rule) {
        for (size_t i = layers.size(); i-- > 0;) {
            if (i) layers[i].propagate(layers[i - 1], samples);
            if (rule.plain())
                layers[i].template descend<true>(samples, rule);
            else
                layers[i].template descend<false>(samples, rule);
        }
    }
};

template <typename real>
Numbers<real> widened(const real *given, int64_t rows, int64_t from, int64_t to) {
    Numbers<real> wide(given ? rows * to : 0);
    for (int64_t row = 0; given && row < rows; row++) std::copy_n(given + row * from, from, &wide[row * to]);
    return wide;
}

template <typename real>
void narrowed(const Numbers<real> &wide, real *place, int64_t rows, int64_t from, int64_t to) {
    for (int64_t row = 0; place && row < rows; row++) std::copy_n(&wide[row * to], from, place + row * from);
}

}  // namespace

// What engines/compiled.py hands over, in the same order.
struct Batches {
    const int64_t *rows, *targets;  // steps x width: rows of the table, and classes
    const int64_t *sizes;           // how many of a step's samples count
    int64_t steps, width;
};

struct Given {  // a tensor, its momentum and its anchor; null where there is none. All are written to.
    void *now, *speed, *anchor;
};

struct Shape {
    int64_t in, out, activation;
};

struct Role {
    int64_t depth;
    const Shape *shapes;   // of every layer
    const Given *tensors;  // the weight and the bias of every layer
    double labels, peer;
    double loss;  // the result
};

enum Kind : int64_t { SGD, MOREAU, MUTUAL_MOREAU };  // the rules of learn/rules.py

struct Step {
    int64_t kind, mutual;  // `mutual`: two roles learn from each other
    int64_t inner;         // gradients on one batch, for the two Moreau rules
    double rate, momentum, decay, pull;
    double outer;  // the rate of the step after the inner ones
};

template <typename real>
static Network<real> network_of(const Role &role, int64_t batch) {
    Network<real> network;
    network.labels = real(role.labels), network.peer = real(role.peer);
    for (int64_t i = 0; i < role.depth; i++) {
        const Shape &shape = role.shapes[i];
        Layer<real> &layer = network.layers.emplace_back(shape.in, shape.out, shape.activation, batch);
        const auto taken = [](const Given &given, int64_t rows, int64_t from, int64_t to) {
            return Weights<real>{widened(static_cast<const real *>(given.now), rows, from, to),
                                 widened(static_cast<const real *>(given.speed), rows, from, to),
                                 widened(static_cast<const real *>(given.anchor), rows, from, to)};
        };
        layer.weight = taken(role.tensors[2 * i], layer.out, layer.in, layer.wide);
        layer.bias = taken(role.tensors[2 * i + 1], 1, layer.out, layer.high);
    }
    network.p.resize(batch * network.layers.back().out);
    network.log_p.resize(network.p.size());
    return network;
}

// Samples of the table by their row numbers, padded if they have to be.
template <typename real>
struct Inputs {
    const real *table;
    int64_t features, wide;
    Numbers<real> copied;
    std::vector<const real *> x;

    Inputs(const real *table, int64_t features, int64_t batch)
        : table(table), features(features), wide(padded<real>(features)), copied(wide == features ? 0 : batch * wide), x(batch) {}

    const std::vector<const real *> &of(const int64_t *rows, int64_t samples) {
        for (int64_t b = 0; b < samples; b++) {
            x[b] = table + rows[b] * features;
            if (!copied.empty()) {
                std::copy_n(x[b], features, &copied[b * wide]);
                x[b] = &copied[b * wide];
            }
        }
        return x;
    }
};

// The batches of one client, and one gradient of its networks after another.
template <typename real>
struct Course {
    const Batches &batches;
    Inputs<real> inputs;
    const std::vector<const real *> *x = nullptr;
    int64_t t = 0, samples = 0;

    Course(const real *table, int64_t features, const Batches &batches)
        : batches(batches), inputs(table, features, batches.width) {}

    bool next() {
        if (t == batches.steps) return false;
        samples = batches.sizes[t];
        x = &inputs.of(batches.rows + t * batches.width, samples);
        t++;
        return true;
    }

    void descend(std::vector<Network<real>> &networks, bool mutual, const Rule<real> &rule) {
        for (auto &network : networks) {
            network.forward(*x, samples);
            network.softmax(samples);
        }
        const int64_t *y = batches.targets + (t - 1) * batches.width;
        for (size_t r = 0; r < networks.size(); r++) networks[r].differentiate(mutual ? &networks[1 - r] : nullptr, y, samples);
        for (auto &network : networks) network.backward(samples, rule);
    }
};

// `work` with the corresponding tensors of two networks.
template <typename real, typename Work>
static void paired(Network<real> &a, Network<real> &b, const Work &work) {
    for (size_t i = 0; i < a.layers.size(); i++) {
        work(a.layers[i].weight, b.layers[i].weight);
        work(a.layers[i].bias, b.layers[i].bias);
    }
}

template <typename real>
static void train(const real *table, int64_t features, const Batches &batches, Role *roles, int64_t count, const Step &step) {
    const Rule<real> rule{real(step.rate), real(step.momentum), real(step.decay + step.pull), real(step.pull)};
    const Rule<real> after{real(step.outer), 0, rule.decay, rule.pull};
    const real outer = real(step.outer);
    std::vector<Network<real>> networks;
    for (int64_t r = 0; r < count; r++) networks.push_back(network_of<real>(roles[r], batches.width));
    std::vector<Network<real>> copies = step.kind == MUTUAL_MOREAU ? networks : std::vector<Network<real>>();
    Course<real> course(table, features, batches);
    while (course.next()) {
        if (step.kind == SGD) course.descend(networks, step.mutual, rule);
        if (step.kind == MOREAU) {
            double loss = 0;  // that of the first gradient on a batch counts
            for (int64_t k = 0; k < step.inner; k++) {
                course.descend(networks, step.mutual, rule);
                if (!k) loss = networks[0].loss;
            }
            networks[0].loss = loss;
            paired(networks[0], networks[0], [outer](Weights<real> &theta, Weights<real> &) {
                for (size_t i = 0; i < theta.now.size(); i++) theta.anchor[i] -= outer * (theta.anchor[i] - theta.now[i]);
            });
        }
        if (step.kind == MUTUAL_MOREAU) {
            for (int64_t r = 0; r < count; r++)
                paired(copies[r], networks[r], [](Weights<real> &copy, Weights<real> &now) { copy.now = now.now; });
            for (int64_t k = 0; k < step.inner; k++) course.descend(copies, true, rule);
            for (int64_t r = 0; r < count; r++)
                paired(copies[r], networks[r], [](Weights<real> &copy, Weights<real> &now) { now.anchor = copy.now; });
            course.descend(networks, true, after);  // gradients at the pair as it was before the inner steps
        }
    }
    for (int64_t r = 0; r < count; r++) {
        roles[r].loss = networks[r].loss;
        for (int64_t i = 0; i < roles[r].depth; i++) {
            const Layer<real> &layer = networks[r].layers[i];
            const auto given = [](const Given &place, const Weights<real> &weights, int64_t rows, int64_t from, int64_t to) {
                narrowed(weights.now, static_cast<real *>(place.now), rows, from, to);
                narrowed(weights.speed, static_cast<real *>(place.speed), rows, from, to);
                narrowed(weights.anchor, static_cast<real *>(place.anchor), rows, from, to);
            };
            given(roles[r].tensors[2 * i], layer.weight, layer.out, layer.in, layer.wide);
            given(roles[r].tensors[2 * i + 1], layer.bias, 1, layer.out, layer.high);
        }
    }
}

template <typename real>
static void predict(const real *table, int64_t features, const int64_t *rows, int64_t count, const Role &role, real *logits) {
    constexpr int64_t BATCH = 100;
    Network<real> network = network_of<real>(role, BATCH);
    const Layer<real> &last = network.layers.back();
    Inputs<real> inputs(table, features, BATCH);
    for (int64_t done = 0; done < count; done += BATCH) {
        const int64_t samples = std::min(BATCH, count - done);
        network.forward(inputs.of(rows + done, samples), samples);
        for (int64_t b = 0; b < samples; b++) std::copy_n(&last.outputs[b * last.high], last.out, logits + (done + b) * last.out);
    }
}

template <typename Work>
static int finished(const Work &work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// Both return 0 if it went well, 1 if there was not enough memory. `bytes` are those of one number.
extern "C" int fedme_dense_train(const void *table, int64_t features, int64_t bytes, const Batches *batches, Role *roles, int64_t count,
                               const Step *step) {
    return finished([&] {
        if (bytes == sizeof(float))
            train(static_cast<const float *>(table), features, *batches, roles, count, *step);
        else
            train(static_cast<const double *>(table), features, *batches, roles, count, *step);
    });
}

extern "C" int fedme_dense_predict(const void *table, int64_t features, int64_t bytes, const int64_t *rows, int64_t count,
                                   const Role *role, void *logits) {
    return finished([&] {
        if (bytes == sizeof(float))
            predict(static_cast<const float *>(table), features, rows, count, *role, static_cast<float *>(logits));
        else
            predict(static_cast<const double *>(table), features, rows, count, *role, static_cast<double *>(logits));
    });
}

// Whether this processor has the instructions the code above is made of.
extern "C" int fedme_dense_runs_here() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}
