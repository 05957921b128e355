// Distributions over more tokens than a top-k head returns, from its K logits if these suffice.
//
// With top-p or min-p few tokens may be drawn, usually all among the K largest: with the row's
// log-normalizer they bound the mass of the others, and so where the cut lies. A row that they do
// not settle is read whole, as every row is without such a cut; then more of its largest logits
// usually settle it.
#pragma once

#include "distribution.hpp"
#include "warp.hpp"

namespace dsbd {

/// Append the distributions of rows to `known`; ModelError as `Warp`.
///
/// warp: of a sampling request, whose top_k is 0 or more than K. logits: of an engine with a top-k
/// head that keeps all logits.
void append_beyond_top_k(const Warp& warp, const Logits& logits, TokenDistributions& known);

/// Write warped log-probabilities of the K largest logits, -inf if one is cut; return whether they
/// are right. scores: (K,) by decreasing logit. normalizer: at temperature 1, of all V logits.
bool settled(const Warp& warp, FloatSpan scores, double normalizer, std::size_t vocab_size,
             std::span<double> log_probs);

struct MassBounds {
    double least, most;
};
/// Return bounds of the mass of all tokens except the K, if the most probable one weighs 1.
///
/// At temperature 1 their mass M is what the log-normalizer leaves, and none of them weighs more
/// than w, the last of the K. With weights to the power 1 / T their mass is M * w ** (1 / T - 1) if
/// as few as can be have all of M, and n ** (1 - 1 / T) * M ** (1 / T) if all n have as much: in a
/// colder distribution the upper and the lower bound, in a hotter one the other way round.
MassBounds mass_of_others(double temperature, FloatSpan scores, double normalizer,
                          std::size_t vocab_size);

}  // namespace dsbd
