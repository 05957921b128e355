// Statistics of a request.
#include "stats.hpp"

#include <algorithm>
#include <utility>

namespace dsbd {

StatsRecorder::StatsRecorder(std::int64_t num_prompt_tokens, const Meter& target,
                             const Meter& draft, Clock clock, std::string_view drafter,
                             std::int64_t num_cached_tokens)
    : num_prompt_tokens_(num_prompt_tokens),
      target_(target),
      draft_(draft),
      clock_(std::move(clock)),
      drafter_(drafter),
      num_cached_tokens_(num_cached_tokens),
      began_(clock_()) {}

void StatsRecorder::observe(const Iteration& iteration) {
    if (!first_token_at_) first_token_at_ = clock_();
    num_draft_layers_ += static_cast<std::int64_t>(iteration.drafted.size());
    num_draft_tokens_ += iteration.num_draft_tokens;
    num_accepted_tokens_ += iteration.num_accepted_tokens;
    ++num_iterations_;
    const std::size_t num_accepted = iteration.committed.size() - 1;
    num_accepted_layers_ += static_cast<std::int64_t>(num_accepted);
    histogram_.resize(std::max(histogram_.size(), num_accepted + 1));
    ++histogram_[num_accepted];
    for (const Beams& beams : iteration.committed) {
        ++num_layers_;
        sum_of_widths_ += std::max<std::int64_t>(static_cast<std::int64_t>(beams.width()), 1);
    }
}

DecodingStats StatsRecorder::stats(std::int64_t num_output_tokens) const {
    const double now = clock_(), total = now - began_;
    const double first = first_token_at_.value_or(now) - began_;
    const auto ratio = [](auto part, auto whole) {
        return static_cast<double>(part) / static_cast<double>(whole);
    };
    DecodingStats found;
    found.num_iterations = num_iterations_;
    found.num_draft_tokens = num_draft_tokens_;
    found.num_accepted_tokens = num_accepted_tokens_;
    found.num_draft_layers = num_draft_layers_;
    found.num_accepted_layers = num_accepted_layers_;
    found.mean_acceptance_length = 1.0 + ratio(num_accepted_layers_, num_iterations_);
    if (num_draft_tokens_) {
        found.draft_acceptance_rate = ratio(num_accepted_tokens_, num_draft_tokens_);
    }
    found.acceptance_histogram = histogram_;
    found.mean_beam_width = ratio(sum_of_widths_, num_layers_);
    found.num_prompt_tokens = num_prompt_tokens_;
    found.num_cached_tokens = num_cached_tokens_;
    found.num_output_tokens = num_output_tokens;
    found.target_rows = target_.rows;
    found.draft_rows = draft_.rows;
    found.target_calls = target_.calls;
    found.draft_calls = draft_.calls;
    found.time_to_first_token_s = first;
    if (num_output_tokens > 1) {
        found.time_per_output_token_s = ratio(total - first, num_output_tokens - 1);
    }
    found.tokens_per_s = total > 0.0 ? static_cast<double>(num_output_tokens) / total : 0.0;
    found.draft_s = draft_.engine_s;
    found.target_s = target_.engine_s;
    found.host_s = total - target_.engine_s - draft_.engine_s;
    found.drafter = drafter_;
    return found;
}

}  // namespace dsbd
