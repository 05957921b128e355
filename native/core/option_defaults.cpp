// From the options that a caller gives to the config of the request.
#include "option_defaults.hpp"

#include <random>
#include <utility>

#include "error.hpp"
#include "option_table.hpp"

namespace dsbd {

using options::Json;
using options::OfModel;
using options::OptionRow;
using options::Values;

namespace {

constexpr int LONGEST_CHAT_ANSWER = 2048;  // tokens, for a model that never ends its answer
const char* const DRAFTING[] = {"drafter",     "draft_policy",   "draft_length",
                                "draft_beams", "predicted_text", "predicted_token_ids"};

bool is_given(const Json& options, const std::string& name) {
    return options.contains(name) && !options[name].is_null();
}

bool is_warping(const OptionRow& row) {
    return row.of_model != OfModel::no &&
           std::find(row.needs.begin(), row.needs.end(), &options::NO_SEARCH) != row.needs.end();
}

bool has_warping(const Json& options) {
    const auto& table = options::option_table();
    return std::any_of(table.begin(), table.end(), [&](const OptionRow& row) {
        return is_warping(row) && is_given(options, row.name);
    });
}

/// Read a value of the file; Error: it is invalid.
Json read_of_file(const options::Domain& domain, const std::string& name, const Json& value,
                  const BundleFacts& facts) {
    try {
        return domain(name, value);
    } catch (const Error& error) {
        throw Error(facts.generation_config_file + ": " + error.what() +
                    "; export the bundle again from a checkpoint whose file is right, or open it "
                    "without (--no-generation-config)");
    }
}

/// Return the value of the older name of a length, which counts the prompt; 0: `name` is given.
std::size_t older_length(const Json& content, const std::string& name, const std::string& older,
                         const BundleFacts& facts) {
    if (is_given(content, name) || !is_given(content, older)) return 0;
    const options::Domain& domain = options::row_of(options::Option::min_new_tokens).domain;
    return read_of_file(domain, older, content[older], facts).get<std::size_t>();
}

/// Use the older names of lengths, which count the token that a target begins with.
void add_lengths_of_targets(Json& content, const BundleFacts& facts) {
    for (const auto& [name, older] :
         {std::pair{"max_new_tokens", "max_length"}, std::pair{"min_new_tokens", "min_length"}}) {
        const std::size_t length = older_length(content, name, older, facts);
        if (length > 1) content[name] = length - 1;
    }
}

/// Fields of transformers that change its output and that no request reads, and the values that
/// change nothing.
const Json& unread_fields() {
    static const Json fields = {
#include "unread_fields.inc"
    };
    return fields;
}

Json not_built_of(const Json& content, const BundleFacts& facts) {
    Json found = Json::object();
    for (const auto& [name, neutral] : unread_fields().items()) {
        const bool is_length = name == "max_length";
        const bool is_of_decoder = is_length || name.rfind("forced_", 0) == 0;
        if ((facts.reads_source && is_of_decoder) || !content.contains(name)) continue;
        if (is_length && is_given(content, "max_new_tokens")) continue;
        const Json& value = content[name];
        if (std::find(neutral.begin(), neutral.end(), value) == neutral.end()) found[name] = value;
    }
    return found;
}

/// Whether an option of the file says something with the table's default too: of the others
/// transformers writes what is off.
bool says_default(const std::string& name) {
    return name == "temperature" || name == "top_k" || name == "top_p" || name == "max_new_tokens";
}

Json options_of(const Json& content, const BundleFacts& facts) {
    Json found = Json::object();
    for (const OptionRow& row : options::option_table()) {
        const bool is_of_source =
            row.of_model == OfModel::encoder_decoder || row.name == "num_beams";
        const bool is_read = row.of_model != OfModel::no && (facts.reads_source || !is_of_source);
        if (!is_read || !is_given(content, row.name)) continue;
        const Json value = read_of_file(row.domain, row.name, content[row.name], facts);
        const Json usual = row.name == "num_beams" ? Json(1) : row.usual;
        if (says_default(row.name) || value != usual) found[row.name] = value;
    }
    return found;
}

/// Return the options with a strategy, or with its counterpart at temperature 0.
Json with_named_strategy(const std::string& usual, const Json& given) {
    const bool is_cold = is_given(given, "temperature") && given["temperature"] == 0.0;
    Json named = given;
    named["strategy"] = std::string(named_strategy(usual, is_cold));
    return named;
}

/// Return whether options mean something among the others, and contradict none.
bool are_read(const Json& names, const Json& options) {
    try {
        const options::Chosen chosen = options::checked_options(options);
        return std::all_of(names.items().begin(), names.items().end(), [&](const auto& item) {
            return !options::row_of(options::option_named(item.key())).unmet(chosen);
        });
    } catch (const Error&) {
        return false;
    }
}

bool is_taken(const OptionRow& row, const Strategy& strategy) {
    options::Chosen chosen{};
    chosen[options::Option::strategy] = std::string(strategy.name);
    return std::all_of(row.needs.begin(), row.needs.end(), [&](const options::Condition* need) {
        return need->option != options::Option::strategy || need->is_met(chosen);
    });
}

/// Return options that name a strategy, with the defaults that mean something among them.
Json with_defaults(const Json& options, const Json& defaults) {
    const Strategy& strategy = *find_strategy(options["strategy"].get<std::string>());
    Json left_out = Json::object(), everything = options;
    for (const auto& [name, value] : defaults.items()) {
        const OptionRow& row = options::row_of(options::option_named(name));
        if (options.contains(name) || !is_taken(row, strategy)) continue;
        left_out[name] = everything[name] = value;
    }
    if (left_out.empty() || are_read(left_out, everything)) return everything;
    Json filled = options;
    for (const auto& [name, value] : left_out.items()) {
        Json more = filled;
        more[name] = value;
        if (are_read(Json{{name, value}}, more)) filled = std::move(more);
    }
    return filled;
}

/// Make a predicted text tokens, as many as the context holds; Error: nothing gives them.
void encode_prediction(options::Chosen& chosen, const Encode& encode, std::size_t most_tokens) {
    Json &text = chosen[options::Option::predicted_text],
         &token_ids = chosen[options::Option::predicted_token_ids];
    if (text.is_string() && text != "") {
        if (!token_ids.empty()) {
            throw Error(
                "predicted_text and predicted_token_ids are both given; leave out one of "
                "them");
        }
        if (!encode) {
            throw Error(
                "predicted_text is given, but this bundle has no native text; give "
                "predicted_token_ids");
        }
        token_ids = encode(text.get<std::string>());
    }
    text = nullptr;
    if (token_ids.size() > most_tokens) {
        token_ids.erase(token_ids.begin() + static_cast<std::ptrdiff_t>(most_tokens),
                        token_ids.end());
    }
}

void check_drafter(const DecodingConfig& config, const BundleFacts& facts) {
    if (facts.has_draft || !config.has_draft_model()) return;
    const std::string fix = "or add a draft with: dsbd-export --bundle BUNDLE --draft DRAFT";
    if (config.row->rule == Rule::joint) {
        throw Error("strategy is '" + std::string(config.row->name) +
                    "', which needs a draft model, but the bundle has no draft; use another "
                    "strategy, " +
                    fix);
    }
    const bool is_alone = config.drafter == DrafterKind::model;
    throw Error("drafter is '" + std::string(is_alone ? "model" : "model+ngram") +
                "', but the bundle has no draft: expected 'ngram' or 'none'; " + fix);
}

}  // namespace

/// options: of generation_config.json, in plain form; chat_options: of chats, unless those have
/// them; min_length: fewest tokens of prompt and output together, of a decoder.
struct ModelDefaults::Given {
    Json options = Json::object(), chat_options = Json::object(), not_built = Json::object();
    std::size_t min_length = 0;

    Json search_of_source_reader(const Json& given, bool has_draft) const {
        const Json num_beams =
            is_given(given, "num_beams") ? given["num_beams"] : options.value("num_beams", Json(1));
        Json named = given;
        const bool gives_drafting =
            std::any_of(std::begin(DRAFTING), std::end(DRAFTING),
                        [&](const char* name) { return is_given(given, name); });
        const bool drafts = has_draft || gives_drafting;
        named["strategy"] = drafts           ? "speculative-beam-search"
                            : num_beams == 1 ? "greedy"
                                             : "beam-search";
        if (drafts || num_beams != 1) named["num_beams"] = num_beams;
        return named;
    }

    /// Leave out the options that cannot work on the top logits alone.
    void leave_out_processors() {
        for (const OptionRow& row : options::option_table()) {
            if (!row.is_processor || row.of_model != OfModel::any) continue;
            if (!options.contains(row.name)) continue;
            not_built[row.name] = options[row.name];
            options.erase(row.name);
        }
        if (min_length) not_built["min_length"] = std::exchange(min_length, 0);
    }

    /// Return the defaults of requests with a strategy.
    Json of(const Strategy& strategy, const Json& given, const BundleFacts& facts) const {
        const bool is_beam_search = strategy.rule == Rule::search && strategy.has_beams;
        Json defaults = chat_options;
        defaults.update(options);
        for (const OptionRow& row : options::option_table()) {
            if (row.of_model == OfModel::search && !is_beam_search) defaults.erase(row.name);
        }
        if (facts.num_top_logits && !given.contains("top_k") && strategy.rule != Rule::search) {
            const Json top_k = defaults.value("top_k", Json(0));
            if (top_k < 1 || top_k > facts.num_top_logits) defaults["top_k"] = facts.num_top_logits;
        }
        return defaults;
    }
};

ModelDefaults::ModelDefaults(BundleFacts facts) : facts_(std::move(facts)) {
    auto found = std::make_shared<Given>();
    Json content = Json::object();
    if (!facts_.generation_config.empty()) {
        content = options::json_object(facts_.generation_config, facts_.generation_config_file);
    }
    if (facts_.reads_source) {
        add_lengths_of_targets(content, facts_);
    } else {
        found->min_length = older_length(content, "min_new_tokens", "min_length", facts_);
    }
    found->options = options_of(content, facts_);
    found->not_built = not_built_of(content, facts_);
    if (facts_.num_top_logits) found->leave_out_processors();
    if (facts_.is_for_chats && !facts_.reads_source) {
        if (!has_warping(found->options)) {
            found->chat_options = {{"temperature", 0.7}, {"top_p", 0.9}};
        }
        found->chat_options["max_new_tokens"] = LONGEST_CHAT_ANSWER;
    }
    given_ = std::move(found);
}

DecodingConfig ModelDefaults::config(std::string_view options, std::size_t num_prompt_tokens,
                                     const Encode& encode) const {
    Json given = options::read_options(options::json_object(options, "options"));
    if (!is_given(given, "eos_token_id")) given["eos_token_id"] = facts_.eos_token_ids;
    if (!is_given(given, "seed")) given["seed"] = std::random_device{}();
    const bool gives_length = given.contains("max_new_tokens");
    const bool gives_least = given.contains("min_new_tokens");
    if (!is_given(given, "strategy")) {
        const bool is_cold = is_given(given, "temperature") && given["temperature"] == 0.0;
        const bool searches = facts_.reads_source && (is_cold || !has_warping(given));
        given = searches ? given_->search_of_source_reader(given, facts_.has_draft)
                         : with_named_strategy("dsbd", given);
    }
    const Strategy& row = *find_strategy(given["strategy"].get<std::string>());
    options::Chosen chosen =
        options::checked_options(with_defaults(given, given_->of(row, given, facts_)));
    encode_prediction(chosen, encode, facts_.context_length);
    DecodingConfig config = options::settled(std::move(chosen), facts_.has_draft, true);
    check_drafter(config, facts_);
    if (!gives_length && num_prompt_tokens < facts_.context_length) {
        config.max_new_tokens =
            std::min(config.max_new_tokens, facts_.context_length - num_prompt_tokens);
    }
    if (!gives_least && given_->min_length > num_prompt_tokens) {
        const std::size_t least = given_->min_length - num_prompt_tokens;
        config.min_new_tokens =
            std::max(config.min_new_tokens, std::min(least, config.max_new_tokens));
    }
    return config;
}

std::string ModelDefaults::not_built() const { return given_->not_built.dump(); }

}  // namespace dsbd
