// The options of one request: checked against each other, and read from resolved values.
#include "config.hpp"

#include "error.hpp"
#include "option_defaults.hpp"
#include "option_table.hpp"

namespace dsbd {
namespace {

using options::Chosen;
using options::Json;
using options::shown;
using enum options::Option;

constexpr int MOST_NESTED = 100;

template <class T>
void take(options::Option option, const Json& value, T& field) {
    if (value.is_null()) return;
    if constexpr (std::is_enum_v<T>) {
        const std::vector<Json>& choices = options::choices_of(option);
        field = static_cast<T>(std::ranges::find(choices, value) - choices.begin());
    } else if constexpr (std::is_same_v<T, Uint128>) {
        field = value.get<std::uint64_t>();
    } else if constexpr (std::is_same_v<T, std::size_t>) {
        field = value == "all" ? WHOLE_CONTEXT : value == "auto" ? AUTO_CONTEXT : value.get<T>();
    } else {
        field = value.get<T>();
    }
}
template <class T>
void take(options::Option option, const Json& value, std::optional<T>& field) {
    if (!value.is_null()) take(option, value, field.emplace());
}

std::int64_t smallest_width(const Chosen& o) {
    return o.whole(o[min_beams].is_null() ? num_beams : min_beams);
}

void check_widths(const Chosen& o) {
    const Strategy& row = o.row();
    if (row.rule == Rule::sample && o[temperature] == 0.0) {
        throw Error("temperature is 0, but strategy " + std::string(row.name) +
                    " samples; use more than 0, leave strategy out, or use its counterpart " +
                    std::string(row.at_zero));
    }
    const std::int64_t smallest = smallest_width(o), returned = o.whole(num_return_sequences);
    if (smallest > o.whole(num_beams)) {
        throw Error("min_beams is " + shown(o[min_beams]) + ", more than num_beams " +
                    shown(o[num_beams]) + "; lower it");
    }
    if (returned > smallest) {
        throw Error("num_return_sequences is " + std::to_string(returned) + ", but as few as " +
                    std::to_string(smallest) +
                    " beams may be kept; lower it, or raise num_beams or min_beams");
    }
    if (o[memory] == "single" && returned > 1) {
        throw Error("num_return_sequences is " + std::to_string(returned) +
                    ", but memory 'single' ends with one beam; use 1 or memory 'forest'");
    }
}

/// Refuse rules of times without a time, and with a constraint, which hides some tokens.
void check_times(const Chosen& o) {
    const Json &last = o[last_timestamp_token_id], &times = o[no_timestamps_token_id];
    if (!last.is_null() && last <= (times.is_null() ? Json(0) : times)) {
        throw Error("last_timestamp_token_id is " + shown(last) +
                    ", expected a token after no_timestamps_token_id " + shown(times) +
                    "; leave it out if all tokens after that are times");
    }
    if (!times.is_null() && !o[constraint].is_null()) {
        throw Error("no_timestamps_token_id is " + shown(times) +
                    ", whose rules compare the times with all other tokens, and constraint is "
                    "given, which leaves some of them out; leave out one");
    }
}

void check_draft_beams(const Chosen& o) {
    const auto widths = o[draft_beams].get<Ints>();
    if (widths.size() != o[draft_length].get<std::size_t>()) {
        throw Error("draft_beams " + shown(o[draft_beams], true) + " has " +
                    std::to_string(widths.size()) + " layers, draft_length is " +
                    shown(o[draft_length]) + "; give one number per layer or one for all");
    }
    const std::int64_t smallest = smallest_width(o);
    const auto narrowest = std::min_element(widths.begin(), widths.end());
    if (narrowest != widths.end() && *narrowest < smallest) {
        throw Error("draft_beams has a layer of " + std::to_string(*narrowest) +
                    ", narrower than " + std::to_string(smallest) +
                    ", the fewest beams that are kept: it could never be accepted; widen it, or "
                    "lower min_beams with width_policy 'threshold'");
    }
    const auto sum = std::accumulate(widths.begin(), widths.end(), std::int64_t{0});
    if (sum > options::MOST_NODES) {
        throw Error("draft_beams and draft_length make a forest of " + std::to_string(sum) +
                    " candidates; expected at most " + std::to_string(options::MOST_NODES) +
                    ": lower one of them");
    }
}

/// Refuse options that let the output depend on how much was drafted, or forbid a draft.
void check_throughput(const Chosen& o) {
    const std::tuple<options::Option, const char*, bool> needed[] = {
        {coupling, "'gumbel'", o[coupling] != "rejection"},
        {width_policy, "'fixed'", o[width_policy] == "fixed"},
        {memory, "'forest'", o[memory] == "forest"},
        {replacement, "False", o[replacement] == false},
    };
    for (const auto& [field, wanted, is_met] : needed) {
        if (is_met) continue;
        throw Error(row_of(field).name + " is " + shown(o[field]) +
                    ", but draft_policy 'throughput' needs an output that does not depend on the "
                    "draft: expected " +
                    wanted + "; or use draft_policy 'fixed'");
    }
    if (o[draft_length] == 0) {
        throw Error(
            "draft_length is 0, which leaves draft_policy 'throughput' nothing to draft; "
            "use at least 1, or draft_policy 'fixed'");
    }
}

void check(const Chosen& chosen) {
    check_widths(chosen);
    check_times(chosen);
    if (chosen[draft_policy].is_null()) return;
    check_draft_beams(chosen);
    if (chosen[draft_policy] == "throughput") check_throughput(chosen);
}

}  // namespace

namespace options {

Chosen checked_options(const Json& read) {
    Chosen chosen = resolved_options(read);
    check(chosen);
    return chosen;
}

DecodingConfig settled(Chosen chosen, bool has_draft, bool costs_are_known) {
    if (chosen[drafter].is_null() || chosen[draft_policy].is_null()) {
        chosen = resolved_options(std::move(chosen), has_draft, costs_are_known);
        check(chosen);
    }
    DecodingConfig config;
    config.row = &chosen.row();
#define OPTION(name, ...) take(Option::name, chosen[Option::name], config.name);
#define PROCESSOR OPTION
#define OTHER_OPTION(name, ...)
#include "options.inc"
    if (const Json& trie = chosen[constraint]; !trie.is_null()) {
        config.trie_file = trie["trie"];
        config.trie_end = trie.value("end", "");
    }
    return config;
}

Json json_object(std::string_view text, const std::string& name) {
    const auto check_depth = [&](int depth, Json::parse_event_t, const Json&) {
        if (depth > MOST_NESTED) throw Error(name + " is nested too deep, expected a JSON object");
        return true;
    };
    Json object = Json::parse(text, check_depth, false);
    if (object.is_discarded()) throw Error(name + " is invalid JSON");
    if (object.is_object()) return object;
    throw Error(name + " is " + shown(object) + "; expected a JSON object");
}

}  // namespace options

bool DecodingConfig::depends_on_draft() const {
    const bool is_free = row->has_draft && (row->rule == Rule::sample || row->rule == Rule::search);
    return !is_free || coupling == Coupling::rejection || width_policy == WidthPolicy::threshold ||
           memory == Memory::single || replacement;
}

std::size_t DecodingConfig::most_draft_beams() const {
    const auto most = std::max_element(draft_beams.begin(), draft_beams.end());
    return most == draft_beams.end() ? 0 : *most;
}

std::string DecodingConfig::logits_options() const {
    static const DecodingConfig usual;
    std::string names;
    const auto add = [&](const char* name) {
        names += (names.empty() ? "" : ", ") + std::string(name);
    };
#define OPTION(name, ...)
#define PROCESSOR(name, ...) \
    if (name != usual.name) add(#name);
#define OTHER_OPTION OPTION
#include "options.inc"
    if (has_constraint()) add("constraint");
    return names;
}

bool DecodingConfig::is_eos(std::int64_t token) const {
    return eos_token_id && is_among(*eos_token_id, token);
}

void DecodingConfig::end_after(std::size_t most_tokens) {
    if (forced_eos_token_id) return;
    max_new_tokens = std::min(max_new_tokens, std::max(most_tokens, min_new_tokens));
}

DecodingConfig decoding_config(std::string_view options, const Surroundings& surroundings) {
    const Json given = options::json_object(options, "options");
    return options::settled(options::checked_options(options::read_options(given)),
                            surroundings.has_draft, surroundings.costs_are_known);
}

}  // namespace dsbd
