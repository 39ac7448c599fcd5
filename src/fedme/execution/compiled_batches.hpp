// The batches of a training: given, or drawn here as BatchSchedule.positions (core/operations.py) draws them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "compiled_keys.hpp"

// These structures are those of execution/compiled_calls.py, field by field.
struct Batches {
    const int64_t *rows;     // steps x width: rows of the table
    const void *targets;     // steps x width: classes (64-bit integers), or several numbers each
    const int64_t *sizes;    // of every batch
    const double *divisors;  // of the sum of the losses of every batch
    int64_t steps, width;
    int64_t task;  // what the targets are; drawn ones are classes

    int64_t largest() const { return steps ? *std::max_element(sizes, sizes + steps) : 0; }
};

// Batches of a new order of the samples in every epoch.
struct Draw {
    const char *key;         // the beginning of the names of the keys of the epochs; null: the batches are given
    int64_t key_size;        // in bytes
    const int64_t *rows;     // of the client's samples in the table
    const int64_t *labels;   // of all rows of the table; null: the samples have targets of their own
    const int64_t *targets;  // of the client's samples
    int64_t samples, table_rows;
    int64_t used;  // samples of an epoch: the last batch may be dropped
    int64_t width, per_epoch, steps;
    int64_t divisor;  // of all batches; 0: the size of the batch
};

// The numbers of std::mt19937, each computed when it is needed: most clients need few of the 624 that are made at a time there.
struct Twister {
    static constexpr int64_t SIZE = 624, FAR = 397;
    uint32_t state[SIZE];
    int64_t next = 0;

    // The first `count` numbers depend on so many words of the state and those that are FAR behind them.
    Twister(uint32_t seed, int64_t count) {
        state[0] = seed;
        for (uint32_t i = 1; i < std::min(SIZE, count + FAR + 1); i++)
            state[i] = 1812433253u * (state[i - 1] ^ (state[i - 1] >> 30)) + i;
    }

    uint32_t operator()() {
        const auto wrapped = [](int64_t i) { return i < SIZE ? i : i - SIZE; };
        uint32_t &word = state[next];
        const uint32_t mixed = (word & 0x80000000u) | (state[wrapped(next + 1)] & 0x7fffffffu);
        word = state[wrapped(next + FAR)] ^ (mixed >> 1) ^ (mixed & 1 ? 0x9908b0dfu : 0u);
        next = wrapped(next + 1);
        uint32_t x = word;
        x ^= x >> 11;
        x ^= (x << 7) & 0x9d2c5680u;
        x ^= (x << 15) & 0xefc60000u;
        return x ^ (x >> 18);
    }
};

// The order that torch.randperm gives with a generator of this seed.
inline void shuffle(std::vector<int64_t> &order, int64_t seed) {
    const int64_t count = order.size();
    Twister draw(uint32_t(seed), count);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = 0; i < count - 1; i++) std::swap(order[i], order[i + draw() % uint32_t(count - i)]);
}

struct DrawnBatches {
    std::vector<int64_t> rows, targets, sizes;
    std::vector<double> divisors;

    explicit DrawnBatches(const Draw &draw)
        : rows(draw.steps * draw.width), targets(draw.steps * draw.width), sizes(draw.steps), divisors(draw.steps) {
        std::vector<int64_t> order(draw.samples);
        const std::string key(draw.key, draw.key_size);
        for (int64_t step = 0; step < draw.steps; step++) {
            const int64_t first = step % draw.per_epoch * draw.width;
            if (!first) shuffle(order, number_of_key(key + ", " + std::to_string(step / draw.per_epoch) + "]"));
            sizes[step] = std::min(draw.width, draw.used - first);
            divisors[step] = double(draw.divisor ? draw.divisor : sizes[step]);
            for (int64_t b = 0; b < sizes[step]; b++) {
                const int64_t sample = order[first + b];
                rows[step * draw.width + b] = draw.rows[sample];
                targets[step * draw.width + b] = draw.labels ? draw.labels[draw.rows[sample]] : draw.targets[sample];
            }
        }
    }

    Batches batches(const Draw &draw) const {
        return {rows.data(), targets.data(), sizes.data(), divisors.data(), draw.steps, draw.width, 0};
    }
};

// Whether the rows of the client's samples are in the table, and their targets are classes.
inline bool in_range(const Draw &draw, int64_t classes) {
    for (int64_t i = 0; i < draw.samples; i++) {
        if (draw.rows[i] < 0 || draw.rows[i] >= draw.table_rows) return false;
        const int64_t target = draw.labels ? draw.labels[draw.rows[i]] : draw.targets[i];
        if (target < 0 || target >= classes) return false;
    }
    return true;
}
