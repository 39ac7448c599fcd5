// Vectors of numbers, and the masks of dropout.

#pragma once

// The instructions of this build on x86-64: AVX2, or AVX-512 where compiled_avx512.cpp includes it.
#ifdef FEDME_AVX512
#define INSTRUCTIONS "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"
#else
#define INSTRUCTIONS "avx2,fma"
#endif

#if defined(__x86_64__) && !defined(__clang__)
#define PRAGMA(text) _Pragma(#text)
#define COMPILE_FOR(instructions) PRAGMA(GCC target(instructions))
COMPILE_FOR(INSTRUCTIONS)
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
#pragma clang attribute push(__attribute__((target(INSTRUCTIONS))), apply_to = function)
#endif

// Before loops over arrays of registers: unrolled late, they would leave these arrays in memory.
#ifdef __clang__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

namespace {

#ifdef FEDME_AVX512
constexpr int BYTES = 64, REGISTERS = 32;  // bytes of a vector, and vectors that the processor holds
#else
constexpr int BYTES = 32, REGISTERS = 16;
#endif

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

// Vectors that may begin anywhere. Clang takes what `at` refers to for aligned, and GCC copies halves of a vector in memcpy.
template <typename real>
struct __attribute__((packed, may_alias)) Unaligned {
    vector<real> value;
};

template <typename real>
inline vector<real> unaligned(const real *place) {
    return reinterpret_cast<const Unaligned<real> *>(place)->value;
}

template <typename real>
inline void put_unaligned(real *place, vector<real> value) {
    reinterpret_cast<Unaligned<real> *>(place)->value = value;
}

// Call a function with a number from 1 to MOST as a constant.
template <int MOST, typename Function>
inline void with_constant(int64_t number, const Function &function) {
    if constexpr (MOST > 1)
        if (number < MOST) return with_constant<MOST - 1>(number, function);
    function(std::integral_constant<int, MOST>());
}

// Numbers of one vector at other places: J ^ D is the place beside, 2 or 4 (and so on) away.
template <typename real, int D, size_t... J>
inline vector<real> exchanged(vector<real> x, std::index_sequence<J...>) {
    return __builtin_shufflevector(x, x, (J ^ D)...);
}

template <typename real, int D = LANES<real> / 2>
inline real sum_of(vector<real> sum) {
    sum += exchanged<real, D>(sum, std::make_index_sequence<LANES<real>>());
    if constexpr (D > 1)
        return sum_of<real, D / 2>(sum);
    else
        return sum[0];
}

template <typename real, int D = LANES<real> / 2>
inline real largest_of(vector<real> x) {
    const vector<real> other = exchanged<real, D>(x, std::make_index_sequence<LANES<real>>());
    x = x >= other ? x : other;
    if constexpr (D > 1)
        return largest_of<real, D / 2>(x);
    else
        return x[0];
}

// 0, 1, 2, ...
template <typename real>
inline vector<real> lane_numbers() {
    vector<real> numbers = {};
    for (int i = 0; i < LANES<real>; i++) numbers[i] = real(i);
    return numbers;
}

// Exchange the blocks of D columns off the diagonal of two rows that are D apart.
template <typename real, int D, size_t... J>
inline void exchange(vector<real> &first, vector<real> &second, std::index_sequence<J...>) {
    constexpr size_t lanes = sizeof...(J);
    const vector<real> a = first, b = second;
    first = __builtin_shufflevector(a, b, (J & D ? lanes + J - D : J)...);
    second = __builtin_shufflevector(a, b, (J & D ? lanes + J : J + D)...);
}

template <typename real, int D = 1>
inline void transpose(vector<real> (&rows)[LANES<real>]) {
    UNROLLED for (int i = 0; i < LANES<real>; i++)
        if (!(i & D)) exchange<real, D>(rows[i], rows[i + D], std::make_index_sequence<LANES<real>>());
    if constexpr (2 * D < LANES<real>) transpose<real, 2 * D>(rows);
}

// A square as wide as a vector, from rows at a distance to columns at a distance. They may begin anywhere, as weights in the
// middle of a tensor do.
template <typename real>
inline void copy_transposed(const real *from, int64_t from_step, real *to, int64_t to_step) {
    vector<real> rows[LANES<real>];
    for (int64_t i = 0; i < LANES<real>; i++) rows[i] = unaligned(from + i * from_step);
    transpose<real>(rows);
    for (int64_t i = 0; i < LANES<real>; i++) put_unaligned(to + i * to_step, rows[i]);
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
