// Layers of beams that may be continued by all tokens.
#include "whole_layer.hpp"

namespace dsbd {

WholeLayer::WholeLayer(TokenDistributions& distributions, std::span<const std::int64_t> rows,
                       std::span<const double> log_weights)
    : distributions_(distributions),
      rows_(rows.begin(), rows.end()),
      log_weights_(log_weights.begin(), log_weights.end()),
      begins_{0} {
    for (const auto row : rows) {
        begins_.push_back(begins_.back() + (row ? distributions.num_tokens(row) : 1));
    }
}

std::size_t WholeLayer::beam_of(std::size_t candidate) const {
    if (candidate < begins_[beam_] || candidate >= begins_[beam_ + 1]) {
        const auto after = std::ranges::upper_bound(begins_, candidate);
        beam_ = static_cast<std::size_t>(after - begins_.begin()) - 1;
    }
    return beam_;
}

void WholeLayer::consider(std::size_t beam, std::uint64_t path_key, BestByNoise& best) const {
    const NoisyBeam noisy{static_cast<std::int64_t>(beam), path_key, log_weights_[beam], 0.0};
    if (has_ended(beam)) return best.consider(noisy, STAYS);
    distributions_.consider(rows_[beam], noisy, best);
}

std::int64_t WholeLayer::parent(std::size_t candidate) const {
    return static_cast<std::int64_t>(beam_of(candidate));
}

std::int64_t WholeLayer::token(std::size_t candidate) const {
    const std::size_t beam = beam_of(candidate);
    return has_ended(beam) ? STAY : static_cast<std::int64_t>(candidate - begins_[beam]);
}

double WholeLayer::log_weight(std::size_t candidate) const {
    const std::size_t beam = beam_of(candidate);
    if (has_ended(beam)) return log_weights_[beam];
    return whole(beam).log_prob_of(candidate - begins_[beam]) + log_weights_[beam];
}

double WholeLayer::raw_log_prob(std::size_t candidate) const {
    const std::size_t beam = beam_of(candidate);
    if (has_ended(beam)) return 0.0;
    return distributions_.raw_log_prob(rows_[beam], candidate - begins_[beam]);
}

Ints WholeLayer::best(std::size_t num_wanted) const {
    BestByMass found(num_wanted);
    for (std::size_t beam = 0; beam < num_beams(); ++beam) {
        const std::size_t first = begins_[beam];
        const double log_weight = log_weights_[beam];
        if (has_ended(beam)) {
            found.consider(first, log_weight);
            continue;
        }
        const WholeRow row = whole(beam);
        for (std::size_t begin = 0; begin < row.logits.size(); begin += WholeRow::BLOCK) {
            const auto block = row.block(begin);
            const double most = row.log_prob(largest_of(block)) + log_weight;
            if (!(most > found.least())) continue;
            for (std::size_t i = begin; i < begin + block.size(); ++i) {
                found.consider(first + i, row.log_prob_of(i) + log_weight);
            }
        }
    }
    return found.best();
}

double WholeLayer::largest_mass() const {
    double largest = LOG_ZERO;
    for (std::size_t beam = 0; beam < num_beams(); ++beam) {
        double mass = log_weights_[beam];
        if (!has_ended(beam)) {
            const LogProb log_prob = whole(beam).log_prob;
            mass += log_prob(static_cast<float>(log_prob.largest));
        }
        largest = std::max(largest, mass);
    }
    return largest;
}

void WholeLayer::write_masses(std::size_t first, std::size_t size, double* found) const {
    for (const std::size_t end = first + size; first < end;) {
        const std::size_t beam = beam_of(first);
        const std::size_t count = std::min(end, begin(beam + 1)) - first;
        const double log_weight = log_weights_[beam];
        if (has_ended(beam)) {
            *found = log_weight;
        } else {
            const WholeRow row = whole(beam);
            const float* const logits = row.logits.data() + (first - begin(beam));
            log_probs_of(logits, count, row.log_prob, found);
            for (std::size_t i = 0; i < count; ++i) found[i] += log_weight;
        }
        first += count;
        found += count;
    }
}

}  // namespace dsbd
