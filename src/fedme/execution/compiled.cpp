// Training and inference of the networks of one client; the weights stay in the processor's cache for all steps.
//
// The arithmetic is that of execution/reference.py and learning/, which the tests compare it with. One thread runs one client,
// so results depend neither on the number of threads nor on other clients. Dimensions that vectors run along are padded with
// zeros to full vectors, so that no loop has a remainder.

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "compiled_batches.hpp"
#include "compiled_convolutions.hpp"
#include "compiled_dense.hpp"
#include "compiled_elementwise.hpp"
#include "compiled_gru.hpp"
#include "compiled_normalisation.hpp"
#include "compiled_pooling.hpp"
#include "compiled_sequences.hpp"
#include "compiled_threads.hpp"

// These structures are those of execution/compiled_calls.py and compiled_networks.py, field by field.
// The inputs of all samples; `symbols` are 64-bit integers. Samples stand one after another, or begin at `starts`.
struct Table {
    const void *values;
    int64_t features, symbols;
    const int64_t *starts;

    int64_t start(int64_t row) const { return starts ? starts[row] : row * features; }
};

// What the targets are, as in core/task_types.py: a class, yes-or-no labels (1 or 0), quantities, or chances of the classes.
enum Task : int64_t { CLASSES, LABELS, QUANTITIES, CHANCES };

struct NetworkSpec {
    const ValueSpec *values;
    const NodeSpec *nodes;
    int64_t value_count, node_count, parameter_count, output, classes;
    int64_t program;  // a number that no other values and nodes ever have
    const ParameterPlaces *parameters;
    Bases bases;
    const int64_t *seeds;  // of the dropout layers
    int64_t steps;  // that Adam has taken before
    const void *copy_from;  // the weights, where they are not in their place yet; else null
    void *copy_to;
    int64_t copy_bytes;
    int64_t finite;  // a result: whether all weights are known to be finite after a training
    double label_weight, peer_weight;
    double mix;   // the network's own part in its mixture with the other; it moves
    double loss;  // a result: the sum over all samples
};

// What else there is to a loss of classes, as in learning/objectives.py.
struct LossSpec {
    int64_t classes;         // the first outputs are their logits
    const int64_t *present;  // of every class: the logits of others are taken for zero; null: all are
    const void *targets;     // classes x width: what some outputs of a sample of this class should be close to; null: none
    const int64_t *known;    // for which classes there is a target
    int64_t first, width;    // of these outputs
    int64_t cross_entropy;   // the distance: mean squared error, or the cross-entropy with targets that are chances
    double weight;           // of the distance
    void *sums;              // a result, classes x outputs: the sum of the outputs of every class; null: it is not wanted
    int64_t *counts;         // a result: samples of every class
    int64_t chances;         // the sums are of chances instead
};

enum Mixing : int64_t { ALONE, NEVER_MOVES, MOVES_FIRST, MOVES_ALWAYS };  // in the first step, or in every one
enum OptimizerType : int64_t { SGD, MOREAU, MUTUAL_MOREAU, ADAM_OPTIMIZER };  // of learning/optimizers.py

struct OptimizerSpec {
    int64_t optimizer, mutual;  // `mutual`: two networks learn from each other
    int64_t inner_steps;        // gradients on one batch, for the two Moreau optimizers
    int64_t draws_per_step;     // numbers of dropout masks per step
    int64_t nesterov;
    int64_t mixing;  // the first of two networks is trained in a mixture with the second, whose part moves: as in `Mixing`
    double lr, momentum, weight_decay, prox;
    double outer_lr;  // of the step after the inner ones
    double clip;      // the largest norm of a gradient
    double beta2, eps, decoupled_decay;  // of Adam, whose beta1 is `momentum`
    double first_decay;                  // of the first network, in addition to `weight_decay`
};

// One training, of `count` networks.
struct TrainJob {
    Batches batches;
    Draw draw;
    NetworkSpec *networks;
    int64_t count;
    const OptimizerSpec *optimizer;
    const LossSpec *loss;  // null: of labels and peer alone
    int64_t samples, several;  // results: samples seen, and batches of more than one sample
};

struct PredictJob {
    const int64_t *rows;
    int64_t count, table_rows;
    const NetworkSpec *network;
    void *logits;
};

namespace {

enum NodeType : int64_t { DENSE, CONVOLUTION, DEPTHWISE, POOL, ELEMENTWISE, BINARY, DROPOUT, GATHER, BROADCAST, CHANNEL_NORM,
                          ROW_NORM, SOFTMAX, MATRIX_PRODUCT, EMBEDDING, LSTM, GRU };  // as in execution/program.py

template <typename real>
std::unique_ptr<Node<real>> make_node(const NodeContext<real> &context, const Value<real> &input) {
    switch (context.spec.type) {
        case DENSE: return std::make_unique<Dense<real>>(context, input);
        case CONVOLUTION: return std::make_unique<Convolution<real>>(context, input);
        case DEPTHWISE: return std::make_unique<DepthwiseConvolution<real>>(context, input);
        case POOL: return std::make_unique<Pool<real>>(context, input);
        case ELEMENTWISE: return std::make_unique<Elementwise<real>>(context, input);
        case BINARY: return std::make_unique<Binary<real>>(context, input);
        case DROPOUT: return std::make_unique<DropoutNode<real>>(context, input);
        case GATHER: return std::make_unique<Gather<real>>(context, input);
        case BROADCAST: return std::make_unique<Broadcast<real>>(context, input);
        case CHANNEL_NORM: return std::make_unique<ChannelNormalisation<real>>(context, input);
        case ROW_NORM: return std::make_unique<RowNormalisation<real>>(context, input);
        case SOFTMAX: return std::make_unique<Softmax<real>>(context, input);
        case MATRIX_PRODUCT: return std::make_unique<MatrixProduct<real>>(context, input);
        case EMBEDDING: return std::make_unique<Embedding<real>>(context, input);
        case LSTM: return std::make_unique<LongShortTermMemory<real>>(context, input);
        default: return std::make_unique<GatedRecurrentUnit<real>>(context, input);
    }
}

// The first value is the input.
template <typename real>
struct Network {
    std::vector<Value<real>> values;
    std::vector<std::unique_ptr<Node<real>>> nodes;
    int64_t output, outputs;  // `output`: the value that has the outputs
    int64_t classes;          // of the outputs, those that have a label: all, unless the loss says otherwise
    const LossSpec *extra = nullptr;
    real mix;
    real label_weight, peer_weight;  // in the loss, of the labels and of the other network
    int64_t steps;                   // that were taken before
    double loss = 0;                 // the sum over all samples
    AlignedVector<real> p, log_p;    // batch x row: means, and what the losses need (the logarithms of chances, or logits)
    int64_t row;                     // the classes, padded
    std::vector<ParameterSpec> specs;  // where the parameters are in memory
    int64_t program;
    int64_t batch;
    bool reusable = true;  // for the weights of another client
    std::vector<std::vector<Parameter<real> *>> shared;  // parameters that are parts of one tensor, or the whole several times
    std::vector<AlignedVector<real>> shared_gradients;   // of these tensors

    Network(const NetworkSpec &network, int64_t batch, bool trains = true)
        : values(network.value_count), output(network.output), outputs(network.classes), classes(outputs), mix(real(network.mix)),
          label_weight(real(network.label_weight)), peer_weight(real(network.peer_weight)), steps(network.steps),
          program(network.program), batch(batch) {
        for (int64_t i = 0; i < network.parameter_count; i++) specs.push_back(network.bases.of(network.parameters[i]));
        if (trains) find_gradients(network);
        for (int64_t i = 0; i < network.value_count; i++) {
            const ValueSpec &spec = network.values[i];
            values[i].size = spec.size, values[i].sums = values[i].is_shared = spec.sums;
        }
        for (int64_t i = 0; i < network.node_count; i++) {
            const NodeSpec &spec = network.nodes[i];
            const int64_t first = spec.inputs[0] < 0 ? 0 : spec.inputs[0];
            nodes.push_back(make_node<real>({spec, specs.data(), network.seeds, batch}, values[first]));
            for (int k = 0; k < 3; k++) nodes.back()->inputs[k] = spec.inputs[k] < 0 ? nullptr : &values[spec.inputs[k]];
            nodes.back()->output = &values[spec.output];
            if (spec.seed >= 0) reusable = false;  // dropout has the seeds of one client
        }
        for (int64_t i = 0; i < network.value_count; i++) allocate(network, i);
        learn(nullptr);
        p.resize(batch * row), log_p.resize(batch * row);
        for (const auto &node : nodes)  // the last of its readers, which goes back first
            for (Value<real> *input : node->inputs)
                if (input) input->begins_with = node->gives_all() && node->output->needs_gradient ? node.get() : nullptr;
        for (const auto &node : nodes)
            if (node->inputs[1] && node->inputs[0] == node->inputs[1]) node->inputs[0]->begins_with = nullptr;
        values[output].begins_with = nullptr;  // there the loss does
        if (trains) find_shared();
    }

    // A value that only nodes know which compute one sample after another may have room for one sample.
    void allocate(const NetworkSpec &network, int64_t index) {
        Value<real> &value = values[index];
        bool inside = index && index != output && !value.is_shared, is_read = false, is_read_again = false;
        size_t writer = nodes.size();
        for (size_t i = 0; i < nodes.size(); i++)
            for (int64_t input : network.nodes[i].inputs) {
                if (network.nodes[i].output == index) writer = i, is_read_again |= nodes[i]->needs_output();
                if (input != index) continue;
                for (size_t k = writer; k < i; k++) inside &= together(k, k + 1);
                inside &= writer < i, is_read = true, is_read_again |= nodes[i]->needs_inputs();
            }
        inside &= is_read;
        value.step = inside && !is_read_again ? 0 : value.size, value.gradient_step = inside ? 0 : value.size;
        const auto room = [&](int64_t step) { return (step ? batch : 1) * value.size; };
        if (index) value.data.resize(room(value.step));
        if (value.needs_gradient) value.gradient.resize(room(value.gradient_step));
    }

    // A value needs a gradient if trained weights are before it: none does in a part whose weights are frozen.
    void find_gradients(const NetworkSpec &network) {
        for (int64_t i = 0; i < network.node_count; i++) {
            const NodeSpec &spec = network.nodes[i];
            bool needed = false;
            for (const int64_t input : spec.inputs) needed = needed || (input >= 0 && values[input].needs_gradient);
            for (const int64_t parameter : spec.parameters) needed = needed || (parameter >= 0 && specs[parameter].trained > 0);
            values[spec.output].needs_gradient = needed && network.values[spec.output].gradient;
        }
        values[output].needs_gradient = true;  // the loss writes it
    }

    // Whether this network with other weights is the one that is wanted.
    bool fits(const NetworkSpec &network, int64_t samples) const {
        bool same = reusable && program == network.program && samples <= batch;
        for (size_t i = 0; same && i < specs.size(); i++) same = specs[i].trained == network.parameters[i].trained;
        return same;
    }

    // Weights at the same place may be others in another call.
    void forget_places() {
        for (ParameterSpec &spec : specs) spec.value = nullptr;
    }

    void reload(const NetworkSpec &network, bool trains) {
        bool same = !trains;  // many clients may evaluate one model
        for (size_t i = 0; i < specs.size(); i++) {
            const ParameterSpec wanted = network.bases.of(network.parameters[i]);
            same = same && specs[i].value == wanted.value;
            specs[i] = wanted;
        }
        if (same) return;
        for (Parameter<real> *parameter : parameters()) parameter->reload(specs.data());
        label_weight = real(network.label_weight), peer_weight = real(network.peer_weight);
        steps = network.steps, loss = 0, mix = real(network.mix);
    }

    void find_shared() {
        std::map<int64_t, std::vector<Parameter<real> *>> by_tensor;
        for (Parameter<real> *parameter : parameters()) by_tensor[parameter->index].push_back(parameter);
        for (auto &[index, users] : by_tensor) {
            if (users.size() < 2 || !users[0]->trained) continue;
            int64_t size = 0;
            for (Parameter<real> *user : users) user->shared = true, size = std::max(size, user->first + user->layout.count());
            shared.push_back(users), shared_gradients.emplace_back(size);
        }
    }

    // All users of a tensor get the sum of their gradients, and so take the same step.
    void add_shared() {
        for (size_t i = 0; i < shared.size(); i++) {
            AlignedVector<real> &sum = shared_gradients[i];
            std::fill(sum.begin(), sum.end(), real(0));
            for (Parameter<real> *user : shared[i]) user->layout.add_to(&sum[user->first], user->gradient);
            for (Parameter<real> *user : shared[i]) user->gradient = user->layout.template load<real>(&sum[user->first]);
        }
    }

    std::vector<Parameter<real> *> parameters() {
        std::vector<Parameter<real> *> parameters;
        for (auto &node : nodes)
            for (Parameter<real> *parameter : node->parameters())
                if (parameter->exists()) parameters.push_back(parameter);
        return parameters;
    }

    // Whether all numbers are known to be finite.
    bool store() {
        vector<real> sum = {};
        for (Parameter<real> *parameter : parameters()) {
            parameter->store(specs.data());
            for (size_t i = 0; i < parameter->value.size(); i += LANES<real>) sum += at(&parameter->value[i]);
        }
        bool finite = true;
        for (int64_t i = 0; i < LANES<real>; i++) finite = finite && std::isfinite(sum[i]);
        keep_if_finite(finite);
        return finite;
    }

    // A NaN may be in the padding too, and no client must see that of another.
    void keep_if_finite(bool finite) { reusable = reusable && finite; }

    bool together(size_t i, size_t next) const { return nodes[i]->computes_by_sample() && nodes[next]->computes_by_sample(); }

    // work(pass) with a batch for one node, and with one sample after another for several nodes that compute so.
    template <typename Work>
    static void for_each_part(size_t count, const Pass &pass, const Work &work) {
        if (count == 1) return work(pass);
        for (int64_t s = 0; s < pass.samples; s++) work({s + 1, pass.draw, s, s + 1 == pass.samples});
    }

    void forward(const std::vector<const real *> &x, const Pass &pass) {
        values[0].rows = x.data();
        for (size_t i = 0, next; i < nodes.size(); i = next) {
            next = i + 1;
            while (next < nodes.size() && together(next - 1, next)) next++;
            for_each_part(next - i, pass, [&](const Pass &part) {
                for (size_t k = i; k < next; k++) nodes[k]->forward(part);
            });
        }
    }

    const real *logits(int64_t b) const { return values[output].of(b); }

    void learn(const LossSpec *more) { extra = more, classes = more ? more->classes : outputs, row = padded<real>(classes); }

    bool absent(int64_t c) const { return extra->present && !extra->present[c]; }

    // Means of the outputs, and what the losses need: logarithms only if the loss is `wanted`.
    void expect(int64_t samples, int64_t task, bool wanted) {
        for (int64_t b = 0; b < samples; b++) {
            const real *z = logits(b);
            real *q = &p[b * row], *log_q = &log_p[b * row];
            if (extra && extra->present) {
                for (int64_t c = 0; c < classes; c++) log_q[c] = absent(c) ? real(0) : z[c];
                z = log_q;
            }
            if (task == CLASSES || task == CHANCES)
                softmax(z, q, wanted ? log_q : nullptr);
            else
                for (int64_t c = 0; c < classes; c++)
                    log_q[c] = z[c], q[c] = task == LABELS ? 1 / (1 + std::exp(-z[c])) : z[c];
        }
    }

    void softmax(const real *z, real *q, real *log_q) const {
        const vector<real> zero = {};
        const auto is_class = [&](int64_t c) { return lane_numbers<real>() < zero + real(classes - c); };  // not padding
        vector<real> tops = zero - std::numeric_limits<real>::infinity(), sums = {};
        for (int64_t c = 0; c < row; c += LANES<real>) {
            const vector<real> x = is_class(c) ? at(z + c) : tops;
            tops = x > tops ? x : tops;
        }
        const real top = largest_of<real>(tops);
        for (int64_t c = 0; c < row; c += LANES<real>) {
            const vector<real> chance = exp_of<real>(at(z + c) - top);
            sums += at(q + c) = is_class(c) ? chance : zero;
        }
        const real sum = sum_of<real>(sums), scale = 1 / sum;
        for (int64_t c = 0; c < row; c += LANES<real>) at(q + c) *= scale;
        if (!log_q) return;
        const real log_sum = std::log(sum);
        for (int64_t c = 0; c < row; c += LANES<real>) at(log_q + c) = at(z + c) - top - log_sum;
    }

    static real softplus(real z) { return std::max(z, real(0)) + std::log1p(std::exp(-std::abs(z))); }

    // The loss of one output, of the labels and of the other network.
    real label_loss(int64_t task, int64_t i, real y) const {
        if (task == CHANCES) return y ? y * (std::log(y) - log_p[i]) : real(0);
        return task == LABELS ? softplus(log_p[i]) - y * log_p[i] : (p[i] - y) * (p[i] - y) / 2;
    }
    real divergence(int64_t task, int64_t i, const Network &peer) const {
        if (task == QUANTITIES) return (peer.p[i] - p[i]) * (peer.p[i] - p[i]) / 2;
        const real difference = peer.p[i] * (peer.log_p[i] - log_p[i]);
        return task == CLASSES ? difference : difference - softplus(peer.log_p[i]) + softplus(log_p[i]);
    }

    // The gradient of the mean loss by the logits: (labels + peer) p - peer q - labels y. The loss is added up if it `counts`.
    void backward_loss(const Network *peer, const Batches &batches, int64_t step, int64_t samples, bool counts) {
        const real scale = real(1 / batches.divisors[step]);
        const int64_t task = batches.task, begin = step * batches.width;
        for (int64_t b = 0; b < samples; b++) {
            const int64_t first = b * row;
            const int64_t *label = static_cast<const int64_t *>(batches.targets) + begin + b;
            const real *numbers = static_cast<const real *>(batches.targets) + (begin + b) * classes;
            real *gradients = values[output].gradient_of(b);
            const auto gradient = [&](auto own, auto other, auto target) {
                return scale * (label_weight * (own - target) + peer_weight * (own - other));
            };
            if (task == CLASSES) {  // most targets are 0
                for (int64_t c = 0; c < row; c += LANES<real>) {
                    const vector<real> own = at(&p[first + c]);
                    at(gradients + c) = gradient(own, peer ? at(&peer->p[first + c]) : own, vector<real>{});
                }
                const int64_t i = first + *label;
                gradients[*label] = gradient(p[i], peer ? peer->p[i] : p[i], real(1));
                if (counts) loss -= label_weight * log_p[i];
            } else {
                for (int64_t c = 0; c < classes; c++) {
                    const int64_t i = first + c;
                    gradients[c] = gradient(p[i], peer ? peer->p[i] : p[i], numbers[c]);
                    if (counts) loss += label_weight * label_loss(task, i, numbers[c]);
                }
            }
            for (int64_t c = 0; peer && counts && c < classes; c++) loss += peer_weight * divergence(task, first + c, *peer);
            if (!extra) continue;
            for (int64_t c = 0; c < outputs; c++)
                if (c >= classes || absent(c)) gradients[c] = 0;
            if (extra->targets && extra->known[*label]) approach(b, *label, scale, counts);
            if (extra->sums && counts) collect(b, *label);
        }
    }

    // Add the distance of some outputs of a sample from the target of its class.
    void approach(int64_t b, int64_t label, real scale, bool counts) {
        const int64_t width = extra->width;
        const real weight = real(extra->weight), *target = static_cast<const real *>(extra->targets) + label * width;
        const real *z = logits(b) + extra->first, *q = &p[b * row], *log_q = &log_p[b * row];
        real *gradients = values[output].gradient_of(b) + extra->first, distance = 0;
        const real sum = std::accumulate(target, target + width, real(0));
        for (int64_t k = 0; k < width; k++) {
            const real error = z[k] - target[k];
            distance += extra->cross_entropy ? -target[k] * log_q[k] : error * error / real(width);
            gradients[k] += scale * weight * (extra->cross_entropy ? sum * q[k] - target[k] : 2 * error / real(width));
        }
        if (counts) loss += weight * distance;
    }

    void collect(int64_t b, int64_t label) {
        real *sums = static_cast<real *>(extra->sums) + label * outputs;
        const real *shown = extra->chances ? &p[b * row] : logits(b);
        for (int64_t k = 0; k < outputs; k++) sums[k] += shown[k];
        extra->counts[label]++;
    }

    // Until `step_in_mixture`, the network is its mixture with another one.
    void mix_with(Network &other) {
        const auto own = parameters(), others = other.parameters();
        for (size_t n = 0; n < own.size(); n++)
            if (own[n]->trained) own[n]->begin_mixture(others[n]->value.data(), mix);
    }

    // A step of the own weights with the gradient of the mixture; the own part in it moves along its derivative.
    void step_in_mixture(Network &other, const Pass &pass, UpdateRule<real> rule, bool moves) {
        const bool at_once = rule.is_plain() && !rule.clips() && shared.empty();  // no gradient is stored
        const real lr = rule.lr, part = mix;
        if (at_once) rule.lr *= part, rule.measures = moves;
        rule.stores = !at_once;
        backward(pass, rule);
        rule.stores = false;
        double derivative = 0;
        for (Parameter<real> *v : parameters()) {
            if (!v->mixed_with) continue;
            if (!at_once && moves && !v->shared) v->measure(0, v->gradient.size(), v->gradient.data());
            derivative += v->end_mixture();
        }
        for (size_t i = 0; moves && i < shared.size(); i++) derivative += dot_of_shared(i, other);
        if (moves) mix = std::min(std::max(mix - lr * real(derivative), real(0)), real(1));  // NaN stays NaN
        if (at_once) return;
        for (Parameter<real> *v : parameters())
            for (size_t i = 0; v->trained && i < v->gradient.size(); i += LANES<real>) at(&v->gradient[i]) *= part;
        if (rule.clips()) clip(rule);
        for (Parameter<real> *parameter : parameters()) parameter->update(rule);
    }

    // The product of gradient and distance from the other network for a tensor that several nodes use: a number counts once.
    double dot_of_shared(size_t i, const Network &other) const {
        const int64_t size = shared_gradients[i].size();
        AlignedVector<real> v(size), w(size), gradient(size);
        for (size_t n = 0; n < shared[i].size(); n++) {
            const Parameter<real> &user = *shared[i][n];
            user.layout.store(user.value, &v[user.first]), user.layout.store(user.gradient, &gradient[user.first]);
            user.layout.store(other.shared[i][n]->value, &w[user.first]);
        }
        double sum = 0;
        for (int64_t k = 0; k < size; k++) sum += double(v[k] - w[k]) * double(gradient[k]);
        return sum;
    }

    // Gradients of all parameters, and a step with them.
    void backward(const Pass &pass, const UpdateRule<real> &rule) {
        for (Value<real> &value : values)
            if (value.is_shared && !value.begins_with && value.needs_gradient)
                std::fill_n(value.gradient.begin(), pass.samples * value.size, real(0));
        for (size_t end = nodes.size(), first; end > 0; end = first) {
            first = end - 1;
            while (first > 0 && together(first - 1, first)) first--;
            for_each_part(end - first, pass, [&](const Pass &part) {
                for (size_t k = end; k-- > first;) {
                    for (Value<real> *input : nodes[k]->inputs)
                        if (input) input->sums = input->is_shared && input->begins_with != nodes[k].get();
                    if (nodes[k]->output->needs_gradient) nodes[k]->backward(part, rule);
                }
            });
        }
        add_shared();
        if (rule.stores) return;
        if (rule.clips()) clip(rule);
        for (Parameter<real> *parameter : parameters()) parameter->update(rule);  // those whose gradients were stored
    }

    // Clip the norm of all gradients together, as `tree.clip` does.
    void clip(const UpdateRule<real> &rule) {
        double squares = 0;
        for (Parameter<real> *parameter : parameters())
            for (size_t i = 0; parameter->trained && i < parameter->gradient.size(); i++) {
                real &gradient = parameter->gradient[i];
                if (rule.clipped_prox) gradient += rule.clipped_prox * (parameter->value[i] - parameter->anchor[i]);
                if (!parameter->shared) squares += double(gradient) * double(gradient);
            }
        for (size_t i = 0; i < shared.size(); i++) {  // a number counts once, however many use it
            for (Parameter<real> *user : shared[i]) user->layout.store(user->gradient, &shared_gradients[i][user->first]);
            for (const real gradient : shared_gradients[i]) squares += double(gradient) * double(gradient);
        }
        const double factor = rule.clip / (std::sqrt(squares) + 1e-6);
        if (factor >= 1) return;
        for (Parameter<real> *parameter : parameters())
            for (real &gradient : parameter->gradient) gradient *= real(factor);
    }
};

// Samples of the table by their row numbers, padded if necessary.
template <typename real>
struct Inputs {
    const Table &table;
    int64_t padded_features;
    AlignedVector<real> copied;
    std::vector<const real *> x;

    Inputs(const Table &table, int64_t batch)
        : table(table), padded_features(padded<real>(table.features)),
          copied(table.symbols || padded_features == table.features ? 0 : batch * padded_features), x(batch) {}

    const std::vector<const real *> &of(const int64_t *rows, int64_t samples) {
        for (int64_t b = 0; b < samples; b++) {
            const int64_t bytes = table.symbols ? sizeof(int64_t) : sizeof(real);
            x[b] = reinterpret_cast<const real *>(static_cast<const char *>(table.values) + table.start(rows[b]) * bytes);
            if (!copied.empty()) {
                std::copy_n(x[b], table.features, &copied[b * padded_features]);
                x[b] = &copied[b * padded_features];
            }
        }
        return x;
    }
};

// One client: its batches, and a step on one of them.
template <typename real>
struct Trainer {
    const Batches &batches;
    const OptimizerSpec &optimizer;
    Inputs<real> inputs;
    const std::vector<const real *> *x = nullptr;
    int64_t step = -1, samples = 0;

    Trainer(const Table &table, const Batches &batches, const OptimizerSpec &optimizer)
        : batches(batches), optimizer(optimizer), inputs(table, batches.largest()) {}

    bool next_batch() {
        if (++step == batches.steps) return false;
        samples = batches.sizes[step];
        x = &inputs.of(batches.rows + step * batches.width, samples);
        return true;
    }

    // `draw` counts the gradients on one batch; the loss is that of the first.
    void descend(std::vector<Network<real>> &networks, int64_t draw, const UpdateRule<real> &rule) {
        const int64_t number = step * optimizer.draws_per_step + draw;
        const bool moves = optimizer.mixing == MOVES_ALWAYS || (optimizer.mixing == MOVES_FIRST && !step);
        if (optimizer.mixing) networks[0].mix_with(networks[1]);
        for (auto &network : networks) {
            network.forward(*x, {samples, number});
            network.expect(samples, batches.task, draw == 0);
        }
        for (size_t i = 0; i < networks.size(); i++)
            networks[i].backward_loss(optimizer.mutual ? &networks[1 - i] : nullptr, batches, step, samples, draw == 0);
        for (auto &network : networks) {
            UpdateRule<real> own = rule;
            if (&network == &networks[0]) own.weight_decay += real(optimizer.first_decay);
            if (rule.type == ADAM) {
                const double taken = double(network.steps + step + 1);
                const double correction1 = 1 - std::pow(optimizer.momentum, taken), correction2 = 1 - std::pow(optimizer.beta2, taken);
                own.root_factor = real(correction1 / std::sqrt(correction2)), own.scaled_eps = real(correction1 * optimizer.eps);
            }
            if (optimizer.mixing && &network == &networks[0])
                network.step_in_mixture(networks[1], {samples, number}, own, moves);
            else
                network.backward({samples, number}, own);
        }
    }
};

// Networks of the last job: if the next one has the same architecture, they only get other weights.
template <typename real>
using Networks = std::vector<Network<real>>;

template <typename real>
void prepare(Networks<real> &networks, const NetworkSpec *specs, int64_t count, int64_t batch, bool trains) {
    bool fit = int64_t(networks.size()) == count;
    for (int64_t i = 0; fit && i < count; i++) fit = networks[i].fits(specs[i], batch);
    if (!fit) networks.clear(), networks.reserve(count);
    for (int64_t i = 0; i < count; i++)
        fit ? networks[i].reload(specs[i], trains) : void(networks.emplace_back(specs[i], batch, trains));
}

template <typename real>
void train(const Table &table, const Batches &batches, NetworkSpec *specs, int64_t count, const OptimizerSpec &optimizer,
           const LossSpec *loss, Networks<real> &networks) {
    UpdateRule<real> rule{real(optimizer.lr), real(optimizer.momentum), real(optimizer.weight_decay + optimizer.prox),
                          real(optimizer.prox), real(optimizer.clip)};
    if (rule.clips()) rule.weight_decay = real(optimizer.weight_decay), rule.prox = 0, rule.clipped_prox = real(optimizer.prox);
    const UpdateRule<real> outer_rule{real(optimizer.outer_lr), 0, rule.weight_decay, rule.prox};
    const real outer_lr = real(optimizer.outer_lr);
    rule.nesterov = optimizer.nesterov;
    if (optimizer.optimizer == ADAM_OPTIMIZER) {
        rule.type = ADAM, rule.beta2 = real(optimizer.beta2);
        rule.decoupled_decay = real(optimizer.decoupled_decay);
    }
    Networks<real> copies;
    prepare(networks, specs, count, batches.largest(), true);
    if (optimizer.optimizer == MUTUAL_MOREAU) prepare(copies, specs, count, batches.largest(), true);
    if (optimizer.optimizer == ADAM_OPTIMIZER || (optimizer.optimizer == SGD && optimizer.momentum))
        for (Network<real> &network : networks)
            for (Parameter<real> *parameter : network.parameters()) parameter->begin_state(rule.type == ADAM);
    for (Networks<real> *each : {&networks, &copies})
        for (Network<real> &network : *each) network.learn(loss);
    Trainer<real> trainer(table, batches, optimizer);
    while (trainer.next_batch()) {
        if (optimizer.optimizer == SGD || optimizer.optimizer == ADAM_OPTIMIZER) trainer.descend(networks, 0, rule);
        if (optimizer.optimizer == MOREAU) {
            for (int64_t k = 0; k < optimizer.inner_steps; k++) trainer.descend(networks, k, rule);
            for (Parameter<real> *theta : networks[0].parameters()) {
                if (!theta->trained) continue;
                for (size_t i = 0; i < theta->value.size(); i++)
                    theta->anchor[i] -= outer_lr * (theta->anchor[i] - theta->value[i]);
            }
        }
        if (optimizer.optimizer == MUTUAL_MOREAU) {
            const auto pairwise = [&](const auto &work) {
                for (int64_t n = 0; n < count; n++) {
                    const auto copy = copies[n].parameters(), original = networks[n].parameters();
                    for (size_t i = 0; i < original.size(); i++) work(*copy[i], *original[i]);
                }
            };
            pairwise([](Parameter<real> &copy, Parameter<real> &original) { copy.value = original.value; });
            for (int64_t k = 0; k < optimizer.inner_steps; k++) trainer.descend(copies, k, rule);
            pairwise([](Parameter<real> &copy, Parameter<real> &original) { original.anchor = copy.value; });
            trainer.descend(networks, optimizer.inner_steps, outer_rule);  // gradients at the pair before the inner steps
        }
    }
    for (int64_t i = 0; i < count; i++) {
        specs[i].mix = double(networks[i].mix);
        specs[i].loss = networks[i].loss + (copies.empty() ? 0 : copies[i].loss);
        specs[i].finite = networks[i].store();
    }
}

constexpr int64_t VALUES = 1 << 22;  // of all samples that are predicted together, unless these are few

template <typename real>
void predict(const Table &table, const int64_t *rows, int64_t count, const NetworkSpec &spec, real *logits,
             Networks<real> &networks) {
    int64_t size = 0;  // of the values of a sample
    for (int64_t i = 0; i < spec.value_count; i++) size += spec.values[i].size;
    const int64_t some = std::clamp<int64_t>(VALUES / std::max<int64_t>(size, 1), 20, 100), batch = std::min(count, some);
    prepare(networks, &spec, 1, batch, false);
    Network<real> &network = networks[0];
    Inputs<real> inputs(table, batch);
    for (int64_t first = 0; first < count; first += batch) {
        const int64_t samples = std::min(batch, count - first);
        network.forward(inputs.of(rows + first, samples), {samples, EVALUATION});
        for (int64_t b = 0; b < samples; b++) std::copy_n(network.logits(b), spec.classes, logits + (first + b) * spec.classes);
    }
    network.keep_if_finite(std::isfinite(std::accumulate(logits, logits + count * spec.classes, real(0))));
}

template <typename real>
void run(const Table &table, TrainJob &job, Networks<real> &networks) {
    std::unique_ptr<DrawnBatches> drawn;
    if (job.draw.key) {
        int64_t classes = std::numeric_limits<int64_t>::max();
        for (int64_t i = 0; i < job.count; i++) classes = std::min(classes, job.networks[i].classes);
        if (job.loss) classes = job.loss->classes;
        if (!in_range(job.draw, classes)) throw std::out_of_range("");
        drawn = std::make_unique<DrawnBatches>(job.draw);
        job.batches = drawn->batches(job.draw);
    }
    for (int64_t i = 0; i < job.count; i++) {
        const NetworkSpec &network = job.networks[i];
        if (network.copy_from) std::memcpy(network.copy_to, network.copy_from, network.copy_bytes);
    }
    train<real>(table, job.batches, job.networks, job.count, *job.optimizer, job.loss, networks);
    for (int64_t step = 0; step < job.batches.steps; step++) {
        job.samples += job.batches.sizes[step];
        job.several += job.batches.sizes[step] > 1;
    }
}

template <typename real>
void run(const Table &table, PredictJob &job, Networks<real> &networks) {
    for (int64_t i = 0; i < job.count; i++)
        if (job.rows[i] < 0 || job.rows[i] >= job.table_rows) throw std::out_of_range("");
    predict<real>(table, job.rows, job.count, *job.network, static_cast<real *>(job.logits), networks);
}

constexpr int64_t KEPT = 128 << 20;  // bytes of a thread that may wait for its next call

// The networks stay for the next call: to map and clear memory that the last one gave back took a fifth of the time of five steps
// of a small transformer.
template <typename real, typename Job>
void run_each(const Table &table, Job *jobs, int64_t count) {
    static thread_local Networks<real> networks;
    for (Network<real> &network : networks) network.forget_places();
    try {
        for (int64_t i = 0; i < count; i++) run<real>(table, jobs[i], networks);
    } catch (...) {
        networks.clear();
        throw;
    }
    if (allocated > KEPT) networks.clear();
}

template <typename Job>
int run_all(const Table &table, int64_t bytes, Job *jobs, int64_t count) {
    try {
        bytes == sizeof(float) ? run_each<float>(table, jobs, count) : run_each<double>(table, jobs, count);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    } catch (const std::out_of_range &) {
        return 2;
    }
}

// All jobs of a piece, one after another.
int run_piece(const Piece &piece) {
    const Table &table = *static_cast<const Table *>(piece.table);
    return piece.trains ? run_all(table, piece.bytes, static_cast<TrainJob *>(piece.jobs), piece.count)
                        : run_all(table, piece.bytes, static_cast<PredictJob *>(piece.jobs), piece.count);
}

}  // namespace

// Threads that compute; they are never ended.
extern "C" Helpers *fedme_helpers(int64_t count) { return new Helpers(run_piece, count); }

// The status of a piece becomes 0, or 1 if there is not enough memory, or 2 if a row is not in the table or a target is no class.
extern "C" void fedme_start(Helpers *helpers, Piece *piece) { helpers->start(*piece); }
extern "C" void fedme_finish(Helpers *helpers, const Piece *piece) { helpers->finish(*piece); }
extern "C" void fedme_cancel(Helpers *helpers, Piece *piece) { helpers->cancel(*piece); }

// The order of so many samples with a key of this name, for a check that it is that of torch.
extern "C" void fedme_order(const char *key, int64_t key_size, int64_t count, int64_t *order) {
    std::vector<int64_t> drawn(count);
    shuffle(drawn, number_of_key(std::string(key, key_size)));
    std::copy(drawn.begin(), drawn.end(), order);
}

// The number of this interface, as in execution/compiled_library.py.
extern "C" int fedme_interface() { return 14; }

extern "C" int fedme_vector_bytes() { return BYTES; }

// Whether this processor has the instructions of the code above.
extern "C" int fedme_runs_here() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

#if defined(__x86_64__)
// The family of a processor of AMD; 0 for others.
static unsigned amd_family() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const unsigned family = a >> 8 & 15, more = a >> 20 & 255;
    return family == 15 ? family + more : family;
}
#endif

// Whether compiled_avx512.cpp is faster. Processors of AMD compute half a vector at a time up to Zen 4 (family 25).
extern "C" int fedme_avx512_pays() {
#if defined(__x86_64__)
    if (!__builtin_cpu_is("intel") && amd_family() < 26) return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
#else
    return 0;
#endif
}

#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute pop
#endif
