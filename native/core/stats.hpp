// Statistics of a request: its cost and the acceptance of its drafts.
#pragma once

#include "drafting/draft.hpp"
#include "engine_call.hpp"

namespace dsbd {

/// Statistics of one request. Tokens are nodes of the forest, layers hold one or more of them.
struct DecodingStats {
    std::int64_t num_iterations = 0;       // of draft, verify, select, prune
    std::int64_t num_draft_tokens = 0;     // drafted nodes; one that stays counts once
    std::int64_t num_accepted_tokens = 0;  // drafted nodes that were committed
    std::int64_t num_draft_layers = 0;     // drafted layers, summed over iterations
    std::int64_t num_accepted_layers = 0;  // committed beyond the one that every iteration gives
    double mean_acceptance_length = 0.0;   // 1 + accepted layers / iterations
    std::optional<double> draft_acceptance_rate;  // accepted / drafted tokens
    std::vector<std::int64_t> acceptance_histogram;  // [j]: iterations that accepted j layers
    double mean_beam_width = 0.0;  // beams kept per committed layer, mean
    std::int64_t num_prompt_tokens = 0, num_output_tokens = 0;  // the latter of the best sequence
    std::int64_t num_cached_tokens = 0;  // of the prompt, whose rows an earlier request computed
    std::int64_t target_rows = 0, draft_rows = 0;  // computed, the prompt's included
    std::int64_t target_calls = 0, draft_calls = 0;  // engine calls
    double time_to_first_token_s = 0.0;  // from the request to the first committed layer
    std::optional<double> time_per_output_token_s;  // per further token of the best sequence
    double tokens_per_s = 0.0;  // of the best sequence, of the whole request
    double draft_s = 0.0, target_s = 0.0;  // in the engines, shared calls whole
    double host_s = 0.0;  // everything else
    std::optional<std::int64_t> kv_bytes_peak;  // of caches and distributions; set by the caller
    std::string_view drafter = "none";
};

/// Counts the iterations of a request and measures its time.
class StatsRecorder final : public Observer {
public:
    /// The meters live as long as the recorder. drafter: what proposes, an option of the request.
    StatsRecorder(std::int64_t num_prompt_tokens, const Meter& target, const Meter& draft,
                  Clock clock, std::string_view drafter, std::int64_t num_cached_tokens = 0);

    void observe(const Iteration& iteration) override;
    DecodingStats stats(std::int64_t num_output_tokens) const;

private:
    DecodingStats counted_;  // what `observe` counts, and what is known from the beginning
    const Meter &target_, &draft_;
    Clock clock_;
    double began_;
    std::optional<double> first_token_at_;
    std::int64_t num_layers_ = 0, sum_of_widths_ = 0;
};

}  // namespace dsbd
