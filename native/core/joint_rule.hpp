// Rule "joint": multi-token joint decoding, MJSD and its reference MJGD (docs/algorithm.md 3.4).
//
// Approximate by design: MJSD trades the target's distribution for a better joint likelihood of the
// accepted tokens (Qin et al. 2024, arXiv 2407.09722). Temperature 0 takes the best next token
// where otherwise one is drawn; the joint likelihoods are then those of temperature 1.
#pragma once

#include <cstddef>
#include <vector>

#include "rule.hpp"
#include "sample_rule.hpp"

namespace dsbd {

/// Base of the rules MJSD and MJGD: beam decoding by joint likelihood.
class JointDecoding : public SelectionRule {
public:
    JointDecoding(const DecodingConfig& config, LayerBuilder& builder);

    /// Return the candidates of largest joint likelihood: beam decoding by the draft.
    Ints propose(JointDistribution& joint, std::size_t num_draws, std::size_t depth) override;
    Floats draft_scores(JointDistribution& joint, std::size_t depth) override;

protected:
    /// Return the `width` continuations of largest joint target likelihood.
    Beams next_beams(ForestRunner& target, const Beams& beams, std::size_t width);
};

/// MJSD: accept the deepest drafted beam whose joint likelihood under the target holds up.
///
/// At each depth a beam passes when its joint target probability over the largest joint draft
/// probability of that depth exceeds `joint_threshold`; a failing shallower depth does not stop a
/// deeper one. Of the deepest passing depth the beam of highest joint target probability is taken,
/// then one more token from the target. With one draft beam this is MJSD's rule for a single
/// sequence, r_i > joint_threshold.
class JointSpeculativeRule final : public JointDecoding {
public:
    JointSpeculativeRule(const DecodingConfig& config, LayerBuilder& builder)
        : JointDecoding(config, builder), gumbel_(builder.forest, false) {}

    std::vector<Beams> select(ForestRunner& target, Beams beams,
                              const std::vector<DraftLayer>& drafted, std::size_t depth) override;

private:
    Nodes accepted_path(ForestRunner& target, const Beams& beams,
                        const std::vector<DraftLayer>& drafted) const;

    GumbelCoupling gumbel_;
};

/// MJGD: the `joint_tokens` tokens of highest joint target likelihood, then the next ones.
///
/// A beam of width `joint_beams` finds them; exact when that covers the tree.
class JointGreedyRule final : public JointDecoding {
public:
    using JointDecoding::JointDecoding;

    std::vector<Beams> select(ForestRunner& target, Beams beams,
                              const std::vector<DraftLayer>& drafted, std::size_t depth) override;
};

}  // namespace dsbd
