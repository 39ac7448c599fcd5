// The number of a key, from its name, as core/key.py makes it: half of a BLAKE2b hash (RFC 7693) of 8 bytes.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

inline uint64_t hash_of(const std::string &text) {
    static constexpr uint64_t BEGIN[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                          0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
    static constexpr uint8_t ORDERS[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                               {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                               {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                               {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                               {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                               {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                               {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                               {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                               {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                               {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
    constexpr size_t BLOCK = 128;
    uint64_t state[8];
    std::copy_n(BEGIN, 8, state);
    state[0] ^= 0x01010000 ^ 8;  // the size of the hash
    for (size_t first = 0;; first += BLOCK) {
        const size_t bytes = std::min(BLOCK, text.size() - first);
        const bool last = first + bytes == text.size();
        uint64_t words[16] = {}, v[16];
        std::memcpy(words, text.data() + first, bytes);
        std::copy_n(state, 8, v), std::copy_n(BEGIN, 8, v + 8);
        v[12] ^= first + bytes;
        if (last) v[14] = ~v[14];
        const auto turned = [](uint64_t x, int bits) { return x >> bits | x << (64 - bits); };
        const auto mix = [&](int a, int b, int c, int d, uint64_t x, uint64_t y) {
            v[a] += v[b] + x, v[d] = turned(v[d] ^ v[a], 32), v[c] += v[d], v[b] = turned(v[b] ^ v[c], 24);
            v[a] += v[b] + y, v[d] = turned(v[d] ^ v[a], 16), v[c] += v[d], v[b] = turned(v[b] ^ v[c], 63);
        };
        for (int round = 0; round < 12; round++) {
            const uint8_t *order = ORDERS[round % 10];
            for (int i = 0; i < 8; i++) {
                const int shift = i < 4 ? 0 : 1;  // columns, then diagonals
                mix(i % 4, 4 + (i + shift) % 4, 8 + (i + 2 * shift) % 4, 12 + (i + 3 * shift) % 4, words[order[2 * i]],
                    words[order[2 * i + 1]]);
            }
        }
        for (int i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
        if (last) return state[0];
    }
}

inline int64_t number_of_key(const std::string &name) { return int64_t(hash_of(name) >> 1); }
