// The joint law over (beam, token) candidates: P(i, v) = w_i * p~(v | x_i), in logs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "token_law.hpp"

namespace dsbd {

/// The "token" by which an ended beam continues: it stays what it is, with probability 1.
constexpr std::int64_t stay_token = -1;

/// Unnormalised. `beams` says of which beam a candidate is a continuation.
struct JointLaw {
    std::vector<std::size_t> nodes;       // (num_beams,) of the forest
    std::vector<std::size_t> beams;       // (num_candidates,), as all below
    std::vector<std::int64_t> tokens;     // stay_token for an ended beam
    std::vector<double> log_weights;      // log w_i + log p~(v | x_i): the child's weight
    std::vector<double> raw_log_probs;    // unwarped, of the token alone
};

/// laws: (num_beams,) the token law after each node; nullptr stands for an ended beam.
inline JointLaw joint_law(const std::vector<std::size_t>& nodes,
                          const std::vector<double>& log_weights,
                          const std::vector<const TokenLaw*>& laws) {
    static const TokenLaw stay{{stay_token}, {0.0}, {0.0}};
    JointLaw joint;
    joint.nodes = nodes;
    for (std::size_t beam = 0; beam < nodes.size(); ++beam) {
        const TokenLaw& law = laws[beam] == nullptr ? stay : *laws[beam];
        joint.beams.insert(joint.beams.end(), law.tokens.size(), beam);
        joint.tokens.insert(joint.tokens.end(), law.tokens.begin(), law.tokens.end());
        joint.raw_log_probs.insert(joint.raw_log_probs.end(), law.raw_log_probs.begin(),
                                   law.raw_log_probs.end());
        for (const double log_prob : law.log_probs) {
            joint.log_weights.push_back(log_prob + log_weights[beam]);
        }
    }
    return joint;
}

/// Return the candidates of largest finite score, best first, ties by the lowest index.
inline std::vector<std::size_t> best_candidates(const std::vector<double>& scores,
                                                std::size_t num_wanted) {
    std::vector<std::size_t> best(scores.size());
    std::iota(best.begin(), best.end(), std::size_t{0});
    const std::size_t num_best = std::min(num_wanted, best.size());
    std::partial_sort(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(num_best),
                      best.end(), [&scores](std::size_t a, std::size_t b) {
                          return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
                      });
    best.resize(num_best);
    while (!best.empty() && scores[best.back()] == -std::numeric_limits<double>::infinity()) {
        best.pop_back();
    }
    return best;
}

}  // namespace dsbd
