// The values that an option takes, read from JSON: their type, their bounds, their plain form.
//
// A domain returns a value in its plain form, which is JSON too, or throws an Error that names the
// option, the value and what was expected. Messages write values as Python does.
#pragma once

#include <nlohmann/json.hpp>

#include "forward.hpp"

namespace dsbd::options {

using Json = nlohmann::ordered_json;
using Values = std::vector<Json>;

/// (name, value) -> the value in its plain form.
using Domain = std::function<Json(const std::string&, const Json&)>;

/// A whole number from `least` to `most`.
struct Whole {
    std::int64_t least, most;
    std::optional<std::int64_t> off = {};  // another one that is read as `least`

    Json operator()(const std::string& name, const Json& value) const;
};

/// A whole number, or at most `most_entries` of them.
struct Wholes {
    Whole entry;
    std::size_t most_entries;
    std::string noun = "whole number";
    bool is_always_list = false;  // whether one number becomes a list
    bool is_cut = false;          // whether further entries are left out, not refused

    Json operator()(const std::string& name, const Json& value) const;
};

/// A number from `least` to `most`; is_open: `least` is excluded.
struct Number {
    double least, most;
    bool is_open = false;
    double least_positive = 0.0;  // the smallest one above 0; 0 sets no such bound

    Json operator()(const std::string& name, const Json& value) const;
};

/// One of a few names or bools.
struct OneOf {
    Values choices;
    bool is_quoted = true;  // whether a message quotes them

    Json operator()(const std::string& name, const Json& value) const;
};

/// A whole number, or one of a few names.
struct WholeOrName {
    Whole number;
    Values names;

    Json operator()(const std::string& name, const Json& value) const;
};

/// Any text.
struct Text {
    Json operator()(const std::string& name, const Json& value) const;
};

/// A text that a finished text may contain, or a list of them.
struct Texts {
    std::size_t most_texts, most_characters;

    Json operator()(const std::string& name, const Json& value) const;
};

/// A list of token sequences, or of single token ids.
struct TokenSequences {
    std::size_t most_sequences, most_tokens;

    Json operator()(const std::string& name, const Json& value) const;
};

/// A mapping of token ids to numbers: a list of pairs.
struct Biases {
    std::size_t most_tokens;
    Number bias;

    Json operator()(const std::string& name, const Json& value) const;
};

/// A whole number of at most 64 bits; Python takes seeds of 128.
Json seed_number(const std::string& name, const Json& value);
/// A trie's file and end, as {"trie": FILE, "end": "leaf" or "eos"}.
Json trie(const std::string& name, const Json& value);
/// An empty list: of an option that this library does not support.
Json nothing(const std::string& name, const Json& value);

/// Return a value as a message of Python writes it: at most 80 characters. is_tuple: a list is.
std::string shown(const Json& value, bool is_tuple = false);
/// Return "; did you mean 'top_k'?" for a name close to a known one, else nothing.
std::string did_you_mean(const std::string& name, std::span<const std::string> known);

}  // namespace dsbd::options
