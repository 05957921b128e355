// The noise of the gumbel coupling: one Gumbel number per (seed, path, token, depth), by hashing.
//
// docs/algorithm.md 3.6. A path's key is chained from its parent's, so that draft and target, a
// sparse top-k computation and a dense one, and other hosts all see the same numbers.
//
//     root key   = mix64(seed, 0)
//     child key  = mix64(parent key, token)
//     noise bits = mix64(child key XOR NOISE_DOMAIN, depth)
//                  (draw j with replacement: mix64(noise bits, j))
//     u          = (top 52 bits + 1/2) / 2**52, strictly inside (0, 1)
//     G          = -log(-log u)
#pragma once

#include <bit>
#include <cmath>

#include "numbers.hpp"

namespace dsbd {

inline constexpr std::uint64_t NOISE_DOMAIN = 0xD1B54A32D192ED03u;  // apart from children's keys

/// Output `index` (0, 1, ...; -1 wraps) of SplitMix64 seeded with `key` (Steele, Lea, Flood 2014).
constexpr std::uint64_t mix64(std::uint64_t key, std::uint64_t index) {
    std::uint64_t z = key + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/// The path key of the prompt for a 63-bit seed.
constexpr std::uint64_t root_key(std::uint64_t seed) { return mix64(seed, 0); }

/// The seed of sample `index` of several that are made from one seed: 53 bits, which any parser of
/// JSON keeps; the first has the seed itself.
constexpr std::uint64_t sample_seed(std::uint64_t seed, std::uint64_t index) {
    return index ? mix64(seed, index) >> 11 : seed;
}

/// The key of a path with one more token; STAY hashes like a token of its own.
constexpr std::uint64_t child_key(std::uint64_t parent_key, std::int64_t token) {
    return mix64(parent_key, static_cast<std::uint64_t>(token));
}

/// The Gumbel number of the candidate with this (child) key, of one of several draws.
inline double gumbel_noise(std::uint64_t key, std::size_t depth,
                           std::optional<std::size_t> draw = {}) {
    std::uint64_t bits = mix64(key ^ NOISE_DOMAIN, depth);
    if (draw) bits = mix64(bits, *draw);
    const double u = std::bit_cast<double>(bits >> 12 | std::uint64_t{0x3FF} << 52) -
                     (1.0 - 0x1p-53);  // of 1 + b / 2**52, exact
    return -std::log(-std::log(u));
}

/// Write masses plus noise, (num_candidates,); -inf where the mass is.
inline void noisy(FloatSpan log_masses, std::span<const std::uint64_t> keys, std::size_t depth,
                  std::optional<std::size_t> draw, std::span<double> scores) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
        const double mass = log_masses[i];
        scores[i] = mass == LOG_ZERO ? mass : mass + gumbel_noise(keys[i], depth, draw);
    }
}

}  // namespace dsbd
