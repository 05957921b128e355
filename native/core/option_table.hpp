// The table of options: one row for each, with all that is known of it.
//
// Mirrors option_table.py and option_row.py. An option that means nothing to the strategy or to
// another option is refused, unless its value is neutral (it changes nothing) or redundant (it
// happens anyway).
#pragma once

#include <array>

#include "config.hpp"
#include "option_values.hpp"

namespace dsbd::options {

inline constexpr std::int64_t MOST_NODES = 16'384;  // of a forest, whose mask has a cell a pair

/// In the order of the table, in which they are resolved: what decides comes first. Each has the
/// name of a field of DecodingConfig, except those of OTHER_OPTION. PROCESSOR: other values than
/// the default change which tokens may follow.
enum class Option : std::uint8_t {
#define OPTION(name, ...) name,
#define PROCESSOR OPTION
#define OTHER_OPTION OPTION
#include "options.inc"
    count
};

/// The values of all options: resolved as far as the table was read, below that as given.
struct Chosen {
    std::array<Json, static_cast<std::size_t>(Option::count)> values;  // null: Python's None
    bool is_cold = false;                  // temperature 0 is given
    std::optional<bool> has_draft;         // whether there is a draft model; none: not known yet
    std::optional<bool> costs_are_known;   // whether the costs of engine calls will be

    Json& operator[](Option option) { return values[static_cast<std::size_t>(option)]; }
    const Json& operator[](Option option) const { return values[static_cast<std::size_t>(option)]; }
    std::int64_t whole(Option option) const { return (*this)[option].get<std::int64_t>(); }
    const Strategy& row() const;
};

/// A condition without which an option means nothing.
struct Condition {
    Option option;             // which decides
    bool is_met_among;         // whether it is met with these values, or with all others
    std::vector<Json> values;
    const char* remedy;        // its value to use instead, for a message

    bool is_met(const Chosen& chosen) const {
        return is_among(values, chosen[option]) == is_met_among;
    }
};

/// Whose generation_config.json may set an option; search: of any model, for searches with several
/// beams (their number: of an encoder-decoder alone).
enum class OfModel : std::uint8_t { no, any, encoder_decoder, search };

/// The row of one option; see OptionRow of Python.
struct OptionRow {
    std::string name;
    Domain domain;
    Json usual = nullptr;                              // its value if it is left out, or
    std::function<Json(const Chosen&)> usual_of = {};  // a function that returns it
    std::vector<const Condition*> needs = {};
    std::function<std::vector<Json>(const Chosen&)> neutral = {};
    bool is_redundant_if_cold = false;  // any value may be given then
    bool is_processor = false;
    OfModel of_model = OfModel::no;

    /// Return the first condition that is not met, null if the option means something.
    const Condition* unmet(const Chosen& options) const;
    Json default_of(const Chosen& options) const { return usual_of ? usual_of(options) : usual; }
    /// Return a value in its plain form, null for a default.
    Json read(const Json& value) const;
};

extern const Condition NO_SEARCH;
const std::vector<OptionRow>& option_table();
const OptionRow& row_of(Option option);
/// The values of an option with a few, in the order of their enumerators.
const std::vector<Json>& choices_of(Option option);
/// Return the option of this name; Error: there is none.
Option option_named(const std::string& name);

/// Return options in their plain form, by name; Error: no such option, or no such value.
Json read_options(const Json& given);

/// Return the values of all options, of plain ones by name; Error: one means nothing and its value
/// is not neutral. has_draft, costs_are_known: none leaves open what depends on it.
Chosen resolved_options(const Json& read, std::optional<bool> has_draft = {},
                        std::optional<bool> costs_are_known = {});
/// The same, of resolved values that left something open.
Chosen resolved_options(Chosen chosen, bool has_draft, bool costs_are_known);

// Implemented in config.cpp.
/// Return plain options resolved, as far as they are not left open, and checked.
Chosen checked_options(const Json& read);
/// Return the config of these, with nothing left open.
DecodingConfig settled(Chosen chosen, bool has_draft, bool costs_are_known);
/// Parse a JSON object; Error: `name` is none.
Json json_object(std::string_view text, const std::string& name);

}  // namespace dsbd::options
