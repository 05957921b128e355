// Steps of tokenizer.json: texts are normalized, split into words, and get special tokens around
// them; tokens are decoded. A step that is not understood is refused by its name.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
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

/// The special tokens around a text.
class PostProcessor {
public:
    /// Read the field `post_processor` of tokenizer.json.
    explicit PostProcessor(const JsonObject& tokenizer);

    /// Append the ids of a text with the tokens around them.
    void append(const std::vector<std::int64_t>& ids, std::vector<std::int64_t>& all) const;

private:
    static constexpr std::int64_t text_ = -1;

    void read_template(const JsonObject& step);
    void read_ends(const JsonObject& step);

    std::vector<std::int64_t> parts_{text_};  // ids, and `text_` for those of the text
};

/// How later tokens can change the text of earlier ones.
struct TextJoints {
    bool is_local = true;        // no step looks for text across tokens; if not, all can change
    bool joins_bytes = false;    // tokens are bytes (`ByteLevel`)
    bool has_byte_runs = false;  // some tokens are bytes, decoded a run at a time (`ByteFallback`)
};

/// Characters that a `Strip` may take from the beginning of the joined text.
inline constexpr std::size_t most_stripped = 2;

/// The steps of a decoder, each from tokens to tokens; at the end they are joined.
class Decoder {
public:
    /// Read the field `decoder` of tokenizer.json; without it tokens are joined by spaces.
    explicit Decoder(const JsonObject& tokenizer);

    std::string decoded(std::vector<std::string> tokens) const;
    const TextJoints& joints() const { return joints_; }

private:
    std::vector<std::function<void(std::vector<std::string>&)>> steps_;
    TextJoints joints_;
    bool is_given_ = false;
};

/// Return the byte that a token such as <0x0A> is.
std::optional<char> byte_of_spelling(std::string_view token);

}  // namespace dsbd
