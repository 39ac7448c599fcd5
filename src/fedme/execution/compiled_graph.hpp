// Values and nodes of a network: a list of nodes, each of which reads values and writes one.
//
// A value has a row of numbers for every sample of the batch. The innermost dimension of a row is padded to full vectors. The
// padding is always zero, in values and in gradients, so that kernels can run over it.

#pragma once

#include "compiled_optimizers.hpp"

// These structures are those of execution/compiled_networks.py, field by field.
struct ValueSpec {
    int64_t size;      // of a sample, with padding
    int64_t sums;      // whether several nodes add to its gradient
    int64_t gradient;  // whether its gradient is needed
};

struct NodeSpec {
    int64_t type;
    int64_t inputs[3], output;   // values; -1: there is none
    int64_t parameters[4];       // -1: there is none
    const int64_t *numbers;      // what each is, the constructor of the node says
    const double *reals;
    const int64_t *table;
    int64_t table_size;
    int64_t seed;       // position among the seeds of the network, of dropout
    int64_t starts[4];  // where the used part of every parameter begins
};

namespace {

constexpr int64_t EVALUATION = -1;  // in place of the number of a dropout mask

// One forward or backward pass over a batch, or over one sample of it for nodes that compute by sample.
struct Pass {
    int64_t samples;
    int64_t draw;       // the number of the dropout masks, or EVALUATION
    int64_t first = 0;  // sample
    bool last = true;   // of the samples of the batch
    bool trains() const { return draw != EVALUATION; }
};

template <typename real>
struct Node;

template <typename real>
struct Value {
    int64_t size = 0;
    bool sums = false, needs_gradient = false;   // `sums`: a node adds to the gradient, because others were there before
    bool is_shared = false;                      // several nodes give parts of the gradient
    const Node<real> *begins_with = nullptr;     // the first of them, if it gives all; otherwise the gradient begins with zeros
    AlignedVector<real> data, gradient;  // batch x size
    int64_t step = 0, gradient_step = 0;  // from sample to sample: the size, or 0 if one sample after another has the same place
    const real *const *rows = nullptr;   // of the inputs of the network: where each sample is

    const real *of(int64_t b) const { return rows ? rows[b] : &data[b * step]; }
    real *result_of(int64_t b) { return &data[b * step]; }
    real *gradient_of(int64_t b) { return &gradient[b * gradient_step]; }
};

template <typename real>
struct Node {
    Value<real> *inputs[3] = {nullptr, nullptr, nullptr}, *output = nullptr;
    virtual ~Node() = default;
    virtual void forward(const Pass &pass) = 0;
    // From the gradient of the output to those of the inputs that need one, and of the parameters.
    virtual void backward(const Pass &pass, const UpdateRule<real> &rule) = 0;
    virtual std::vector<Parameter<real> *> parameters() { return {}; }
    // Several such nodes in a row compute one sample after another, whose values stay in the cache from node to node.
    virtual bool computes_by_sample() const { return false; }
    // Whether it gives a gradient to every number of its inputs, also to padding.
    virtual bool gives_all() const { return false; }
    // What `backward` reads.
    virtual bool needs_inputs() const { return true; }
    virtual bool needs_output() const { return true; }

    const Value<real> &in(int i = 0) const { return *inputs[i]; }

    // Put `value` at a place of the gradient of an input, or add it if other nodes add too.
    static void give(Value<real> &input, real *place, vector<real> value) {
        if (input.sums)
            at(place) += value;
        else
            at(place) = value;
    }
};

// Everything that a node is made from.
template <typename real>
struct NodeContext {
    const NodeSpec &spec;
    const ParameterSpec *parameters;
    const int64_t *seeds;
    int64_t batch;

    void load(Parameter<real> &parameter, int slot, const ParameterLayout &layout) const {
        parameter.load(spec.parameters[slot], spec.starts[slot], layout, parameters);
    }
    // A vector of numbers, padded.
    void load(Parameter<real> &parameter, int slot, int64_t count) const {
        load(parameter, slot, row_layout(1, count, padded<real>(count)));
    }
};

}  // namespace
