// The noise of the gumbel coupling: one Gumbel number per (seed, path, token, step), by hashing.
//
//     root key   = mix64(noise key, 0)
//     child key  = mix64(parent key, token)
//     noise bits = mix64(child key XOR noise_domain, step)
//     u          = (top 52 bits + 1/2) / 2**52
//     G          = -log(-log u)
//
// mix64(key, index) is output number `index` of SplitMix64 seeded with `key` (Steele, Lea, Flood
// 2014). Draft and target see the same numbers, and so does every other host of a bundle.
#pragma once

#include <cmath>
#include <cstdint>

namespace dsbd {

inline std::uint64_t mix64(std::uint64_t key, std::uint64_t index) {
    std::uint64_t z = key + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

inline std::uint64_t root_key(std::uint64_t noise_key) { return mix64(noise_key, 0); }

/// Return the key of a path with one more token; `stay_token` hashes like a token of its own.
inline std::uint64_t child_key(std::uint64_t parent_key, std::int64_t token) {
    return mix64(parent_key, static_cast<std::uint64_t>(token));
}

/// Return the standard Gumbel number of the candidate with this (child) key.
inline double gumbel_noise(std::uint64_t key, std::uint64_t step) {
    constexpr std::uint64_t noise_domain = 0xD1B54A32D192ED03u;  // apart from the children's keys
    const std::uint64_t bits = mix64(key ^ noise_domain, step) >> 12;
    const double u = (static_cast<double>(bits) + 0.5) * 0x1p-52;
    return -std::log(-std::log(u));
}

}  // namespace dsbd
