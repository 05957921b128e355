// The results of a request: its iterations' outputs, its sequences and their statistics.
#pragma once

#include "beams.hpp"
#include "rule.hpp"
#include "stats.hpp"
#include "top_tokens.hpp"

namespace dsbd {

/// Why a sequence has ended: by an end-of-sequence id, by a stop string or constraint, by length.
enum class FinishReason : std::uint8_t { eos, stop, length };

/// Return "eos", "stop" or "length".
inline std::string_view name_of(FinishReason reason) {
    return reason == FinishReason::eos ? "eos" : reason == FinishReason::stop ? "stop" : "length";
}

/// One returned sequence.
struct DecodedSequence {
    Ints token_ids;         // the new tokens, those included that end the sequence
    Floats token_logprobs;  // raw log-probability of every new token under the target
    double logprob = 0.0;   // their sum
    double score = 0.0;     // logprob / num_new_tokens ** length_penalty, the ranking
    FinishReason finish_reason = FinishReason::length;
    // The most probable tokens in the place of every new token, with `top_logprobs` in the request.
    std::vector<TokenLogprobs> top_logprobs;
};

/// The sequences, best first, and the statistics of a request.
struct DecodeResult {
    std::vector<DecodedSequence> sequences;
    DecodingStats stats;
    std::size_t distribution_bytes_peak = 0;  // of the distributions of nodes, of both engines
    std::optional<PromptLogprobs> prompt_logprobs;
};

/// The live hypotheses after one iteration of the loop; valid while its receiver runs.
struct IterationOutput {
    const Hypotheses& hypotheses;
    const Ints& live;
    Agreement& agreement;
    const StatsRecorder& recorder;
    const TopTokens* tops;  // null without `top_logprobs` in the request

    /// New tokens, from the first on, that all live hypotheses share: they are final.
    const Ints& agreed_tokens() const {
        agreement.update(live);
        return agreement.tokens;
    }
    /// Hypotheses of the agreed tokens from number `start` on.
    IntSpan agreed(std::size_t start) const {
        return IntSpan(agreement.entries).subspan(std::min(start, agreed_tokens().size()));
    }
    /// Raw log-probabilities of the agreed tokens from number `start` on.
    Floats agreed_logprobs(std::size_t start) const {
        return entries_at(hypotheses.token_logprobs, agreed(start));
    }
};

}  // namespace dsbd
