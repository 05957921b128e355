// The candidates of largest log mass plus noise, without the noise of all.
#include "best_by_noise.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <numbers>
#include <tuple>

#include "noise.hpp"
#include "numbers.hpp"

namespace dsbd {
namespace {

constexpr std::size_t NOISE_BITS = 53;  // 1 - u is an odd number / 2**53
constexpr double MARGIN = 1e-6;         // of rounding, in scores

/// By leading zeros of that number: a bound of the noise.
constexpr auto MOST_NOISE = [] {
    std::array<double, 65> found{};
    for (std::size_t zeros = 64 - NOISE_BITS; zeros < 64; ++zeros) {
        const auto power = static_cast<double>(zeros - (64 - NOISE_BITS) + 1);
        found[zeros] = power * std::numbers::ln2 + MARGIN;
    }
    return found;
}();

/// Of equal scores the first is better.
bool is_better(const BestByNoise::Candidate& a, const BestByNoise::Candidate& b) {
    return std::tuple(b.score, a.beam, a.place) < std::tuple(a.score, b.beam, b.place);
}

}  // namespace

void BestByNoise::consider(const NoisyBeam& beam, const Continuations& some) {
    const auto& [tokens, log_probs, first] = some;
    const auto least = [&] {  // log-probability plus noise that matters
        if (best_.size() < num_wanted_) return LOG_ZERO;
        return best_.front().score - beam.log_weight - beam.log_copies;
    };
    double needed = least();
    for (std::size_t i = 0; i < log_probs.size(); ++i) {
        const double log_prob = log_probs[i], lacking = needed - log_prob;
        if (lacking > MOST_NOISE[63] || log_prob == LOG_ZERO) continue;
        const auto token = tokens.empty() ? static_cast<std::int64_t>(first + i) : tokens[i];
        const std::uint64_t key = child_key(beam.path_key, token);
        const std::uint64_t bits = mix64(key ^ NOISE_DOMAIN, depth_) >> 12;
        const std::uint64_t rest = ((std::uint64_t{1} << 52) - bits) * 2 - 1;
        if (lacking > MOST_NOISE[static_cast<std::size_t>(std::countl_zero(rest))]) continue;
        const double mass = log_prob + beam.log_weight + beam.log_copies;
        const double score = mass + gumbel_noise(key, depth_);
        const Candidate found{score, first + i, beam.index, token, log_prob, key};
        if (best_.size() < num_wanted_) {
            best_.push_back(found);
            if (best_.size() == num_wanted_) std::ranges::make_heap(best_, is_better);
        } else if (is_better(found, best_.front())) {
            std::ranges::pop_heap(best_, is_better);
            best_.back() = found;
            std::ranges::push_heap(best_, is_better);
        }
        needed = least();
    }
}

std::vector<BestByNoise::Candidate> BestByNoise::found() {
    std::ranges::sort(best_, {}, [](const Candidate& each) {
        return std::tuple(each.beam, each.place);
    });
    return std::move(best_);
}

}  // namespace dsbd
