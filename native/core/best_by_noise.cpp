// The candidates of largest log mass plus noise, without the noise of all.
#include "best_by_noise.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <numbers>
#include <tuple>

#include "noise.hpp"

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

/// Return a bound of the noise bits that lift a mass which lacks so much.
std::uint64_t least_noise(double lacking) {
    const double share = std::exp(MARGIN - lacking);  // of all numbers
    if (!(share < 1.0)) return 0;
    constexpr std::uint64_t ALL = std::uint64_t{1} << (NOISE_BITS - 1);
    const auto number = static_cast<std::uint64_t>(share * static_cast<double>(ALL)) + 2;
    return (ALL - std::min(number, ALL)) << (64 - NOISE_BITS + 1);
}

}  // namespace

float largest_of(std::span<const float> logits) {
    constexpr std::size_t LANES = 16;
    float lanes[LANES];
    std::fill_n(lanes, LANES, logits[0]);
    std::size_t first = 0;
    for (; first + LANES <= logits.size(); first += LANES) {
        const float* const some = &logits[first];
        for (std::size_t k = 0; k < LANES; ++k) lanes[k] = some[k] > lanes[k] ? some[k] : lanes[k];
    }
    for (; first < logits.size(); ++first) lanes[0] = std::max(lanes[0], logits[first]);
    return *std::max_element(lanes, lanes + LANES);
}

double BestByNoise::least(const NoisyBeam& beam) const {
    const double score = best_.size() < num_wanted_ ? floor_ : best_.front().score;
    return score - beam.log_weight - beam.log_copies;
}

void BestByNoise::consider(const NoisyBeam& beam, std::size_t place, std::int64_t token,
                           double log_prob) {
    const double lacking = least(beam) - log_prob;
    if (lacking > MOST_NOISE[63] || log_prob == LOG_ZERO) return;
    const std::uint64_t key = child_key(beam.path_key, token);
    const std::uint64_t bits = mix64(key ^ NOISE_DOMAIN, depth_) >> 12;
    const std::uint64_t rest = ((std::uint64_t{1} << 52) - bits) * 2 - 1;
    if (lacking > MOST_NOISE[static_cast<std::size_t>(std::countl_zero(rest))]) return;
    const double mass = log_prob + beam.log_weight + beam.log_copies;
    const double score = mass + gumbel_noise(key, depth_);
    const Candidate found{score, place, beam.index, token, log_prob, key};
    if (best_.size() < num_wanted_) {
        best_.push_back(found);
        if (best_.size() == num_wanted_) std::ranges::make_heap(best_, is_better);
    } else if (is_better(found, best_.front())) {
        std::ranges::pop_heap(best_, is_better);
        best_.back() = found;
        std::ranges::push_heap(best_, is_better);
    }
}

void BestByNoise::consider(const NoisyBeam& beam, const Continuations& all) {
    for (std::size_t i = 0; i < all.log_probs.size(); ++i) {
        const auto token = all.tokens.empty() ? static_cast<std::int64_t>(i) : all.tokens[i];
        consider(beam, i, token, all.log_probs[i]);
    }
}

void BestByNoise::consider(const NoisyBeam& beam, const WholeRow& row) {
    for (std::size_t first = 0; first < row.logits.size(); first += WholeRow::BLOCK) {
        const auto block = row.block(first);
        const double most = row.log_prob(largest_of(block));
        const double lacking = least(beam) - most;
        if (lacking > MOST_NOISE[63] || most == LOG_ZERO) continue;
        const std::uint64_t least_bits = least_noise(lacking);
        for (std::size_t place = first; place < first + block.size(); ++place) {
            const auto token = static_cast<std::int64_t>(place);
            const std::uint64_t key = child_key(beam.path_key, token);
            if (mix64(key ^ NOISE_DOMAIN, depth_) < least_bits) continue;
            consider(beam, place, token, row.log_prob_of(place));
        }
    }
}

std::vector<BestByNoise::Candidate> BestByNoise::found() {
    std::ranges::sort(best_, {},
                      [](const Candidate& each) { return std::tuple(each.beam, each.place); });
    return std::move(best_);
}

}  // namespace dsbd
