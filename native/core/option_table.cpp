// The table of options.
#include "option_table.hpp"

#include <limits>

#include "error.hpp"

namespace dsbd::options {

using enum Option;
using enum OfModel;

#include "conditions.inc"

namespace {

constexpr double LARGEST = std::numeric_limits<double>::max();

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
    const bool is_given =
        !o[min_beams].is_null() || o[accept_threshold] != row_of(accept_threshold).usual;
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

/// Return the value of an option that all above it in the table have been resolved for.
Json resolved(const OptionRow& row, const Json& value, const Chosen& options) {
    const Condition* unmet = row.unmet(options);
    if (!unmet) return value.is_null() ? row.default_of(options) : value;
    const Values neutral = row.neutral ? row.neutral(options) : Values{row.default_of(options)};
    const bool is_neutral = is_among(neutral, value);
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
        chosen[draft_beams] = std::vector<std::int64_t>(at(layers), chosen.whole(draft_beams));
    }
    return chosen;
}

}  // namespace

const Strategy& Chosen::row() const {
    return *find_strategy((*this)[strategy].get_ref<const std::string&>());
}

const Condition* OptionRow::unmet(const Chosen& options) const {
    const auto found = std::find_if(needs.begin(), needs.end(),
                                    [&](const Condition* need) { return !need->is_met(options); });
    return found == needs.end() ? nullptr : *found;
}

Json OptionRow::read(const Json& value) const {
    const bool takes_none = usual.is_null() || usual_of;
    return value.is_null() && takes_none ? value : domain(name, value);
}

const std::vector<OptionRow>& option_table() {
    static const std::vector<OptionRow> table = {
#define OPTION(option, ...) {.name = #option, __VA_ARGS__},
#define PROCESSOR OPTION
#define OTHER_OPTION OPTION
#include "options.inc"
    };
    return table;
}

const OptionRow& row_of(Option option) { return option_table()[static_cast<std::size_t>(option)]; }

const std::vector<Json>& choices_of(Option option) {
    return row_of(option).domain.target<OneOf>()->choices;
}

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
