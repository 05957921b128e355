// Reads options, and random numbers of seeds, of a JSON file; prints what they become as JSON.
//
//     options_test FILE    FILE is written by tests/native/test_native_options.py
#include <bit>
#include <fstream>
#include <iostream>

#include <nlohmann/json.hpp>

#include "error.hpp"
#include "option_defaults.hpp"
#include "seed.hpp"

namespace {

using nlohmann::json;

template <class T>
json nullable(const std::optional<T>& value) {
    return value ? json(*value) : json();
}

void add_processing(const dsbd::DecodingConfig& config, json& found) {
    found["repetition_penalty"] = config.repetition_penalty;
    found["presence_penalty"] = config.presence_penalty;
    found["frequency_penalty"] = config.frequency_penalty;
    found["no_repeat_ngram_size"] = config.no_repeat_ngram_size;
    found["encoder_no_repeat_ngram_size"] = config.encoder_no_repeat_ngram_size;
    found["bad_words_ids"] = config.bad_words_ids;
    found["logit_bias"] = config.logit_bias;
    found["suppress_tokens"] = config.suppress_tokens;
    found["begin_suppress_tokens"] = config.begin_suppress_tokens;
    found["no_timestamps_token_id"] = nullable(config.no_timestamps_token_id);
    found["max_initial_timestamp_index"] = nullable(config.max_initial_timestamp_index);
    found["last_timestamp_token_id"] = nullable(config.last_timestamp_token_id);
    found["min_new_tokens"] = config.min_new_tokens;
    found["forced_bos_token_id"] = nullable(config.forced_bos_token_id);
    found["forced_eos_token_id"] = nullable(config.forced_eos_token_id);
    found["processes_logits"] = config.processes_logits();
    found["constraint"] = nullptr;
    if (config.has_constraint()) found["constraint"] = {config.trie_file, config.trie_end};
}

void add_drafting(const dsbd::DecodingConfig& config, json& found) {
    const char* const couplings[] = {"gumbel", "rejection"};
    const char* const widths[] = {"fixed", "threshold"};
    const char* const drafters[] = {"model", "ngram", "model+ngram", "none"};
    const char* const policies[] = {"fixed", "throughput"};
    const char* const memories[] = {"forest", "single"};
    const auto number = [](auto value) { return static_cast<std::size_t>(value); };
    found["coupling"] = config.coupling ? json(couplings[number(*config.coupling)]) : json();
    found["width_policy"] = widths[number(config.width_policy)];
    found["min_beams"] = nullable(config.min_beams);
    found["accept_threshold"] = config.accept_threshold;
    found["drafter"] = drafters[number(config.drafter)];
    found["predicted_text"] = config.predicted_text;
    found["predicted_token_ids"] = config.predicted_token_ids;
    found["draft_policy"] = policies[number(config.draft_policy)];
    found["draft_length"] = config.draft_length;
    found["draft_beams"] = config.draft_beams;
    found["memory"] = memories[number(config.memory)];
    found["replacement"] = config.replacement;
    found["joint_threshold"] = config.joint_threshold;
    found["joint_tokens"] = config.joint_tokens;
    found["joint_beams"] = config.joint_beams;
    found["properties"] = {config.drafts(), config.has_ngram_drafter(), config.has_draft_model(),
                           config.most_draft_beams(), config.smallest_width(),
                           config.widest_search()};
}

json fields(const dsbd::DecodingConfig& config) {
    const json stopping[] = {false, true, "never"};
    json found;
    add_processing(config, found);
    add_drafting(config, found);
    found["strategy"] = config.row->name;
    found["num_beams"] = config.num_beams;
    found["temperature"] = config.temperature;
    found["top_k"] = config.top_k;
    found["top_p"] = config.top_p;
    found["min_p"] = config.min_p;
    found["typical_p"] = config.typical_p;
    found["max_new_tokens"] = config.max_new_tokens;
    found["seed"] = config.seed ? json(static_cast<std::uint64_t>(*config.seed)) : json();
    found["num_return_sequences"] = config.num_return_sequences;
    found["length_penalty"] = config.length_penalty;
    found["early_stopping"] = stopping[static_cast<std::size_t>(config.early_stopping)];
    found["stop_strings"] = config.stop_strings;
    found["eos_token_id"] = nullable(config.eos_token_id);
    found["top_logprobs"] = config.top_logprobs;
    found["prompt_logprobs"] = config.prompt_logprobs;
    found["skip_special_tokens"] = config.skip_special_tokens;
    return found;
}

json config_of(const json& given) {
    return fields(dsbd::decoding_config(given["options"].get<std::string>(),
                                        {given["costs_are_known"], given["has_draft"]}));
}

json config_of_bundle(const json& given) {
    dsbd::BundleFacts facts;
    facts.eos_token_ids = {2};
    facts.context_length = 512;
    facts.num_top_logits = given["num_top_logits"];
    facts.reads_source = given["reads_source"];
    facts.has_draft = given["has_draft"];
    facts.is_for_chats = given["of_chats"];
    facts.generation_config = given["file"];
    facts.generation_config_file = "generation_config.json";
    const auto encode = [](const std::string& text) {
        return dsbd::Ints(text.begin(), text.end());
    };
    const dsbd::ModelDefaults defaults(std::move(facts));
    return fields(defaults.config(given["options"].get<std::string>(), 100, encode));
}

template <class Read>
json all(const json& cases, Read read) {
    json found = json::array();
    for (const json& each : cases) {
        try {
            found.push_back(read(each));
        } catch (const dsbd::Error& error) {
            found.push_back(error.what());
        }
    }
    return found;
}

json draws(const json& seed) {
    const auto upper = dsbd::Uint128{seed[0].get<std::uint64_t>()} << 64;
    dsbd::RandomGenerator random(upper | seed[1].get<std::uint64_t>());
    json found{random.next63()};
    for (int i = 0; i < 1000; ++i) {
        found.push_back(std::bit_cast<std::int64_t>(random.next_double()));
        found.push_back(std::bit_cast<std::int64_t>(random.next_exponential()));
    }
    return found;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return 2;
    std::ifstream file(argv[1]);
    const json given = json::parse(file);
    const json found = {{"configs", all(given["configs"], config_of)},
                        {"of_bundles", all(given["of_bundles"], config_of_bundle)},
                        {"draws", all(given["seeds"], draws)}};
    std::cout << found.dump(-1, ' ', false, json::error_handler_t::replace) << '\n';
}
