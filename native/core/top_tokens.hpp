// The most probable tokens after every committed path, and the log-probabilities of a prompt.
//
// Both are raw, before temperature and the other warpings, over the whole vocabulary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "config.hpp"
#include "engine.hpp"
#include "forward.hpp"

namespace dsbd {

struct Beams;
class Forest;
class Hypotheses;

/// Prompt rows per call if each has logits: bounds these at SCORED_CHUNK x vocabulary.
inline constexpr std::size_t SCORED_CHUNK = 64;

/// Token ids and raw log-probabilities at one position, the most probable first.
using TokenLogprobs = std::vector<std::pair<std::int64_t, double>>;

/// The target's log-probabilities of a prompt's own tokens.
struct PromptLogprobs {
    // After the tokens before it; the first token has none.
    std::vector<std::optional<double>> token_logprobs;
    std::vector<std::optional<TokenLogprobs>> top_logprobs;  // empty without the option
};

/// The most probable tokens after the nodes of a forest, kept for those that are committed.
///
/// By slot (see ForestRunner) as long as a node lives; by hypothesis once its node was a beam.
class TopTokens {
public:
    /// Keep `number` tokens a position for the paths of `hypotheses`.
    TopTokens(std::size_t number, const Forest& forest, const Hypotheses& hypotheses);

    /// Take the logits of nodes whose slots are the next ones.
    void append(const Logits& logits);
    /// Keep slot 0 and these, increasing, which become 1, 2, ...; drop all others.
    void keep(std::span<const std::int64_t> slots);
    /// Keep the tokens after all beams of a layer for good; to be called for the beams at the start
    /// of an iteration and for all that it commits, before it is pruned.
    void observe(const Beams& beams);
    /// Return the most probable tokens in the place of each hypothesis' last token.
    std::vector<TokenLogprobs> of(std::span<const std::int64_t> entries) const;

    const std::size_t number;

private:
    const Forest& forest_;
    const Hypotheses& hypotheses_;
    Ints tokens_;      // (num_slots, number), as the log-probabilities
    Floats logprobs_;
    std::map<std::int64_t, TokenLogprobs> kept_;  // by hypothesis
};

/// Error: an engine with a top-k head does not return these log-probabilities.
void check_top_logprobs(const EngineSpec& target, const DecodingConfig& config);

/// Write the most probable tokens of a row and their raw log-probabilities, (number,) each. Error:
/// an engine with a top-k head returned fewer, and no others can be read.
void top_logprobs_of(const Logits& logits, std::size_t row, std::size_t number,
                     std::int64_t* tokens, double* logprobs);

/// Collects the log-probabilities of a prompt's tokens, call by call.
class PromptScorer {
public:
    /// prompt_ids: the whole prompt. num_top: most probable tokens to keep at a position.
    PromptScorer(std::span<const std::int64_t> prompt_ids, std::size_t num_top);

    /// Take the logits after the next tokens of the prompt.
    void append(const Logits& logits);
    const PromptLogprobs& result() const { return found_; }

private:
    Ints prompt_ids_;
    std::size_t num_top_;
    PromptLogprobs found_;
};

}  // namespace dsbd
