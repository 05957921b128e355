// Statistics of a request.
#include "stats.hpp"

namespace dsbd {

StatsRecorder::StatsRecorder(std::int64_t num_prompt_tokens, const Meter& target,
                             const Meter& draft, Clock clock, std::string_view drafter,
                             std::int64_t num_cached_tokens)
    : target_(target), draft_(draft), clock_(std::move(clock)), began_(clock_()) {
    counted_.num_prompt_tokens = num_prompt_tokens;
    counted_.num_cached_tokens = num_cached_tokens;
    counted_.drafter = drafter;
}

void StatsRecorder::observe(const Iteration& iteration) {
    if (!first_token_at_) first_token_at_ = clock_();
    counted_.num_draft_layers += static_cast<std::int64_t>(iteration.drafted.size());
    counted_.num_draft_tokens += iteration.num_draft_tokens;
    counted_.num_accepted_tokens += iteration.num_accepted_tokens;
    ++counted_.num_iterations;
    const std::size_t num_accepted = iteration.committed.size() - 1;
    counted_.num_accepted_layers += static_cast<std::int64_t>(num_accepted);
    std::vector<std::int64_t>& histogram = counted_.acceptance_histogram;
    histogram.resize(std::max(histogram.size(), num_accepted + 1));
    ++histogram[num_accepted];
    for (const Beams& beams : iteration.committed) {
        ++num_layers_;
        sum_of_widths_ += std::max<std::int64_t>(static_cast<std::int64_t>(beams.width()), 1);
    }
}

DecodingStats StatsRecorder::stats(std::int64_t num_output_tokens) const {
    const double now = clock_(), total = now - began_;
    const auto ratio = [](auto part, auto whole) {
        return static_cast<double>(part) / static_cast<double>(whole);
    };
    DecodingStats found = counted_;
    found.mean_acceptance_length = 1.0 + ratio(found.num_accepted_layers, found.num_iterations);
    if (found.num_draft_tokens) {
        found.draft_acceptance_rate = ratio(found.num_accepted_tokens, found.num_draft_tokens);
    }
    found.mean_beam_width = ratio(sum_of_widths_, num_layers_);
    found.num_output_tokens = num_output_tokens;
    found.target_rows = target_.rows;
    found.draft_rows = draft_.rows;
    found.target_calls = target_.calls;
    found.draft_calls = draft_.calls;
    if (!found.num_draft_layers && !found.draft_calls) found.drafter = "none";
    found.time_to_first_token_s = first_token_at_.value_or(now) - began_;
    if (num_output_tokens > 1) {
        found.time_per_output_token_s =
            ratio(total - found.time_to_first_token_s, num_output_tokens - 1);
    }
    found.tokens_per_s = total > 0.0 ? static_cast<double>(num_output_tokens) / total : 0.0;
    found.draft_s = draft_.engine_s;
    found.target_s = target_.engine_s;
    found.host_s = total - target_.engine_s - draft_.engine_s;
    return found;
}

}  // namespace dsbd
