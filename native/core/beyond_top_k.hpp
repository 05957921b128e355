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

}  // namespace dsbd
