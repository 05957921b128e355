// The values that an option takes, read from JSON: their type, their bounds, their plain form.
//
// A domain returns a value in its plain form, which is JSON too, or throws an Error that names the
// option, the value and what was expected. Messages write values as Python does.
#pragma once

#include <nlohmann/json.hpp>

#include "forward.hpp"

namespace dsbd::options {

using Json = nlohmann::ordered_json;

/// (name, value) -> the value in its plain form.
using Domain = std::function<Json(const std::string&, const Json&)>;

/// A whole number from `least` to `most`.
struct Whole {
    std::int64_t least, most;
    bool has_off = false;  // whether -1 is read as `least`

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

/// One of a few names or bools; is_quoted: whether a message quotes them.
Domain one_of(std::vector<Json> choices, bool is_quoted = true);
Json seed_number(const std::string& name, const Json& value);
/// A whole number of tokens, "all" or "auto".
Json context_size(const std::string& name, const Json& value);
Json any_text(const std::string& name, const Json& value);
/// A text that a finished text may contain, or a list of them.
Json stop_texts(const std::string& name, const Json& value);
/// A list of token sequences, or of single token ids.
Json token_sequences(const std::string& name, const Json& value);
/// A mapping of token ids to numbers: a list of pairs.
Json biases(const std::string& name, const Json& value);
/// A trie's file and end, as {"trie": FILE, "end": "leaf" or "eos"}.
Json trie(const std::string& name, const Json& value);
/// An empty list: of an option that this library does not support.
Json nothing(const std::string& name, const Json& value);

/// Return a value as a message of Python writes it: at most 80 characters. is_tuple: a list is.
std::string shown(const Json& value, bool is_tuple = false);
/// Return "; did you mean 'top_k'?" for a name close to a known one, else nothing.
std::string did_you_mean(const std::string& name, std::span<const std::string> known);

}  // namespace dsbd::options
