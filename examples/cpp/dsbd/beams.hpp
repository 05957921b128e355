// Beams: what a request has committed to so far, and how candidates of a layer are ranked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "forest.hpp"
#include "joint_law.hpp"
#include "noise.hpp"

namespace dsbd {

struct Beam {
    std::size_t node = 0;
    double log_weight = 0.0;                  // under the warped laws of the target
    double logprob = 0.0;                     // under the raw ones, as token_logprobs
    std::vector<std::int64_t> token_ids;      // the new tokens
    std::vector<double> token_logprobs;

    /// Return logprob per token, by which sequences are ranked.
    double score() const {
        return logprob / static_cast<double>(token_ids.empty() ? 1 : token_ids.size());
    }
};

/// What ranks the candidates of a law in layer `step`: (num_candidates,) scores.
using Scores =
    std::function<std::vector<double>(const Forest&, const JointLaw&, std::size_t step)>;

/// Sampling: log P + G. The n best are n draws without replacement, for draft and target alike.
inline std::vector<double> sampling_scores(const Forest& forest, const JointLaw& law,
                                           std::size_t step) {
    std::vector<double> scores = law.log_weights;
    for (std::size_t i = 0; i < scores.size(); ++i) {
        const Node& beam = forest[law.nodes[law.beams[i]]];
        scores[i] += gumbel_noise(child_key(beam.path_key, law.tokens[i]), step);
    }
    return scores;
}

/// Search: log P alone.
inline std::vector<double> search_scores(const Forest&, const JointLaw& law, std::size_t) {
    return law.log_weights;
}

/// Return the beams that the chosen candidates make of `beams`.
inline std::vector<Beam> descended(Forest& forest, const std::vector<Beam>& beams,
                                   const JointLaw& law, const std::vector<std::size_t>& chosen) {
    std::vector<Beam> children;
    for (const std::size_t candidate : chosen) {
        Beam child = beams[law.beams[candidate]];
        child.node = forest.descend(law, candidate);
        child.log_weight = law.log_weights[candidate];
        if (law.tokens[candidate] != stay_token) {
            child.logprob += law.raw_log_probs[candidate];
            child.token_ids.push_back(law.tokens[candidate]);
            child.token_logprobs.push_back(law.raw_log_probs[candidate]);
        }
        children.push_back(std::move(child));
    }
    return children;
}

inline std::vector<std::size_t> nodes_of(const std::vector<Beam>& beams) {
    std::vector<std::size_t> nodes;
    for (const Beam& beam : beams) {
        nodes.push_back(beam.node);
    }
    return nodes;
}

inline std::vector<double> log_weights_of(const std::vector<Beam>& beams) {
    std::vector<double> log_weights;
    for (const Beam& beam : beams) {
        log_weights.push_back(beam.log_weight);
    }
    return log_weights;
}

}  // namespace dsbd
