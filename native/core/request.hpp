// A decoding request, and the checks before any work: its prompt and options, the models.
#pragma once

#include "config.hpp"
#include "engine.hpp"
#include "engine_call.hpp"
#include "kv_cache.hpp"
#include "result.hpp"
#include "seed.hpp"

namespace dsbd {

class AcceptanceEstimator;
class Costs;
class NGramPool;
class StopState;

/// Seconds of the machine's monotonic clock.
double seconds_now();

/// A prompt and everything else, the models aside, that its continuation depends on.
struct DecodingRequest {
    Ints prompt_ids;        // at least one token id
    DecodingConfig config;  // resolved; `eos_token_id` none: nothing ends a sequence
    RandomGenerator random;  // its first draw is the noise key; only the rejection coupling goes on
    std::shared_ptr<const StopState> stop = nullptr;  // that of the empty continuation; null: none
    Clock clock = seconds_now;
    std::shared_ptr<Costs> costs = nullptr;  // of engine calls, for draft policy "throughput"
    std::shared_ptr<AcceptanceEstimator> estimator = nullptr;  // of earlier requests; is updated
    std::shared_ptr<NGramPool> ngram_pool = nullptr;  // texts of earlier requests; this is added
    std::function<std::size_t()> num_sharers = [] { return std::size_t{1}; };  // of engine calls
    SourcePointer source = nullptr;
    /// That begins every text, if the prompt begins with it: a draft that reads only the end of the
    /// prompt reads it first.
    std::optional<std::int64_t> begin_token = {};
    /// Tokens that the output may repeat, as those of the source; the predicted ones come first.
    Ints copied_ids = {};
    std::function<Ints()> late_ids = nullptr;  // the same, none until they are known
    /// Receives every iteration; an exception, such as Cancelled, ends the request with it.
    std::function<void(const IterationOutput&)> on_iteration = nullptr;
    /// For tests: whether the request's rows are dropped before this engine call and computed
    /// again; of several requests the youngest is asked.
    std::function<bool(const EngineCall&)> preempts = nullptr;

    /// The part of the prompt whose rows may be reused: none of the target's with
    /// `prompt_logprobs`, as such rows have no logits any more.
    RowIdentity reusable_prompt(Role role) const;
    /// Whether an engine's path begins where DraftContext says, not at the prompt.
    bool chooses_start(Role role, const EngineSpec& spec) const;
    /// Why a sequence of these new tokens has ended.
    FinishReason finish_reason(const Ints& token_ids) const;
};

/// Throw Error for a prompt, models or a missing stop state that cannot be decoded.
void check_request(const DecodingRequest& request, const EngineSpec& target,
                   const EngineSpec* draft);

}  // namespace dsbd
