// Pre-tokenizers of tokenizer.json: how a text is split into words.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "json_fields.hpp"

namespace dsbd {

/// A part of a normalized text; tokens never cross its ends.
struct Word {
    std::string text;
    bool is_at_start = false;  // whether it begins the text that was given
};

/// The steps of a pre-tokenizer, each from a word to words.
class PreTokenizer {
public:
    /// Read the field `pre_tokenizer` of tokenizer.json.
    explicit PreTokenizer(const JsonObject& tokenizer);

    std::vector<Word> words(Word text) const;
    /// Whether a space is put before the first word of a text alone.
    bool asks_for_start() const { return asks_for_start_; }

private:
    void add(const JsonObject& step);

    std::vector<std::function<std::vector<Word>(const Word&)>> steps_;
    bool asks_for_start_ = false;
};

/// How byte-level BPE (GPT-2) spells bytes: printable Latin-1 as itself, others from U+0100 on.
const std::array<std::string, 256>& symbol_by_byte();
/// Return the bytes that a text spells, no value if a character of it spells none.
std::optional<std::string> bytes_from_symbols(std::string_view text);

}  // namespace dsbd
