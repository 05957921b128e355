// A decoding request, and the checks before any work: its prompt and options, the models.
#include "request.hpp"

#include <chrono>

#include "drafting/draft_context.hpp"
#include "error.hpp"
#include "logits_processing/constraint.hpp"
#include "logits_processing/path_states.hpp"

namespace dsbd {
namespace {

std::string range_of(const EngineSpec& target) {
    return "expected 0 to " + std::to_string(target.vocab_size - 1) + ", the target's vocabulary";
}

/// Return the first of these ids that is not in the target's vocabulary.
std::optional<std::int64_t> outside(const Ints& ids, const EngineSpec& target) {
    for (const auto id : ids) {
        if (id < 0 || at(id) >= target.vocab_size) return id;
    }
    return std::nullopt;
}

void check_prompt(const Ints& prompt_ids, const EngineSpec& target) {
    if (prompt_ids.empty()) throw Error("the prompt has no token; give at least one");
    if (const auto token = outside(prompt_ids, target)) {
        throw Error("the prompt has token id " + std::to_string(*token) + "; expected 0 to " +
                    std::to_string(target.vocab_size - 1) + ", the vocabulary of the target");
    }
}

void check_ids(const char* name, const Ints& ids, const EngineSpec& target) {
    if (const auto token = outside(ids, target)) {
        throw Error(name + (" has token id " + std::to_string(*token)) + "; " + range_of(target));
    }
}

void check_token_ids(const DecodingConfig& config, const EngineSpec& target) {
    const auto check = [&](const char* name, const Ints& ids) { check_ids(name, ids, target); };
    const auto check_one = [&](const char* name, std::optional<std::int64_t> id) {
        if (id) check(name, {*id});
    };
    for (const auto& bias : config.logit_bias) check("logit_bias", {bias.first});
    check("predicted_token_ids", config.predicted_token_ids);
    for (const Ints& word : config.bad_words_ids) check("bad_words_ids", word);
    check("suppress_tokens", config.suppress_tokens);
    check("begin_suppress_tokens", config.begin_suppress_tokens);
    check_one("no_timestamps_token_id", config.no_timestamps_token_id);
    check_one("last_timestamp_token_id", config.last_timestamp_token_id);
    check_one("forced_bos_token_id", config.forced_bos_token_id);
    check_one("forced_eos_token_id", config.forced_eos_token_id);
}

void check_draft(const DecodingConfig& config, const EngineSpec& target, const EngineSpec* draft) {
    if (!draft) {
        throw Error("there is no draft model, but strategy " + std::string(config.row->name) +
                    " drafts by a model; give a draft model, drafter 'ngram', or a strategy "
                    "without a draft such as beam-sample");
    }
    if (draft->vocab_size != target.vocab_size) {
        throw Error("draft has " + std::to_string(draft->vocab_size) + " tokens, target " +
                    std::to_string(target.vocab_size) + "; use a pair that shares its vocabulary");
    }
    if (draft->reads_source && !target.reads_source) {
        throw Error(
            "the draft is an encoder-decoder's and reads a source, which requests to this "
            "target do not have; use a pair that both read one");
    }
    if (draft->reads_features && !target.returns_features) {
        throw Error(
            "the draft reads features of its target, but the target returns none; use the "
            "target of the same bundle, exported with --features");
    }
}

}  // namespace

double seconds_now() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
}

RowIdentity DecodingRequest::reusable_prompt(Role role) const {
    if (role == Role::target && config.prompt_logprobs) return {{}, source};
    return {Ints(prompt_ids.begin(), prompt_ids.end() - 1), source};
}

bool DecodingRequest::chooses_start(Role role, const EngineSpec& spec) const {
    return role == Role::draft && !reads_whole_path(spec, source);
}

FinishReason DecodingRequest::finish_reason(const Ints& token_ids) const {
    if (config.is_eos(token_ids.back())) return FinishReason::eos;
    if (auto state = stop) {
        for (std::size_t i = config.min_new_tokens; i < token_ids.size(); ++i) {
            state = state->extended(token_ids[i]);
        }
        if (state->has_ended()) return FinishReason::stop;
    }
    if (config.constraint) {
        auto state = config.constraint->start(prompt_ids);
        for (auto token : token_ids) state = config.constraint->advance(state, token);
        if (config.constraint->has_ended(state)) return FinishReason::stop;
    }
    return FinishReason::length;
}

void check_request(const DecodingRequest& request, const EngineSpec& target,
                   const EngineSpec* draft) {
    const DecodingConfig& config = request.config;
    check_prompt(request.prompt_ids, target);
    if (!config.stop_strings.empty() && !request.stop) {
        throw Error(
            "stop_strings is given, but decoding sees tokens, not text; give the request "
            "a stop state as well");
    }
    if (!config.predicted_text.empty() && config.predicted_token_ids.empty()) {
        throw Error(
            "predicted_text is given, but decoding sees tokens, not text; give "
            "predicted_token_ids");
    }
    if (!config.trie_file.empty() && !config.constraint) {
        throw Error("the trie '" + config.trie_file + "' is not open; set the constraint as well");
    }
    if (const auto token = outside(config.eos_token_id.value_or(Ints{}), target)) {
        throw Error("eos_token_id has " + std::to_string(*token) + "; " + range_of(target));
    }
    check_token_ids(config, target);
    if (target.reads_source && !request.source) {
        throw Error(
            "the request has no source, but the target is an encoder-decoder's, whose "
            "rows depend on one; give the tokens of its source");
    }
    if (config.has_draft_model()) check_draft(config, target, draft);
}

}  // namespace dsbd
