// The table of options.
#include "option_table.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "error.hpp"

namespace dsbd::options {
namespace {

using enum Option;
using enum OfModel;
using Values = std::vector<Json>;

constexpr std::int64_t MOST = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t MOST_BEAMS = 1024, MOST_LAYERS = 1024, MOST_NODES = 16'384;
constexpr double USUAL_THRESHOLD = 0.7, LARGEST = std::numeric_limits<double>::max();

bool is_drafting_free(const Strategy& row) {
    return row.has_draft && (row.rule == Rule::sample || row.rule == Rule::search);
}
bool is_dsbd(const Strategy& row) {
    return row.rule == Rule::sample && row.has_draft && row.has_beams;
}

const char* const WITH_BEAMS = "one with beams such as dsbd";
const char* const THAT_SAMPLES = "one that samples such as dsbd";
const Condition HAS_BEAMS{strategy, [](const Chosen& o) { return o.row().has_beams; }, WITH_BEAMS};
const Condition HAS_DRAFT{strategy, [](const Chosen& o) { return o.row().has_draft; },
                          "one with a draft such as dsbd"};
const Condition HAS_DRAFT_TREE{strategy, [](const Chosen& o) { return o.row().has_draft_tree; },
                               "one that drafts a tree such as tree-speculative"};
const Condition SAMPLES{strategy, [](const Chosen& o) { return o.row().rule == Rule::sample; },
                        THAT_SAMPLES};
const Condition SEVERAL_DRAWS{
    strategy, [](const Chosen& o) { return o.row().has_beams || o.row().has_draft_tree; },
    WITH_BEAMS};
const Condition MJSD{strategy, [](const Chosen& o) { return o.row().rule == Rule::joint; }, "mjsd"};
const Condition MJGD{strategy, [](const Chosen& o) { return o.row().rule == Rule::joint_greedy; },
                     "mjgd"};
const Condition DSBD{strategy, [](const Chosen& o) { return is_dsbd(o.row()); }, "dsbd"};
const Condition FREE_OF_THE_DRAFT{strategy,
                                  [](const Chosen& o) { return is_drafting_free(o.row()); },
                                  "one whose output need not depend on its draft, such as dsbd"};
const Condition DRAFTING{drafter, [](const Chosen& o) { return o[drafter] != "none"; },
                         "'model' or 'ngram'"};
const Condition DRAFTED_LAYERS{draft_length, [](const Chosen& o) { return o[draft_length] != 0; },
                               "at least 1"};
const Condition THRESHOLD{width_policy,
                          [](const Chosen& o) { return o[width_policy] == "threshold"; },
                          "'threshold'"};
const Condition EVERY_BEAM{memory, [](const Chosen& o) { return o[memory] == "forest"; },
                           "'forest'"};
const Condition HAS_TIMES{no_timestamps_token_id,
                          [](const Chosen& o) { return !o[no_timestamps_token_id].is_null(); },
                          "the token before the times of a speech model"};
const Condition BY_NGRAMS{drafter,
                          [](const Chosen& o) {
                              const Json& by = o[drafter];
                              return by.is_null() || by == "ngram" || by == "model+ngram";
                          },
                          "'ngram' or 'model+ngram'"};

std::function<Values(const Chosen&)> always(Values values) {
    return [values = std::move(values)](const Chosen&) { return values; };
}
std::function<Json(const Chosen&)> usually(Json value) {
    return [value = std::move(value)](const Chosen&) { return value; };
}

bool is_predicted(const Chosen& o) {
    const Json& text = o[predicted_text];
    return (text.is_string() && text != "") || !o[predicted_token_ids].empty();
}

Json half_width(const Chosen& o) { return std::max<std::int64_t>(1, o.whole(num_beams) / 2); }

Values fixed_width(const Chosen& o) { return {nullptr, o[num_beams], half_width(o)}; }

Values undrafted(const Chosen& o) { return {o.row().has_draft ? "model" : "none"}; }

Json usual_strategy(const Chosen& o) { return std::string(named_strategy("dsbd", o.is_cold)); }

Json usual_drafter(const Chosen& o) {
    if (!o.has_draft) return nullptr;
    return !*o.has_draft ? "ngram" : is_predicted(o) ? "model+ngram" : "model";
}

/// "threshold" if one of its options is given and it is possible.
Json usual_width_policy(const Chosen& o) {
    const bool is_given = !o[min_beams].is_null() || o[accept_threshold] != USUAL_THRESHOLD;
    const bool is_possible = o[draft_length] != 0 && o[draft_policy] != "throughput";
    return is_given && is_possible ? "threshold" : "fixed";
}

/// "fixed" if a shape is given or the output depends on the draft.
Json usual_draft_policy(const Chosen& o) {
    const bool has_shape = !o[draft_length].is_null() || !o[draft_beams].is_null();
    const bool depends_on_draft = o[coupling] == "rejection" || o[width_policy] == "threshold";
    if (has_shape || depends_on_draft) return "fixed";
    if (o[memory] == "single" || o[replacement] == true) return "fixed";
    if (!o.costs_are_known) return nullptr;
    return *o.costs_are_known ? "throughput" : "fixed";
}

Json usual_draft_length(const Chosen& o) {
    if (o[draft_policy].is_null()) return nullptr;
    return o[draft_policy] == "fixed" ? 4 : is_predicted(o) ? 16 : 8;
}

/// The candidates of a layer, or their limit; null as long as that is open.
Json usual_draft_beams(const Chosen& o) {
    const std::int64_t usual = o.row().has_beams ? o.whole(num_beams) : 4;
    if (o[draft_policy] == "throughput") {
        const std::int64_t layers = std::max<std::int64_t>(o.whole(draft_length), 1);
        return std::max(usual, std::min(4 * usual, MOST_NODES / layers));
    }
    return o[draft_policy] == "fixed" ? Json(usual) : Json();
}

/// The values of draft_beams if there is no tree to draft.
Values one_path(const Chosen& o) {
    if (o[draft_length].is_null()) return {nullptr, 1};
    const Json layers = std::vector<int>(static_cast<std::size_t>(o.whole(draft_length)), 1);
    return layers.empty() ? Values{layers} : Values{layers, 1};
}

OptionRow processor(const char* name, Domain domain, Json usual, OfModel of_model = no) {
    OptionRow row{.name = name, .domain = std::move(domain), .usual = std::move(usual)};
    row.is_processor = true;
    row.of_model = of_model;
    return row;
}

OptionRow warping(const char* name, Domain domain, Json usual, bool is_redundant_if_cold = false) {
    OptionRow row{.name = name, .domain = std::move(domain), .usual = std::move(usual)};
    row.needs = {&NO_SEARCH};
    row.is_redundant_if_cold = is_redundant_if_cold;
    row.of_model = any;
    return row;
}

std::vector<OptionRow> rows_of_beams() {
    Values names;
    for (const Strategy& each : STRATEGIES) names.push_back(std::string(each.name));
    return {
        {.name = "strategy", .domain = one_of(names, false), .usual = {},
         .usual_of = usual_strategy},
        {.name = "num_beams", .domain = Whole{1, MOST_BEAMS}, .usual = {}, .usual_of = usually(4),
         .needs = {&HAS_BEAMS}, .neutral = always({1}), .of_model = search},
        {.name = "num_return_sequences", .domain = Whole{1, MOST_BEAMS}, .usual = 1,
         .needs = {&HAS_BEAMS}},
        {.name = "length_penalty", .domain = Number{-30.0, 30.0}, .usual = 1.0,
         .of_model = search},
        {.name = "early_stopping", .domain = one_of({false, true, "never"}), .usual = false,
         .needs = {&HAS_BEAMS, &EVERY_BEAM}, .of_model = search},
    };
}

std::vector<OptionRow> rows_of_drafts() {
    const Whole tokens{0, MOST};
    return {
        {.name = "coupling", .domain = one_of({"gumbel", "rejection"}), .usual = {},
         .usual_of = usually("gumbel"), .needs = {&SAMPLES}, .neutral = always({nullptr})},
        {.name = "width_policy", .domain = one_of({"fixed", "threshold"}), .usual = {},
         .usual_of = usual_width_policy, .needs = {&DSBD}, .neutral = always({"fixed"})},
        {.name = "drafter", .domain = one_of({"model", "ngram", "model+ngram", "none"}),
         .usual = {}, .usual_of = usual_drafter, .needs = {&FREE_OF_THE_DRAFT},
         .neutral = undrafted},
        {.name = "predicted_text", .domain = any_text, .usual = {},
         .needs = {&FREE_OF_THE_DRAFT, &BY_NGRAMS}},
        {.name = "predicted_token_ids", .domain = Wholes{tokens, 1 << 17, "token id", true},
         .usual = Json::array(), .needs = {&FREE_OF_THE_DRAFT, &BY_NGRAMS}},
        {.name = "draft_policy", .domain = one_of({"fixed", "throughput"}), .usual = {},
         .usual_of = usual_draft_policy, .needs = {&FREE_OF_THE_DRAFT, &DRAFTING},
         .neutral = always({"fixed"})},
        {.name = "draft_length", .domain = Whole{0, MOST_LAYERS}, .usual = {},
         .usual_of = usual_draft_length, .needs = {&HAS_DRAFT, &DRAFTING}, .neutral = always({0})},
        {.name = "draft_beams", .domain = Wholes{{1, MOST_NODES}, MOST_LAYERS}, .usual = {},
         .usual_of = usual_draft_beams, .needs = {&HAS_DRAFT, &DRAFTED_LAYERS, &HAS_DRAFT_TREE},
         .neutral = one_path},
        {.name = "min_beams", .domain = Whole{1, MOST_BEAMS}, .usual = {}, .usual_of = half_width,
         .needs = {&DSBD, &THRESHOLD, &DRAFTED_LAYERS}, .neutral = fixed_width},
        {.name = "accept_threshold", .domain = Number{0.0, 1.0}, .usual = USUAL_THRESHOLD,
         .needs = {&DSBD, &THRESHOLD, &DRAFTED_LAYERS}},
        {.name = "memory", .domain = one_of({"forest", "single"}), .usual = "forest",
         .needs = {&DSBD}},
        {.name = "replacement", .domain = one_of({false, true}), .usual = false,
         .needs = {&SAMPLES, &SEVERAL_DRAWS}},
    };
}

std::vector<OptionRow> rows_of_sampling_and_length() {
    const Whole token{0, MOST}, top_k{0, MOST, true};
    OptionRow temperature = warping("temperature", Number{0.0, LARGEST, false, 1e-6}, 1.0);
    temperature.neutral = always({1.0, 0.0});
    return {
        temperature,
        warping("top_k", top_k, 0, true),
        warping("top_p", Number{0.0, 1.0, true}, 1.0, true),
        warping("min_p", Number{0.0, 1.0}, 0.0, true),
        warping("typical_p", Number{0.0, 1.0, true}, 1.0),
        {.name = "seed", .domain = seed_number, .usual = {}},
        {.name = "max_new_tokens", .domain = Whole{1, MOST}, .usual = 64, .of_model = any},
        processor("min_new_tokens", token, 0, any),
        {.name = "stop_strings", .domain = stop_texts, .usual = {},
         .usual_of = usually(Json::array())},
        {.name = "eos_token_id", .domain = Wholes{token, 1024, "token id", true}, .usual = {}},
        processor("forced_eos_token_id", token, nullptr, encoder_decoder),
        processor("forced_bos_token_id", token, nullptr, encoder_decoder),
    };
}

std::vector<OptionRow> rows_of_processors() {
    const Whole token{0, MOST}, ngram{0, 1024};
    const Wholes tokens{token, 65'536, "token id", true};
    const Json none = Json::array();
    return {
        processor("repetition_penalty", Number{1e-6, 1e6}, 1.0, any),
        processor("presence_penalty", Number{-1e6, 1e6}, 0.0),
        processor("frequency_penalty", Number{-1e6, 1e6}, 0.0),
        processor("no_repeat_ngram_size", ngram, 0, any),
        processor("encoder_no_repeat_ngram_size", ngram, 0, any),
        processor("bad_words_ids", token_sequences, none, any),
        processor("logit_bias", biases, none),
        processor("suppress_tokens", tokens, none, any),
        processor("begin_suppress_tokens", tokens, none, any),
        processor("no_timestamps_token_id", token, nullptr),
        {.name = "max_initial_timestamp_index", .domain = token, .usual = {},
         .needs = {&HAS_TIMES}},
        {.name = "last_timestamp_token_id", .domain = token, .usual = {}, .needs = {&HAS_TIMES}},
        processor("logits_processors", nothing, none),
        processor("scorers", nothing, none),
        processor("constraint", trie, nullptr),
    };
}

std::vector<OptionRow> rows_of_text_and_joint() {
    return {
        {.name = "top_logprobs", .domain = Whole{0, 20}, .usual = 0},
        {.name = "prompt_logprobs", .domain = one_of({false, true}), .usual = false},
        {.name = "skip_special_tokens", .domain = one_of({false, true}), .usual = true},
        {.name = "joint_threshold", .domain = Number{0.0, LARGEST, true}, .usual = {},
         .usual_of = usually(0.1), .needs = {&MJSD}},
        {.name = "joint_tokens", .domain = Whole{1, MOST}, .usual = {}, .usual_of = usually(4),
         .needs = {&MJGD}},
        {.name = "joint_beams", .domain = Whole{1, MOST_BEAMS}, .usual = {}, .usual_of = usually(4),
         .needs = {&MJGD}},
    };
}

/// Return the value of an option that all above it in the table have been resolved for.
Json resolved(const OptionRow& row, const Json& value, const Chosen& options) {
    const Condition* unmet = row.unmet(options);
    if (!unmet) return value.is_null() ? row.default_of(options) : value;
    const Values neutral = row.neutral ? row.neutral(options) : Values{row.default_of(options)};
    const bool is_neutral = std::find(neutral.begin(), neutral.end(), value) != neutral.end();
    if (value.is_null() || is_neutral || (row.is_redundant_if_cold && options.is_cold)) {
        return neutral[0];
    }
    const std::string& decider = row_of(unmet->option).name;
    const Json& decided = options[unmet->option];
    throw Error(row.name + " is " + shown(value, true) + ", which means nothing " +
                (unmet->option == strategy ? "to strategy " + decided.get<std::string>()
                                           : "with " + decider + " " + shown(decided, true)) +
                "; leave it out, or set " + decider + " to " + unmet->remedy);
}

Chosen resolved_all(Chosen chosen) {
    chosen.is_cold = chosen[temperature] == 0.0;
    for (const OptionRow& row : option_table()) {
        if (row.needs.empty() && !row.usual_of) continue;
        const auto index = static_cast<std::size_t>(&row - option_table().data());
        chosen.values[index] = resolved(row, chosen.values[index], chosen);
    }
    if (chosen[draft_beams].is_number()) {
        const std::int64_t layers = chosen[draft_length].is_null() ? 0 : chosen.whole(draft_length);
        chosen[draft_beams] =
            std::vector<std::int64_t>(static_cast<std::size_t>(layers), chosen.whole(draft_beams));
    }
    return chosen;
}

}  // namespace

const Condition NO_SEARCH{strategy, [](const Chosen& o) { return o.row().rule != Rule::search; },
                          THAT_SAMPLES};

const Strategy& Chosen::row() const {
    return *find_strategy((*this)[strategy].get_ref<const std::string&>());
}

const Condition* OptionRow::unmet(const Chosen& options) const {
    const auto found = std::find_if(needs.begin(), needs.end(), [&](const Condition* need) {
        return !need->is_met(options);
    });
    return found == needs.end() ? nullptr : *found;
}

Json OptionRow::read(const Json& value) const {
    const bool takes_none = usual.is_null() || usual_of;
    return value.is_null() && takes_none ? value : domain(name, value);
}

const std::vector<OptionRow>& option_table() {
    static const std::vector<OptionRow> table = [] {
        std::vector<OptionRow> rows = rows_of_beams();
        for (auto part : {rows_of_drafts(), rows_of_sampling_and_length(), rows_of_processors(),
                          rows_of_text_and_joint()}) {
            rows.insert(rows.end(), part.begin(), part.end());
        }
        return rows;
    }();
    return table;
}

const OptionRow& row_of(Option option) { return option_table()[static_cast<std::size_t>(option)]; }

Option option_named(const std::string& name) {
    const auto& table = option_table();
    const auto found = std::find_if(table.begin(), table.end(),
                                    [&](const OptionRow& row) { return row.name == name; });
    if (found != table.end()) return static_cast<Option>(found - table.begin());
    std::vector<std::string> names;
    for (const OptionRow& row : table) names.push_back(row.name);
    const std::string close = did_you_mean(name, names);
    const char* const expected = "; expected a field of DecodingConfig (docs/run.md lists them)";
    throw Error("unknown option " + shown(name) + (close.empty() ? expected : close));
}

Json read_options(const Json& given) {
    std::vector<std::string> names;
    for (const auto& [name, value] : given.items()) names.push_back(name);
    std::sort(names.begin(), names.end());
    for (const std::string& name : names) option_named(name);
    Json read = Json::object();
    for (const auto& [name, value] : given.items()) {
        read[name] = row_of(option_named(name)).read(value);
    }
    return read;
}

Chosen resolved_options(const Json& read, std::optional<bool> has_draft,
                        std::optional<bool> costs_are_known) {
    Chosen chosen{.values = {}, .has_draft = has_draft, .costs_are_known = costs_are_known};
    for (const OptionRow& row : option_table()) {
        chosen.values[static_cast<std::size_t>(&row - option_table().data())] = row.usual;
    }
    for (const auto& [name, value] : read.items()) chosen[option_named(name)] = value;
    return resolved_all(std::move(chosen));
}

Chosen resolved_options(Chosen chosen, bool has_draft, bool costs_are_known) {
    chosen.has_draft = has_draft;
    chosen.costs_are_known = costs_are_known;
    return resolved_all(std::move(chosen));
}

}  // namespace dsbd::options
