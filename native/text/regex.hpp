// Regular expressions of tokenizer.json, by PCRE2 or refused.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace dsbd {

/// A part of a text: bytes from `begin` to `end`.
struct Range {
    std::size_t begin = 0;
    std::size_t end = 0;
};

/// A pattern in the dialect of the tokenizers library (Oniguruma). Constructs that PCRE2 might
/// understand otherwise are refused by name. Immutable: threads may share it.
class Regex {
public:
    Regex(std::string_view pattern, const std::string& where);
    /// The matches in a valid text, in order, without overlaps.
    std::vector<Range> find_all(std::string_view text) const;

private:
    std::shared_ptr<const void> code_;
};

/// The places of a plain text, which is not empty.
std::vector<Range> find_all(std::string_view text, std::string_view plain);

}  // namespace dsbd
