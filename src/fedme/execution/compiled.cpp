// Training and inference of the networks of one client; the weights stay in the processor's cache for all steps.
//
// The arithmetic is that of execution/reference.py and learning/, which the tests compare it with. One thread runs one client,
// so results depend neither on the number of threads nor on other clients. Dimensions that vectors run along are padded with
// zeros to full vectors, so that no loop has a remainder.

#include "compiled_dense.hpp"
#include "compiled_convolutions.hpp"

// These structures are those of execution/compiled.py, field by field.
struct Batches {
    const int64_t *rows, *targets;  // steps x width: rows of the table, and classes
    const int64_t *sizes;           // of every batch
    int64_t steps, width;

    int64_t largest() const { return steps ? *std::max_element(sizes, sizes + steps) : 0; }
};

struct ParameterSpec {  // null where there is none; all are written to
    void *value, *momentum, *anchor;
};

struct NetworkSpec {
    int64_t depth;
    const LayerSpec *layers;
    const ParameterSpec *parameters;  // the weight and the bias of every layer
    int64_t channels, rows, columns;  // of an input, if the first layer is a convolution
    double label_weight, peer_weight;
    double loss;  // the result
};

enum OptimizerType : int64_t { SGD, MOREAU, MUTUAL_MOREAU };  // of learning/optimizers.py

struct OptimizerSpec {
    int64_t optimizer, mutual;  // `mutual`: two networks learn from each other
    int64_t inner_steps;        // gradients on one batch, for the two Moreau optimizers
    int64_t draws_per_step;     // numbers of dropout masks per step
    double lr, momentum, weight_decay, prox;
    double outer_lr;  // of the step after the inner ones
    double clip;      // the largest norm of a gradient
};

namespace {

// Convolutions and pooling, if any, then dense layers.
template <typename real>
struct Network {
    std::vector<SpatialLayer<real>> spatial;
    std::vector<DenseLayer<real>> dense;
    FeatureMap image;                     // of an input; its channels are not padded
    AlignedVector<real> images;           // batch x image
    AlignedVector<real> flat_gradients;   // batch x inputs of the first dense layer
    real label_weight, peer_weight;       // in the loss, of the labels and of the other network
    double loss = 0;                      // the sum over all samples
    AlignedVector<real> p, log_p;         // batch x classes

    Network(const NetworkSpec &network, int64_t batch)
        : label_weight(real(network.label_weight)), peer_weight(real(network.peer_weight)) {
        for (int64_t i = 0; i < network.depth; i++) {
            const LayerSpec &spec = network.layers[i], *next = i + 1 < network.depth ? &spec + 1 : nullptr;
            if (spec.layer_type == LINEAR) {
                int64_t padded_in = padded<real>(spec.inputs);
                std::vector<int64_t> columns = row_layout(1, spec.inputs, padded_in).column;
                if (dense.empty() && !spatial.empty())
                    columns = channels_first(spatial.back().out), padded_in = spatial.back().out.size();
                const Dropout dropout{spec.dropout, uint64_t(spec.seed)};
                dense.emplace_back(spec.outputs, padded_in, columns, spec.activation, dropout, batch);
                load(network.parameters + 2 * i, dense.back());
            } else {
                if (spatial.empty()) {
                    image = {network.rows, network.columns, network.channels, network.channels, spec.padding_rows,
                             spec.padding_columns};
                    images.resize(batch * image.size());
                }
                const FeatureMap in = spatial.empty() ? image : spatial.back().out;
                const LayerSpec *next_spatial = next && next->layer_type != LINEAR ? next : nullptr;
                SpatialLayer<real> &layer = spatial.emplace_back(spec, in, next_spatial, spatial.empty(), batch);
                if (spatial.size() > 1) layer.connect(spatial[spatial.size() - 2].gradient_map);
                if (spec.layer_type == CONVOLUTION) {
                    load(network.parameters + 2 * i, layer);
                    layer.weight.gradient.resize(layer.weight.value.size());
                    layer.bias.gradient.resize(layer.bias.value.size());
                }
            }
        }
        if (!spatial.empty()) flat_gradients.resize(batch * dense[0].padded_in);
        p.resize(batch * dense.back().out);
        log_p.resize(p.size());
    }

    // The places of the values of a feature map in the order of torch, channel by channel.
    static std::vector<int64_t> channels_first(const FeatureMap &map) {
        std::vector<int64_t> places;
        for (int64_t i = 0; i < map.channels; i++)
            for (int64_t r = 0; r < map.rows; r++)
                for (int64_t c = 0; c < map.columns; c++) places.push_back(map.place(r, c) + i);
        return places;
    }

    template <typename AnyLayer>
    static ParameterLayout bias_layout(const AnyLayer &layer) {
        const int64_t count = layer.layout.start.size();
        return row_layout(1, count, padded<real>(count));
    }

    template <typename AnyLayer>
    static void load(const ParameterSpec *specs, AnyLayer &layer) {
        const auto loaded = [](const ParameterLayout &layout, const ParameterSpec &spec) {
            return Parameter<real>{layout.load<real>(spec.value), layout.load<real>(spec.momentum),
                                   layout.load<real>(spec.anchor), {}};
        };
        layer.weight = loaded(layer.layout, specs[0]);
        layer.bias = loaded(bias_layout(layer), specs[1]);
    }

    template <typename AnyLayer>
    static void store(const ParameterSpec *specs, const AnyLayer &layer) {
        const auto store = [](const ParameterLayout &layout, const Parameter<real> &parameter, const ParameterSpec &spec) {
            layout.store(parameter.value, spec.value), layout.store(parameter.momentum, spec.momentum);
            layout.store(parameter.anchor, spec.anchor);
        };
        store(layer.layout, layer.weight, specs[0]);
        store(bias_layout(layer), layer.bias, specs[1]);
    }

    void store(NetworkSpec &network) const {
        for (size_t i = 0; i < spatial.size(); i++)
            if (spatial[i].spec.layer_type == CONVOLUTION) store(network.parameters + 2 * i, spatial[i]);
        for (size_t i = 0; i < dense.size(); i++) store(network.parameters + 2 * (spatial.size() + i), dense[i]);
    }

    std::vector<Parameter<real> *> parameters() {
        std::vector<Parameter<real> *> parameters;
        for (auto &layer : spatial) parameters.push_back(&layer.weight), parameters.push_back(&layer.bias);
        for (auto &layer : dense) parameters.push_back(&layer.weight), parameters.push_back(&layer.bias);
        return parameters;
    }

    const real *spatial_input(size_t layer, int64_t b, int64_t draw) const {
        return layer ? spatial[layer - 1].output_of(b, draw) : &images[b * image.size()];
    }

    // `draw` is the number of the dropout masks.
    void forward(const std::vector<const real *> &x, int64_t samples, int64_t draw) {
        std::copy_n(x.begin(), samples, dense[0].x.begin());
        for (int64_t b = 0; b < samples && !spatial.empty(); b++) {
            const real *from = x[b];
            for (int64_t i = 0; i < image.channels; i++)
                for (int64_t r = 0; r < image.rows; r++)
                    for (int64_t c = 0; c < image.columns; c++) images[b * image.size() + image.place(r, c) + i] = *from++;
            for (size_t i = 0; i < spatial.size(); i++) spatial[i].forward(spatial_input(i, b, draw), b, draw);
            dense[0].x[b] = spatial.back().output_of(b, draw);
        }
        for (size_t i = 0; i < dense.size(); i++) {
            dense[i].forward(samples, draw);
            for (int64_t b = 0; b < samples && i + 1 < dense.size(); b++) dense[i + 1].x[b] = dense[i].output_of(b, draw);
        }
    }

    void softmax(int64_t samples) {
        const DenseLayer<real> &last = dense.back();
        for (int64_t b = 0; b < samples; b++) {
            const real *z = &last.outputs[b * last.padded_out];
            real *q = &p[b * last.out], *log_q = &log_p[b * last.out];
            const real top = *std::max_element(z, z + last.out);
            real sum = 0;
            for (int64_t c = 0; c < last.out; c++) sum += q[c] = std::exp(z[c] - top);
            const real log_sum = std::log(sum), scale = 1 / sum;
            for (int64_t c = 0; c < last.out; c++) q[c] *= scale, log_q[c] = z[c] - top - log_sum;
        }
    }

    // The gradient of the mean loss by the logits: (labels + peer) p - peer q - labels y. The loss is added up if it `counts`.
    void backward_loss(const Network *peer, const int64_t *y, int64_t samples, bool counts) {
        DenseLayer<real> &last = dense.back();
        const real scale = real(1) / samples;
        for (int64_t b = 0; b < samples; b++) {
            const int64_t first = b * last.out;
            if (counts) loss -= label_weight * log_p[first + y[b]];
            for (int64_t c = 0; c < last.out; c++) {
                const int64_t i = first + c;
                real gradient = label_weight * (p[i] - (c == y[b]));
                if (peer) {
                    gradient += peer_weight * (p[i] - peer->p[i]);
                    if (counts) loss += peer_weight * peer->p[i] * (peer->log_p[i] - log_p[i]);
                }
                last.output_gradients[b * last.padded_out + c] = gradient * scale;
            }
        }
    }

    // Gradients of all parameters, and a step with them.
    void backward(int64_t samples, int64_t draw, const UpdateRule<real> &rule) {
        for (size_t i = dense.size(); i-- > 0;) {
            if (i) {
                dense[i].backward_inputs(dense[i - 1].output_gradients.data(), samples);
                dense[i - 1].backward_activation(samples);
            }
            if (!i && !spatial.empty()) dense[i].backward_inputs(flat_gradients.data(), samples);
            if (rule.clips()) {
                for (Parameter<real> *parameter : {&dense[i].weight, &dense[i].bias})
                    parameter->gradient.resize(parameter->value.size());
                dense[i].template update<STORE>(samples, rule);
            } else if (rule.is_plain()) {
                dense[i].template update<ADD>(samples, rule);
            } else {
                dense[i].template update<UPDATE>(samples, rule);
            }
        }
        for (auto &layer : spatial) layer.begin_backward();
        for (int64_t b = 0; b < samples && !spatial.empty(); b++) {
            SpatialLayer<real> &last = spatial.back();
            for (int64_t r = 0; r < last.out.rows; r++)
                std::copy_n(&flat_gradients[b * dense[0].padded_in + last.out.place(r, 0)],
                            last.out.columns * last.out.padded_channels, &last.output_gradients[last.gradient_map.place(r, 0)]);
            for (size_t i = spatial.size(); i-- > 0;)
                spatial[i].backward(spatial_input(i, b, draw), b, i ? spatial[i - 1].output_gradients.data() : nullptr);
        }
        if (rule.clips()) clip(rule);
        for (Parameter<real> *parameter : parameters()) parameter->update(rule);  // those whose gradients were stored
    }

    // Clip the norm of all gradients together, as `tree.clip` does.
    void clip(const UpdateRule<real> &rule) {
        double squares = 0;
        for (Parameter<real> *parameter : parameters())
            for (size_t i = 0; i < parameter->gradient.size(); i++) {
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
    const real *table;
    int64_t features, padded_features;
    AlignedVector<real> copied;
    std::vector<const real *> x;

    Inputs(const real *table, int64_t features, int64_t batch)
        : table(table), features(features), padded_features(padded<real>(features)),
          copied(padded_features == features ? 0 : batch * padded_features), x(batch) {}

    const std::vector<const real *> &of(const int64_t *rows, int64_t samples) {
        for (int64_t b = 0; b < samples; b++) {
            x[b] = table + rows[b] * features;
            if (!copied.empty()) {
                std::copy_n(x[b], features, &copied[b * padded_features]);
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

    Trainer(const real *table, int64_t features, const Batches &batches, const OptimizerSpec &optimizer)
        : batches(batches), optimizer(optimizer), inputs(table, features, batches.largest()) {}

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
            network.forward(*x, samples, number);
            network.softmax(samples);
        }
        for (size_t i = 0; i < networks.size(); i++)
            networks[i].backward_loss(optimizer.mutual ? &networks[1 - i] : nullptr, y, samples, draw == 0);
        for (auto &network : networks) network.backward(samples, number, rule);
    }
};

template <typename real>
void train(const real *table, int64_t features, const Batches &batches, NetworkSpec *specs, int64_t count,
           const OptimizerSpec &optimizer) {
    UpdateRule<real> rule{real(optimizer.lr), real(optimizer.momentum), real(optimizer.weight_decay + optimizer.prox),
                          real(optimizer.prox), real(optimizer.clip)};
    if (rule.clips()) rule.weight_decay = real(optimizer.weight_decay), rule.prox = 0, rule.clipped_prox = real(optimizer.prox);
    const UpdateRule<real> outer_rule{real(optimizer.outer_lr), 0, rule.weight_decay, rule.prox};
    const real outer_lr = real(optimizer.outer_lr);
    std::vector<Network<real>> networks;
    for (int64_t i = 0; i < count; i++) networks.emplace_back(specs[i], batches.largest());
    std::vector<Network<real>> copies = optimizer.optimizer == MUTUAL_MOREAU ? networks : std::vector<Network<real>>();
    Trainer<real> trainer(table, features, batches, optimizer);
    while (trainer.next_batch()) {
        if (optimizer.optimizer == SGD) trainer.descend(networks, 0, rule);
        if (optimizer.optimizer == MOREAU) {
            for (int64_t k = 0; k < optimizer.inner_steps; k++) trainer.descend(networks, k, rule);
            for (Parameter<real> *theta : networks[0].parameters())
                for (size_t i = 0; i < theta->value.size(); i++)
                    theta->anchor[i] -= outer_lr * (theta->anchor[i] - theta->value[i]);
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
void predict(const real *table, int64_t features, const int64_t *rows, int64_t count, const NetworkSpec &spec, real *logits) {
    const int64_t batch = std::min<int64_t>(count, spec.layers[0].layer_type == LINEAR ? 100 : 20);
    Network<real> network(spec, batch);
    const DenseLayer<real> &last = network.dense.back();
    Inputs<real> inputs(table, features, batch);
    for (int64_t first = 0; first < count; first += batch) {
        const int64_t samples = std::min(batch, count - first);
        network.forward(inputs.of(rows + first, samples), samples, EVALUATION);
        for (int64_t b = 0; b < samples; b++)
            std::copy_n(&last.outputs[b * last.padded_out], last.out, logits + (first + b) * last.out);
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

// Both return 0, or 1 if there is not enough memory. `bytes` is the size of one value.
extern "C" int fedme_train(const void *table, int64_t features, int64_t bytes, const Batches *batches, NetworkSpec *specs,
                           int64_t count, const OptimizerSpec *optimizer) {
    return status_of([&] {
        if (bytes == sizeof(float))
            train(static_cast<const float *>(table), features, *batches, specs, count, *optimizer);
        else
            train(static_cast<const double *>(table), features, *batches, specs, count, *optimizer);
    });
}

extern "C" int fedme_predict(const void *table, int64_t features, int64_t bytes, const int64_t *rows, int64_t count,
                             const NetworkSpec *spec, void *logits) {
    return status_of([&] {
        if (bytes == sizeof(float))
            predict(static_cast<const float *>(table), features, rows, count, *spec, static_cast<float *>(logits));
        else
            predict(static_cast<const double *>(table), features, rows, count, *spec, static_cast<double *>(logits));
    });
}

// Whether this processor has the instructions of the code above.
extern "C" int fedme_runs_here() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}
