// Vectors of numbers, and the masks of dropout.

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

inline thread_local int64_t allocated = 0;  // bytes of all vectors below

// Vectors that begin where a line of the cache does: a vector across two lines takes two loads.
template <typename real>
struct Aligned {
    typedef real value_type;
    Aligned() = default;
    template <typename other>
    Aligned(const Aligned<other> &) {}
    real *allocate(size_t count) {
        void *place = ::operator new(count * sizeof(real), std::align_val_t(64));
        allocated += int64_t(count * sizeof(real));
        return static_cast<real *>(place);
    }
    void deallocate(real *place, size_t count) {
        ::operator delete(place, std::align_val_t(64));
        allocated -= int64_t(count * sizeof(real));
    }
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

}  // namespace
