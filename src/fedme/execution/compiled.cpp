// Training and inference of the networks of one client; the weights stay in the processor's cache for all steps.
//
// The arithmetic is that of execution/reference.py and learning/, which the tests compare it with. One thread runs one client,
// so results depend neither on the number of threads nor on other clients. Dimensions that vectors run along are padded with
// zeros to full vectors, so that no loop has a remainder.

#include "compiled_convolutions.hpp"
#include "compiled_dense.hpp"
#include "compiled_elementwise.hpp"
#include "compiled_normalisation.hpp"
#include "compiled_pooling.hpp"
#include "compiled_sequences.hpp"

// These structures are those of execution/compiled.py, field by field.
struct Batches {
    const int64_t *rows, *targets;  // steps x width: rows of the table, and classes
    const int64_t *sizes;           // of every batch
    const double *divisors;         // of the sum of the losses of every batch
    int64_t steps, width;

    int64_t largest() const { return steps ? *std::max_element(sizes, sizes + steps) : 0; }
};

// The inputs of all samples; `symbols` are 64-bit integers.
struct Table {
    const void *values;
    int64_t features, symbols;
};

struct NetworkSpec {
    const ValueSpec *values;
    const NodeSpec *nodes;
    int64_t value_count, node_count, output, classes;
    const ParameterSpec *parameters;
    const int64_t *seeds;  // of the dropout layers
    double label_weight, peer_weight;
    int64_t steps;  // that Adam has taken before
    double loss;  // a result: the sum over all samples
};

enum OptimizerType : int64_t { SGD, MOREAU, MUTUAL_MOREAU, ADAM_OPTIMIZER };  // of learning/optimizers.py

struct OptimizerSpec {
    int64_t optimizer, mutual;  // `mutual`: two networks learn from each other
    int64_t inner_steps;        // gradients on one batch, for the two Moreau optimizers
    int64_t draws_per_step;     // numbers of dropout masks per step
    int64_t nesterov;
    double lr, momentum, weight_decay, prox;
    double outer_lr;  // of the step after the inner ones
    double clip;      // the largest norm of a gradient
    double beta2, eps, decoupled_decay;  // of Adam, whose beta1 is `momentum`
};

namespace {

enum NodeType : int64_t { DENSE, CONVOLUTION, DEPTHWISE, POOL, ELEMENTWISE, BINARY, DROPOUT, GATHER, BROADCAST, CHANNEL_NORM,
                          ROW_NORM, SOFTMAX, MATRIX_PRODUCT, EMBEDDING, LSTM };  // as in execution/compiled.py

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
        default: return std::make_unique<LongShortTermMemory<real>>(context, input);
    }
}

// The first value is the input.
template <typename real>
struct Network {
    std::vector<Value<real>> values;
    std::vector<std::unique_ptr<Node<real>>> nodes;
    int64_t output, classes;  // `output`: the value that has the logits
    real label_weight, peer_weight;  // in the loss, of the labels and of the other network
    int64_t steps;                   // that were taken before
    double loss = 0;                 // the sum over all samples
    AlignedVector<real> p, log_p;    // batch x classes

    Network(const NetworkSpec &network, int64_t batch, bool trains = true)
        : values(network.value_count), output(network.output), classes(network.classes), label_weight(real(network.label_weight)),
          peer_weight(real(network.peer_weight)), steps(network.steps) {
        for (int64_t i = 0; i < network.value_count; i++) {
            const ValueSpec &spec = network.values[i];
            values[i].size = spec.size, values[i].sums = spec.sums, values[i].needs_gradient = trains && spec.gradient;
            if (i) values[i].data.resize(batch * spec.size);
            if (values[i].needs_gradient) values[i].gradient.resize(batch * spec.size);
        }
        for (int64_t i = 0; i < network.node_count; i++) {
            const NodeSpec &spec = network.nodes[i];
            const int64_t first = spec.inputs[0] < 0 ? 0 : spec.inputs[0];
            nodes.push_back(make_node<real>({spec, network.parameters, network.seeds, batch}, values[first]));
            for (int k = 0; k < 3; k++) nodes.back()->inputs[k] = spec.inputs[k] < 0 ? nullptr : &values[spec.inputs[k]];
            nodes.back()->output = &values[spec.output];
        }
        p.resize(batch * classes), log_p.resize(batch * classes);
    }

    std::vector<Parameter<real> *> parameters() {
        std::vector<Parameter<real> *> parameters;
        for (auto &node : nodes)
            for (Parameter<real> *parameter : node->parameters())
                if (parameter->exists()) parameters.push_back(parameter);
        return parameters;
    }

    void store(NetworkSpec &network) {
        for (Parameter<real> *parameter : parameters()) parameter->store(network.parameters);
    }

    void forward(const std::vector<const real *> &x, const Pass &pass) {
        values[0].rows = x.data();
        for (auto &node : nodes) node->forward(pass);
    }

    const real *logits(int64_t b) const { return values[output].of(b); }

    void softmax(int64_t samples) {
        for (int64_t b = 0; b < samples; b++) {
            const real *z = logits(b);
            real *q = &p[b * classes], *log_q = &log_p[b * classes];
            const real top = *std::max_element(z, z + classes);
            real sum = 0;
            for (int64_t c = 0; c < classes; c++) sum += q[c] = std::exp(z[c] - top);
            const real log_sum = std::log(sum), scale = 1 / sum;
            for (int64_t c = 0; c < classes; c++) q[c] *= scale, log_q[c] = z[c] - top - log_sum;
        }
    }

    // The gradient of the mean loss by the logits: (labels + peer) p - peer q - labels y. The loss is added up if it `counts`.
    void backward_loss(const Network *peer, const int64_t *y, int64_t samples, double divisor, bool counts) {
        const real scale = real(1 / divisor);
        for (int64_t b = 0; b < samples; b++) {
            const int64_t first = b * classes;
            real *gradients = values[output].gradient_of(b);
            if (counts) loss -= label_weight * log_p[first + y[b]];
            for (int64_t c = 0; c < classes; c++) {
                const int64_t i = first + c;
                real gradient = label_weight * (p[i] - (c == y[b]));
                if (peer) {
                    gradient += peer_weight * (p[i] - peer->p[i]);
                    if (counts) loss += peer_weight * peer->p[i] * (peer->log_p[i] - log_p[i]);
                }
                gradients[c] = gradient * scale;
            }
        }
    }

    // Gradients of all parameters, and a step with them.
    void backward(const Pass &pass, const UpdateRule<real> &rule) {
        for (Value<real> &value : values)
            if (value.sums && value.needs_gradient) std::fill_n(value.gradient.begin(), pass.samples * value.size, real(0));
        for (size_t i = nodes.size(); i-- > 0;)
            if (nodes[i]->output->needs_gradient) nodes[i]->backward(pass, rule);
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
                squares += double(gradient) * double(gradient);
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
            x[b] = reinterpret_cast<const real *>(static_cast<const char *>(table.values) + rows[b] * table.features * bytes);
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
        const int64_t *y = batches.targets + step * batches.width, number = step * optimizer.draws_per_step + draw;
        for (auto &network : networks) {
            network.forward(*x, {samples, number});
            network.softmax(samples);
        }
        for (size_t i = 0; i < networks.size(); i++)
            networks[i].backward_loss(optimizer.mutual ? &networks[1 - i] : nullptr, y, samples, batches.divisors[step], draw == 0);
        for (auto &network : networks) {
            UpdateRule<real> own = rule;
            if (rule.type == ADAM) {
                const double taken = double(network.steps + step + 1);
                own.correction1 = real(1 - std::pow(optimizer.momentum, taken));
                own.correction2 = real(1 - std::pow(optimizer.beta2, taken));
            }
            network.backward({samples, number}, own);
        }
    }
};

template <typename real>
void train(const Table &table, const Batches &batches, NetworkSpec *specs, int64_t count, const OptimizerSpec &optimizer) {
    UpdateRule<real> rule{real(optimizer.lr), real(optimizer.momentum), real(optimizer.weight_decay + optimizer.prox),
                          real(optimizer.prox), real(optimizer.clip)};
    if (rule.clips()) rule.weight_decay = real(optimizer.weight_decay), rule.prox = 0, rule.clipped_prox = real(optimizer.prox);
    const UpdateRule<real> outer_rule{real(optimizer.outer_lr), 0, rule.weight_decay, rule.prox};
    const real outer_lr = real(optimizer.outer_lr);
    rule.nesterov = optimizer.nesterov;
    if (optimizer.optimizer == ADAM_OPTIMIZER) {
        rule.type = ADAM, rule.beta2 = real(optimizer.beta2), rule.eps = real(optimizer.eps);
        rule.decoupled_decay = real(optimizer.decoupled_decay);
    }
    std::vector<Network<real>> networks, copies;
    networks.reserve(count), copies.reserve(count);
    for (int64_t i = 0; i < count; i++) networks.emplace_back(specs[i], batches.largest());
    for (int64_t i = 0; i < count && optimizer.optimizer == MUTUAL_MOREAU; i++) copies.emplace_back(specs[i], batches.largest());
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
        specs[i].loss = networks[i].loss + (copies.empty() ? 0 : copies[i].loss);
        networks[i].store(specs[i]);
    }
}

template <typename real>
void predict(const Table &table, const int64_t *rows, int64_t count, const NetworkSpec &spec, real *logits) {
    const int64_t batch = std::min<int64_t>(count, 100);
    Network<real> network(spec, batch, false);
    Inputs<real> inputs(table, batch);
    for (int64_t first = 0; first < count; first += batch) {
        const int64_t samples = std::min(batch, count - first);
        network.forward(inputs.of(rows + first, samples), {samples, EVALUATION});
        for (int64_t b = 0; b < samples; b++) std::copy_n(network.logits(b), spec.classes, logits + (first + b) * spec.classes);
    }
}

template <typename Work>
int status_of(const Work &work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

}  // namespace

// Both return 0, or 1 if there is not enough memory. `bytes` is the size of one number.
extern "C" int fedme_train(const Table *table, int64_t bytes, const Batches *batches, NetworkSpec *specs, int64_t count,
                           const OptimizerSpec *optimizer) {
    return status_of([&] {
        if (bytes == sizeof(float))
            train<float>(*table, *batches, specs, count, *optimizer);
        else
            train<double>(*table, *batches, specs, count, *optimizer);
    });
}

extern "C" int fedme_predict(const Table *table, int64_t bytes, const int64_t *rows, int64_t count, const NetworkSpec *spec,
                             void *logits) {
    return status_of([&] {
        if (bytes == sizeof(float))
            predict<float>(*table, rows, count, *spec, static_cast<float *>(logits));
        else
            predict<double>(*table, rows, count, *spec, static_cast<double *>(logits));
    });
}

// The number of this interface, as in execution/compiled.py.
extern "C" int fedme_interface() { return 2; }

// Whether this processor has the instructions of the code above.
extern "C" int fedme_runs_here() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute pop
#endif
