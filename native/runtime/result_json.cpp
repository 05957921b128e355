// The JSON of a result, as `dsbd-run --json` prints it (results.py).
#include <string>

#include "runtime/service.hpp"

namespace dsbd {

namespace {

constexpr int JSON_VERSION = 1;

Json json_of(const std::vector<TokenLogprobs>& tops) {
    Json list = Json::array();
    for (const TokenLogprobs& top : tops) list.push_back(Json(top));
    return list;
}

template <class T>
Json or_null(const std::optional<T>& value) {
    return value ? Json(*value) : Json();
}

Json json_of(const DecodedSequence& sequence, const std::string* text) {
    Json found{{"text", text ? Json(*text) : Json()},
               {"token_ids", sequence.token_ids},
               {"token_logprobs", sequence.token_logprobs},
               {"logprob", sequence.logprob},
               {"score", sequence.score},
               {"finish_reason", name_of(sequence.finish_reason)}};
    if (!sequence.top_logprobs.empty()) found["top_logprobs"] = json_of(sequence.top_logprobs);
    return found;
}

Json json_of(const DecodingStats& stats) {
    return {{"num_iterations", stats.num_iterations},
            {"num_draft_tokens", stats.num_draft_tokens},
            {"num_accepted_tokens", stats.num_accepted_tokens},
            {"num_draft_layers", stats.num_draft_layers},
            {"num_accepted_layers", stats.num_accepted_layers},
            {"mean_acceptance_length", stats.mean_acceptance_length},
            {"draft_acceptance_rate", or_null(stats.draft_acceptance_rate)},
            {"acceptance_histogram", stats.acceptance_histogram},
            {"mean_beam_width", stats.mean_beam_width},
            {"num_prompt_tokens", stats.num_prompt_tokens},
            {"num_output_tokens", stats.num_output_tokens},
            {"num_cached_tokens", stats.num_cached_tokens},
            {"target_rows", stats.target_rows},
            {"draft_rows", stats.draft_rows},
            {"target_calls", stats.target_calls},
            {"draft_calls", stats.draft_calls},
            {"time_to_first_token_s", stats.time_to_first_token_s},
            {"time_per_output_token_s", or_null(stats.time_per_output_token_s)},
            {"tokens_per_s", stats.tokens_per_s},
            {"draft_s", stats.draft_s},
            {"target_s", stats.target_s},
            {"host_s", stats.host_s},
            {"kv_bytes_peak", or_null(stats.kv_bytes_peak)},
            {"energy_joules", nullptr},
            {"drafter", stats.drafter}};
}

Json json_of(const PromptLogprobs& prompt) {
    Json token_logprobs = Json::array(), tops = Json::array();
    for (const auto& each : prompt.token_logprobs) token_logprobs.push_back(or_null(each));
    for (const auto& each : prompt.top_logprobs) tops.push_back(or_null(each));
    return {{"token_logprobs", token_logprobs},
            {"top_logprobs", prompt.top_logprobs.empty() ? Json() : tops}};
}

}  // namespace

std::string GenerationResult::json() const {
    Json sequences = Json::array();
    for (std::size_t i = 0; i < decoded.sequences.size(); ++i) {
        sequences.push_back(json_of(decoded.sequences[i], texts.empty() ? nullptr : &texts[i]));
    }
    Json result{{"sequences", sequences}, {"stats", json_of(decoded.stats)}, {"seed", seed}};
    if (decoded.prompt_logprobs) result["prompt_logprobs"] = json_of(*decoded.prompt_logprobs);
    result["version"] = JSON_VERSION;
    return result.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace dsbd
