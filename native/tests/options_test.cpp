// Reads options, and random numbers of seeds, of a JSON file; prints what they become as JSON.
//
//     options_test FILE    FILE is written by tests/native/test_native_options.py
#include <bit>
#include <fstream>
#include <iostream>

#include <nlohmann/json.hpp>

#include "error.hpp"
#include "option_defaults.hpp"
#include "option_table.hpp"
#include "seed.hpp"

namespace {

using nlohmann::json;

using dsbd::options::Option;

template <class T>
json json_of(Option option, const T& value) {
    if constexpr (std::is_enum_v<T>) {
        return dsbd::options::choices_of(option)[static_cast<std::size_t>(value)];
    } else if constexpr (std::is_same_v<T, dsbd::Uint128>) {
        return static_cast<std::uint64_t>(value);
    } else {
        return value;
    }
}
template <class T>
json json_of(Option option, const std::optional<T>& value) {
    return value ? json_of(option, *value) : json();
}

json fields(const dsbd::DecodingConfig& config) {
    json found;
#define OPTION(name, ...) found[#name] = json_of(Option::name, config.name);
#define PROCESSOR OPTION
#define OTHER_OPTION(name, ...)
#include "options.inc"
    found["strategy"] = config.row->name;
    const std::size_t context = config.draft_context;
    if (context == dsbd::AUTO_CONTEXT) found["draft_context"] = "auto";
    if (context == dsbd::WHOLE_CONTEXT) found["draft_context"] = "all";
    found["constraint"] = nullptr;
    if (config.has_constraint()) found["constraint"] = {config.trie_file, config.trie_end};
    found["processes_logits"] = config.processes_logits();
    found["properties"] = {config.drafts(),          config.has_ngram_drafter(),
                           config.has_draft_model(), config.most_draft_beams(),
                           config.smallest_width(),  config.widest_search()};
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
    json found = fields(defaults.config(given["options"].get<std::string>(), 100, encode));
    found["not_built"] = json::parse(defaults.not_built());
    return found;
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
