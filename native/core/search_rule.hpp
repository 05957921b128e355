// Rule "search": beam search, token for token what transformers' generate(num_beams=W) returns.
//
// As docs/algorithm.md 3.3 states. A layer takes the K best candidates, K = W * (1 + the number of
// end-of-sequence ids), at least 2 W. The best W that go on are the next beams; those among the
// first W that end enter the pool of at most W finished hypotheses, ranked by logprob / length **
// length_penalty. With one beam this is greedy decoding.
#pragma once

#include "rule.hpp"

namespace dsbd {

/// Deterministic beam search by the target.
std::unique_ptr<SelectionRule> search_rule(const DecodingConfig& config, LayerBuilder& builder);

}  // namespace dsbd
