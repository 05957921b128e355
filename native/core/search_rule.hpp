// Rule "search": beam search, token for token what transformers' generate(num_beams=W) returns.
//
// As docs/algorithm.md 3.3 states. A layer takes the K best candidates, K = W * (1 + the number of
// end-of-sequence ids), at least 2 W. The best W that go on are the next beams; those among the
// first W that end enter the pool of at most W finished hypotheses, ranked by logprob / length **
// length_penalty. With one beam this is greedy decoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rule.hpp"

namespace dsbd {

/// Deterministic beam search by the target, with the pool of finished hypotheses.
class SearchRule final : public SelectionRule {
public:
    SearchRule(const DecodingConfig& config, LayerBuilder& builder);

    /// Return the draft's best candidates that go on: an ended one is never a beam.
    Ints propose(JointDistribution& joint, std::size_t num_draws, std::size_t depth) override;
    /// Return the log-weight of every candidate, -inf if it ends: (num_candidates,).
    Floats draft_scores(JointDistribution& joint, std::size_t depth) override;
    std::vector<Beams> select(ForestRunner& target, Beams beams,
                              const std::vector<DraftLayer>& drafted, std::size_t depth) override;
    bool is_finished(const Beams& beams, std::size_t num_layers) override;
    Ints live(const Beams& beams) override;
    Finished ended() override { return pool_; }
    Finished results(const Beams&) override { return pool_; }

private:
    void add_finished(const Beams& beams, const JointDistribution& joint, const Ints& finished);
    Beams next_beams(const Beams& beams, const JointDistribution& joint, const Ints& best,
                     std::size_t depth);

    std::size_t num_candidates_;
    Finished pool_;
};

}  // namespace dsbd
