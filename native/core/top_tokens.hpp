// The most probable tokens after every committed path, and the log-probabilities of a prompt.
//
// Both are raw, before temperature and the other warpings, over the whole vocabulary.
#pragma once

#include <map>

#include "config.hpp"
#include "engine.hpp"

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
    /// Keep `num_tokens` tokens a position for the paths of `hypotheses`.
    TopTokens(std::size_t num_tokens, const Forest& forest, const Hypotheses& hypotheses)
        : number(num_tokens), forest_(forest), hypotheses_(hypotheses) {}

    /// Take the logits of nodes whose slots are the next ones.
    void append(const Logits& logits);
    /// Keep slot 0 and these, increasing, which become 1, 2, ...; drop all others.
    void keep(IntSpan slots);
    /// Keep the tokens after all beams of a layer for good; to be called for the beams at the start
    /// of an iteration and for all that it commits, before it is pruned.
    void observe(const Beams& beams);
    /// Return the most probable tokens in the place of each hypothesis' last token.
    std::vector<TokenLogprobs> of(IntSpan entries) const;

    const std::size_t number;

private:
    const Forest& forest_;
    const Hypotheses& hypotheses_;
    std::vector<TokenLogprobs> by_slot_{1};
    std::map<std::int64_t, TokenLogprobs> kept_;  // by hypothesis
};

/// Error: an engine with a top-k head does not return these log-probabilities.
void check_top_logprobs(const EngineSpec& target, const DecodingConfig& config);

/// Return the most probable tokens of a row. Error: an engine with a top-k head returned fewer, and
/// no others can be read.
TokenLogprobs top_logprobs_of(const Logits& logits, std::size_t row, std::size_t number);

/// Collects the log-probabilities of a prompt's tokens, call by call.
class PromptScorer {
public:
    /// prompt_ids: the whole prompt. num_top: most probable tokens to keep at a position.
    PromptScorer(IntSpan prompt_ids, std::size_t num_top);

    /// Take the logits after the next tokens of the prompt.
    void append(const Logits& logits);
    const PromptLogprobs& result() const { return found_; }

private:
    Ints prompt_ids_;
    std::size_t num_top_;
    PromptLogprobs found_;
};

}  // namespace dsbd
