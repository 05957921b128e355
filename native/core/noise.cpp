// The noise of the gumbel coupling: one Gumbel number per (seed, path, token, depth), by hashing.
#include "noise.hpp"

#include <bit>
#include <cmath>

#include "numbers.hpp"

namespace dsbd {
namespace {

/// -G of a candidate.
double negative_noise(std::uint64_t key, std::size_t depth, std::optional<std::size_t> draw) {
    std::uint64_t bits = mix64(key ^ NOISE_DOMAIN, depth);
    if (draw) bits = mix64(bits, *draw);
    const double u = std::bit_cast<double>(bits >> 12 | std::uint64_t{0x3FF} << 52) -
                     (1.0 - 0x1p-53);  // of 1 + b / 2**52, exact
    return std::log(-std::log(u));
}

}  // namespace

double gumbel_noise(std::uint64_t key, std::size_t depth, std::optional<std::size_t> draw) {
    return -negative_noise(key, depth, draw);
}

void noisy(FloatSpan log_masses, std::span<const std::uint64_t> keys, std::size_t depth,
           std::optional<std::size_t> draw, std::span<double> scores) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
        const double mass = log_masses[i];
        scores[i] = mass == LOG_ZERO ? mass : mass - negative_noise(keys[i], depth, draw);
    }
}

}  // namespace dsbd
