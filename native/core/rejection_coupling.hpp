// Rule "sample", coupling "rejection" (docs/algorithm.md 3.2): the paper's scheme, made exact.
//
//     p: the target's joint distribution P_t, q: the draft's Q_t, R: the residual, O: the outputs.
//
// Exact because, given the whole history, candidate s_j has law q_j and the output in progress has
// law R, and one step of speculative sampling (Leviathan et al. 2023, theorem 3.5) keeps that law.
// Nothing may look at a drawn candidate before its turn.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sample_rule.hpp"
#include "seed.hpp"

namespace dsbd {

/// Coins and draws of a generator.
///
/// Index i is drawn after an exponential time of rate p_i: the shortest times are the draws without
/// replacement (the Gumbel-top-k theorem in other words). Rounding changes a choice only if two
/// candidates nearly tie; with the cumulative distribution it would move all boundaries.
class RandomSource {
public:
    explicit RandomSource(RandomGenerator& random) : random_(random) {}

    /// Toss a coin that shows heads with `probability`.
    bool happens(double probability) { return random_.next_double() < probability; }
    /// Draw indices of positive probability one by one, (<= num_draws,), none twice. total: of the
    /// masses; 1: they are probabilities.
    Ints draw_distinct(const Floats& masses, std::size_t num_draws, double total = 1.0);
    /// Draw an index of a normalised distribution that has a positive one.
    std::int64_t draw(const Floats& probabilities) { return draw_distinct(probabilities, 1)[0]; }

private:
    RandomGenerator& random_;
};

/// Accepts or rejects the drafted candidates one by one.
///
/// Computed descendants of the beams are dropped: drafts must be drawn afresh every iteration.
class RejectionCoupling final : public DrawCoupling {
public:
    RejectionCoupling(RandomGenerator& random, bool replacement);

    Ints propose(const JointDistribution& joint, std::size_t num_draws, std::size_t) override;
    /// The next layer may be drawn if all outputs are accepted drafts.
    Choice choose(const JointDistribution& joint, const DraftLayer* layer, std::size_t num_draws,
                  std::size_t) override;

private:
    struct Accepted {
        Ints outputs;          // the accepted candidates in order
        bool is_whole = true;  // whether the residual, that of the output in progress, is p itself
        Floats residual;  // else
    };
    Accepted accept(const JointDistribution& joint, const DraftLayer& layer,
                    std::size_t num_wanted);
    Ints fill(Accepted accepted, std::size_t num_wanted);

    RandomSource source_;
    bool replacement_;
    Floats p_, q_;  // of the layer in progress
};

}  // namespace dsbd
