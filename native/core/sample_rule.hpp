// Rule "sample": layers drawn from the target's distribution (docs/algorithm.md 3.1, 3.2).
//
// And the width of layers by policy "threshold" (3.5).
#pragma once

#include "rule.hpp"

namespace dsbd {

/// The drawn candidates of a layer, and whether the next layer may be drawn.
struct Choice {
    Ints drawn;
    bool may_go_on = true;
};

/// How the draws of draft and target are correlated.
class DrawCoupling {
public:
    virtual ~DrawCoupling() = default;
    /// Return the draft's candidates of one layer in order, (<= num_draws,).
    virtual Ints propose(const JointDistribution& joint, std::size_t num_draws,
                         std::size_t depth) = 0;
    /// Draw the target's candidates. layer: null if none was drafted.
    virtual Choice choose(const JointDistribution& joint, const DraftLayer* layer,
                          std::size_t num_draws, std::size_t depth) = 0;
    /// Return the scores by which `propose` ranks candidates, (num_candidates,); draws have none.
    virtual Floats scores(const JointDistribution&, std::size_t) const { return {}; }

    bool keeps_descendants = true;
    bool reads_draft_distributions = false;
    // Whether a choice reads the candidates of largest log mass plus noise alone.
    bool reads_best_by_noise = false;
};

/// Coupling "gumbel" (docs/algorithm.md 3.1): draft and target see the same noise.
///
/// By the Gumbel-top-k theorem (Kool et al. 2019, section 2.3) the n candidates of largest
/// log P + G, in that order, are n sequential draws without replacement from P. G belongs to (seed,
/// path, token, depth), not to a model, so the draft's candidates are the target's wherever the two
/// distributions are close (Daliri et al. 2024), and the output depends on the target alone.
class GumbelCoupling final : public DrawCoupling {
public:
    GumbelCoupling(const Forest& forest, bool replacement)
        : forest_(forest), replacement_(replacement) {
        reads_best_by_noise = !replacement;
    }

    /// With replacement, draw j has a noise of its own and takes the single best.
    Ints propose(const JointDistribution& joint, std::size_t num_draws, std::size_t depth) override;
    Choice choose(const JointDistribution& joint, const DraftLayer*, std::size_t num_draws,
                  std::size_t depth) override {
        return {propose(joint, num_draws, depth), true};
    }
    /// Return log P + G of every candidate, (num_candidates,).
    Floats scores(const JointDistribution& joint, std::size_t depth) const override;

private:
    const Forest& forest_;
    bool replacement_;
};

/// Beam sampling: draws with or without replacement until all beams are absorbing.
///
/// Or until `early_stopping` ends it, a function of the beams alone: so what is returned is the
/// same with and without speculation, and every layer has the same distribution as without it.
std::unique_ptr<SelectionRule> sample_rule(const DecodingConfig& config, LayerBuilder& builder,
                                           std::unique_ptr<DrawCoupling> coupling);

/// Return n_t, the width of a drafted layer whose candidates have the distribution `joint`.
///
/// It reads the distributions of draft and target alone, never what was drawn in this layer:
/// otherwise width and content would be correlated and the output not that of beam sampling.
std::size_t layer_width(const DecodingConfig& config, const JointDistribution& joint,
                        const DraftLayer& layer);

/// Return the largest n in [least, most] with Pr[at least n accepted] >= threshold.
///
/// waits: see `waiting_distribution`. If no n reaches the threshold: `least`. The n-th acceptance
/// comes after the sum of n waits, so that probability is the mass which their n-fold convolution
/// has within the drafts. It never grows with n, which takes powers of two from the highest on.
std::size_t threshold_width(const Floats& waits, std::size_t most, std::size_t least,
                            double threshold);

/// Return Pr[the k-th draft after an acceptance is the next accepted], (num_drafts,).
///
/// p, q: target and draft distribution on the target's candidates; q may sum to less than 1. In
/// terms of docs/algorithm.md 3.5 this is beta. The residual after k rejections is
/// max(0, p - c_k q) / M(c_k) with M(c) = sum max(0, p - c q), c_0 = 0 and
/// c_{k+1} = c_k + M(c_k): subtracting q from a normalised residual subtracts M(c_k) q from what it
/// was. So Pr[the first k drafts are rejected] = M(c_k), and M is a sum over the candidates above
/// one ratio p / q.
Floats waiting_distribution(const Floats& p, const Floats& q, std::size_t num_drafts);

}  // namespace dsbd
