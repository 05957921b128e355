// Normalizers of tokenizer.json: texts before they are split into words.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "json_fields.hpp"
#include "regex.hpp"

namespace dsbd {

/// The steps of a normalizer, each from text to text.
class Normalizer {
public:
    /// Read the field `normalizer` of tokenizer.json.
    explicit Normalizer(const JsonObject& tokenizer);

    std::string normalized(std::string text) const;
    /// Whether the first character of a result is always from the first one of the text.
    bool keeps_start() const { return keeps_start_; }

private:
    void add(const JsonObject& step);

    std::vector<std::function<std::string(std::string)>> steps_;
    bool keeps_start_ = true;
};

/// The pattern of a `Replace` or `Split`: a plain text, or a regular expression.
class Pattern {
public:
    /// Read the field `pattern`.
    explicit Pattern(const JsonObject& step);
    std::vector<Range> find_all(std::string_view text) const { return find_(text); }
    const std::string& plain() const { return plain_; }  // empty for a regular expression

private:
    std::string plain_;
    std::function<std::vector<Range>(std::string_view)> find_;
};

/// Return a text with each match replaced.
std::string replaced(std::string_view text, const Pattern& pattern, std::string_view content);

}  // namespace dsbd
