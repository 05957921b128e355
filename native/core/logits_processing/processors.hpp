// Logits processors: penalties, bans and biases, as functions of the path (docs/algorithm.md 3.8).
//
// Their meaning and order are those of transformers' processors of the same names, presence and
// frequency penalty OpenAI's. The scores are raw logits, or for rule "search" raw
// log-probabilities.
#pragma once

#include "config.hpp"
#include "logits_processing/candidates.hpp"

namespace dsbd {

/// A deterministic function of the path that changes the scores of the next token.
struct LogitsProcessor {
    /// Change the scores, (n,).
    std::function<void(std::span<double> scores, const Candidates&)> process;
    /// Whether a score may rise: candidates that a top-k head left out may then overtake others.
    std::function<bool(const Candidates&)> may_raise = [](const Candidates&) { return false; };
};

/// Return processors in transformers' order; source: its tokens, or else the prompt's.
std::vector<LogitsProcessor> processors_of(const DecodingConfig& config, std::size_t num_prompt,
                                           std::size_t vocab_size, IntSpan source);

}  // namespace dsbd
