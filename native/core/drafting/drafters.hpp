// Drafters: where the distributions of drafted layers come from (docs/algorithm.md 3.9).
//
// If the output does not depend on the draft, anything that gives a distribution over the next
// tokens of a path may draft. Each path is drafted by the first of these that can: the constraint,
// if it leaves one token, if nothing can follow the next one, or if the whole layer is worth
// drafting; the n-gram drafter; the draft model.
#pragma once

#include "drafting/draft.hpp"
#include "drafting/ngram.hpp"
#include "logits_processing/allowed_after.hpp"

namespace dsbd {

class ForestRunner;
class RequestProcessing;

/// Return a drafter that asks, for each path, the first of constraint, n-gram drafter and model
/// that can draft; `observe` lets the n-gram drafter learn the committed tokens.
///
/// Null: not there. The drafters live as long as this one. proposes_ends: whether the constraint
/// may draft for paths that end with their next token, as if all tokens were equally likely: not if
/// the draft's distributions are read.
std::unique_ptr<Drafter> chained_drafter(const Forest& forest, RequestProcessing* processing,
                                         NGramDrafter* ngram, ForestRunner* model,
                                         bool proposes_ends = true);

}  // namespace dsbd
