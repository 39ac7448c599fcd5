// The training of one client's networks, all its steps one after another while its weights stay in the processor's cache; and
// their outputs.
//
// The arithmetic is that of execution/reference.py and learn/*.py, which the tests compare it with. A client is the work of one
// thread, so results depend neither on the number of threads nor on who else trains. What vectors run along is padded with
// zeros to whole ones, so that no loop has a remainder.

#include "compiled_dense.hpp"
#include "compiled_convolutions.hpp"

// What execution/compiled.py hands over, in the same order.
struct Batches {
    const int64_t *rows, *targets;  // steps x width: rows of the table, and classes
    const int64_t *sizes;           // how many of a step's samples count
    int64_t steps, width;

    int64_t largest() const { return steps ? *std::max_element(sizes, sizes + steps) : 0; }
};

struct Given {  // a tensor, its momentum and its anchor; null where there is none. All are written to.
    void *now, *speed, *anchor;
};

struct Role {
    int64_t depth;
    const Shape *shapes;   // of every layer
    const Given *tensors;  // the weight and the bias of every layer
    int64_t channels, height, width;  // of an input, for a network that begins with a convolution
    double labels, peer;
    double loss;  // the result
};

enum Way : int64_t { SGD, MOREAU, MUTUAL_MOREAU };  // the rules of learning/optimizers.py

struct Step {
    int64_t way, mutual;  // `mutual`: two roles learn from each other
    int64_t inner;        // gradients on one batch, for the two Moreau rules
    int64_t draws;        // how many numbers of dropout masks a step has
    double rate, momentum, decay, pull;
    double outer;  // the rate of the step after the inner ones
    double limit;  // of a gradient's norm
};

namespace {

// Planes, if it has convolutions, then dense layers.
template <typename real>
struct Network {
    std::vector<Plane<real>> planes;
    std::vector<Layer<real>> layers;
    Field image;          // what planes are given: a field whose channels are not padded
    Numbers<real> images;  // batch x field
    Numbers<real> below;   // batch x inputs of the first layer: slopes, on their way to the planes
    real labels, peer;    // how much the labels count in its loss, and the other network
    double loss = 0;      // the sum over all samples
    Numbers<real> p, log_p;  // batch x classes

    Network(const Role &role, int64_t batch) : labels(real(role.labels)), peer(real(role.peer)) {
        std::vector<int64_t> columns;
        for (int64_t i = 0; i < role.depth; i++) {
            const Shape &shape = role.shapes[i], *next = i + 1 < role.depth ? &shape + 1 : nullptr;
            if (shape.kind == LINEAR) {
                int64_t wide = padded<real>(shape.in);
                if (layers.empty() && !planes.empty())
                    columns = channels_first(planes.back().out), wide = planes.back().out.size();
                else
                    columns = in_rows(1, shape.in, wide).column;
                const Dropout dropout{shape.p, uint64_t(shape.seed)};
                Layer<real> &layer = layers.emplace_back(shape.out, wide, columns, shape.activation, dropout, batch);
                take(role.tensors + 2 * i, layer);
            } else {
                if (planes.empty()) {
                    image = {role.height, role.width, role.channels, role.channels, shape.above, shape.beside};
                    images.resize(batch * image.size());
                }
                const Field in = planes.empty() ? image : planes.back().out;
                Plane<real> &plane =
                    planes.emplace_back(shape, in, next && next->kind != LINEAR ? next : nullptr, planes.empty(), batch);
                if (planes.size() > 1) plane.connect(planes[planes.size() - 2].slope);
                if (shape.kind == CONVOLUTION) {
                    take(role.tensors + 2 * i, plane);
                    plane.weight.gradient.resize(plane.weight.now.size());
                    plane.bias.gradient.resize(plane.bias.now.size());
                }
            }
        }
        if (!planes.empty()) below.resize(batch * layers[0].wide);
        p.resize(batch * layers.back().out);
        log_p.resize(p.size());
    }

    // torch flattens channel by channel: where each of those numbers stands in a field.
    static std::vector<int64_t> channels_first(const Field &field) {
        std::vector<int64_t> found;
        for (int64_t i = 0; i < field.channels; i++)
            for (int64_t r = 0; r < field.rows; r++)
                for (int64_t c = 0; c < field.columns; c++) found.push_back(field.place(r, c) + i);
        return found;
    }

    template <typename Part>
    static Layout of_bias(const Part &part) {
        const int64_t count = part.layout.start.size();
        return in_rows(1, count, padded<real>(count));
    }

    template <typename Part>
    static void take(const Given *given, Part &part) {
        const auto taken = [](const Layout &layout, const Given &from) {
            return Weights<real>{layout.taken<real>(from.now), layout.taken<real>(from.speed), layout.taken<real>(from.anchor),
                                 {}};
        };
        part.weight = taken(part.layout, given[0]);
        part.bias = taken(of_bias(part), given[1]);
    }

    template <typename Part>
    static void give(const Given *given, const Part &part) {
        const auto give = [](const Layout &layout, const Weights<real> &weights, const Given &to) {
            layout.give(weights.now, to.now), layout.give(weights.speed, to.speed), layout.give(weights.anchor, to.anchor);
        };
        give(part.layout, part.weight, given[0]);
        give(of_bias(part), part.bias, given[1]);
    }

    void give(Role &role) const {
        for (size_t i = 0; i < planes.size(); i++)
            if (planes[i].shape.kind == CONVOLUTION) give(role.tensors + 2 * i, planes[i]);
        for (size_t i = 0; i < layers.size(); i++) give(role.tensors + 2 * (planes.size() + i), layers[i]);
    }

    std::vector<Weights<real> *> weights() {
        std::vector<Weights<real> *> found;
        for (auto &plane : planes) found.push_back(&plane.weight), found.push_back(&plane.bias);
        for (auto &layer : layers) found.push_back(&layer.weight), found.push_back(&layer.bias);
        return found;
    }

    const real *given(size_t plane, int64_t b, int64_t draw) const {
        return plane ? planes[plane - 1].handed(b, draw) : &images[b * image.size()];
    }

    // `draw` numbers the masks of dropout.
    void forward(const std::vector<const real *> &x, int64_t samples, int64_t draw) {
        std::copy_n(x.begin(), samples, layers[0].x.begin());
        for (int64_t b = 0; b < samples && !planes.empty(); b++) {
            const real *from = x[b];
            for (int64_t i = 0; i < image.channels; i++)
                for (int64_t r = 0; r < image.rows; r++)
                    for (int64_t c = 0; c < image.columns; c++) images[b * image.size() + image.place(r, c) + i] = *from++;
            for (size_t i = 0; i < planes.size(); i++) planes[i].forward(given(i, b, draw), b, draw);
            layers[0].x[b] = planes.back().handed(b, draw);
        }
        for (size_t i = 0; i < layers.size(); i++) {
            layers[i].forward(samples, draw);
            for (int64_t b = 0; b < samples && i + 1 < layers.size(); b++) layers[i + 1].x[b] = layers[i].handed(b, draw);
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

    // The slope of the mean loss by the logits: (labels + peer) p - peer q - labels y. The loss itself may count, or not.
    void differentiate(const Network *other, const int64_t *y, int64_t samples, bool counts) {
        Layer<real> &last = layers.back();
        const real share = real(1) / samples;
        for (int64_t b = 0; b < samples; b++) {
            const int64_t first = b * last.out;
            if (counts) loss -= labels * log_p[first + y[b]];
            for (int64_t c = 0; c < last.out; c++) {
                const int64_t i = first + c;
                real slope = labels * (p[i] - (c == y[b]));
                if (other) {
                    slope += peer * (p[i] - other->p[i]);
                    if (counts) loss += peer * other->p[i] * (other->log_p[i] - log_p[i]);
                }
                last.slopes[b * last.high + c] = slope * share;
            }
        }
    }

    void backward(int64_t samples, int64_t draw, const Rule<real> &rule) {
        for (size_t i = layers.size(); i-- > 0;) {
            if (i) layers[i].propagate(layers[i - 1].slopes.data(), samples), layers[i - 1].differentiate(samples);
            if (!i && !planes.empty()) layers[i].propagate(below.data(), samples);
            if (rule.clips()) {
                for (Weights<real> *each : {&layers[i].weight, &layers[i].bias}) each->gradient.resize(each->now.size());
                layers[i].template descend<KEEP>(samples, rule);
            } else if (rule.plain()) {
                layers[i].template descend<PLAIN>(samples, rule);
            } else {
                layers[i].template descend<RULE>(samples, rule);
            }
        }
        for (auto &plane : planes) plane.begin();
        for (int64_t b = 0; b < samples && !planes.empty(); b++) {
            Plane<real> &last = planes.back();
            for (int64_t r = 0; r < last.out.rows; r++)
                std::copy_n(&below[b * layers[0].wide + last.out.place(r, 0)], last.out.columns * last.out.deep,
                            &last.slopes[last.slope.place(r, 0)]);
            for (size_t i = planes.size(); i-- > 0;)
                planes[i].backward(given(i, b, draw), b, i ? planes[i - 1].slopes.data() : nullptr);
        }
        if (rule.clips()) clip(rule);
        for (Weights<real> *each : weights()) each->descend(rule);  // those whose gradients were kept
    }

    // The gradients of all weights together are shrunk to a norm, as `tree.clip` does it.
    void clip(const Rule<real> &rule) {
        double squares = 0;
        for (Weights<real> *each : weights())
            for (size_t i = 0; i < each->gradient.size(); i++) {
                if (rule.inside) each->gradient[i] += rule.inside * (each->now[i] - each->anchor[i]);
                squares += double(each->gradient[i]) * double(each->gradient[i]);
            }
        const double factor = rule.limit / (std::sqrt(squares) + 1e-6);
        if (factor >= 1) return;
        for (Weights<real> *each : weights())
            for (real &slope : each->gradient) slope *= real(factor);
    }
};

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
        : batches(batches), inputs(table, features, batches.largest()) {}

    bool next() {
        if (t == batches.steps) return false;
        samples = batches.sizes[t];
        x = &inputs.of(batches.rows + t * batches.width, samples);
        t++;
        return true;
    }

    // `draw` counts the gradients on one batch; the loss of the first is what counts.
    void descend(std::vector<Network<real>> &networks, const Step &step, int64_t draw, const Rule<real> &rule) {
        const int64_t *y = batches.targets + (t - 1) * batches.width, number = (t - 1) * step.draws + draw;
        for (auto &network : networks) {
            network.forward(*x, samples, number);
            network.softmax(samples);
        }
        for (size_t r = 0; r < networks.size(); r++)
            networks[r].differentiate(step.mutual ? &networks[1 - r] : nullptr, y, samples, draw == 0);
        for (auto &network : networks) network.backward(samples, number, rule);
    }
};

template <typename real>
void train(const real *table, int64_t features, const Batches &batches, Role *roles, int64_t count, const Step &step) {
    Rule<real> rule{real(step.rate), real(step.momentum), real(step.decay + step.pull), real(step.pull), real(step.limit)};
    if (rule.clips()) rule.decay = real(step.decay), rule.pull = 0, rule.inside = real(step.pull);
    const Rule<real> after{real(step.outer), 0, rule.decay, rule.pull};
    const real outer = real(step.outer);
    std::vector<Network<real>> networks;
    for (int64_t r = 0; r < count; r++) networks.emplace_back(roles[r], batches.largest());
    std::vector<Network<real>> copies = step.way == MUTUAL_MOREAU ? networks : std::vector<Network<real>>();
    Course<real> course(table, features, batches);
    while (course.next()) {
        if (step.way == SGD) course.descend(networks, step, 0, rule);
        if (step.way == MOREAU) {
            for (int64_t k = 0; k < step.inner; k++) course.descend(networks, step, k, rule);
            for (Weights<real> *theta : networks[0].weights())
                for (size_t i = 0; i < theta->now.size(); i++) theta->anchor[i] -= outer * (theta->anchor[i] - theta->now[i]);
        }
        if (step.way == MUTUAL_MOREAU) {
            const auto paired = [&](const auto &work) {
                for (int64_t r = 0; r < count; r++) {
                    const auto copy = copies[r].weights(), now = networks[r].weights();
                    for (size_t i = 0; i < now.size(); i++) work(*copy[i], *now[i]);
                }
            };
            paired([](Weights<real> &copy, Weights<real> &now) { copy.now = now.now; });
            for (int64_t k = 0; k < step.inner; k++) course.descend(copies, step, k, rule);
            paired([](Weights<real> &copy, Weights<real> &now) { now.anchor = copy.now; });
            course.descend(networks, step, step.inner, after);  // gradients at the pair as it was before the inner steps
        }
    }
    for (int64_t r = 0; r < count; r++) {
        roles[r].loss = networks[r].loss + (copies.empty() ? 0 : copies[r].loss);
        networks[r].give(roles[r]);
    }
}

template <typename real>
void predict(const real *table, int64_t features, const int64_t *rows, int64_t count, const Role &role, real *logits) {
    const int64_t batch = std::min<int64_t>(count, role.shapes[0].kind == LINEAR ? 100 : 20);
    Network<real> network(role, batch);
    const Layer<real> &last = network.layers.back();
    Inputs<real> inputs(table, features, batch);
    for (int64_t done = 0; done < count; done += batch) {
        const int64_t samples = std::min(batch, count - done);
        network.forward(inputs.of(rows + done, samples), samples, NO_DRAW);
        for (int64_t b = 0; b < samples; b++) std::copy_n(&last.outputs[b * last.high], last.out, logits + (done + b) * last.out);
    }
}

template <typename Work>
int finished(const Work &work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

}  // namespace

// Both return 0 if it went well, 1 if there was not enough memory. `bytes` are those of one number.
extern "C" int fedme_train(const void *table, int64_t features, int64_t bytes, const Batches *batches, Role *roles, int64_t count,
                               const Step *step) {
    return finished([&] {
        if (bytes == sizeof(float))
            train(static_cast<const float *>(table), features, *batches, roles, count, *step);
        else
            train(static_cast<const double *>(table), features, *batches, roles, count, *step);
    });
}

extern "C" int fedme_predict(const void *table, int64_t features, int64_t bytes, const int64_t *rows, int64_t count,
                                   const Role *role, void *logits) {
    return finished([&] {
        if (bytes == sizeof(float))
            predict(static_cast<const float *>(table), features, rows, count, *role, static_cast<float *>(logits));
        else
            predict(static_cast<const double *>(table), features, rows, count, *role, static_cast<double *>(logits));
    });
}

// Whether this processor has the instructions the code above is made of.
extern "C" int fedme_runs_here() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}
