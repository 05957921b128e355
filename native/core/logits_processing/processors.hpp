// Logits processors: penalties, bans and biases, as functions of the path (docs/algorithm.md 3.8).
//
// Their meaning and order are those of transformers' processors of the same names, presence and
// frequency penalty OpenAI's. The scores are raw logits, or for rule "search" raw
// log-probabilities.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "config.hpp"
#include "logits_processing/candidates.hpp"

namespace dsbd {

/// Return processors in transformers' order; source: its tokens, or else the prompt's.
std::vector<std::unique_ptr<LogitsProcessor>> processors_of(const DecodingConfig& config,
                                                            std::size_t num_prompt,
                                                            std::size_t vocab_size,
                                                            std::span<const std::int64_t> source);

}  // namespace dsbd
