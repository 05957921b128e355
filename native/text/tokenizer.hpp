// Tokenizer of a bundle: from text to token ids and back, by its tokenizer.json.
//
// A tokenizer.json of which a part is not understood is never read in another way: what cannot be
// done is refused with the name of that part. Text out works where only text in is refused.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "steps.hpp"

namespace dsbd {

using TokenIds = std::span<const std::int64_t>;

/// The tokenizer of sources that are tokenized unlike targets.
inline constexpr char SOURCE_TOKENIZER_FILE[] = "source_tokenizer.json";

/// The tokenizer of a bundle, for target and draft alike. Threads may share it.
class Tokenizer {
public:
    /// Read `name` and, if present, tokenizer_config.json in `folder`.
    ///
    /// bos_token_id: of the manifest. `encode` adds it if the post-processor does not and
    ///     tokenizer_config.json has `"add_bos_token": true`.
    /// Error: the files cannot be read, or the tokens or the decoder are not understood.
    Tokenizer(const std::filesystem::path& folder, std::optional<std::int64_t> bos_token_id,
              const std::string& name = "tokenizer.json");
    ~Tokenizer();

    /// Return why no text can be encoded, an empty text if it can.
    const std::string& encoding_refusal() const { return encoding_refusal_; }

    /// Return the token ids of a text, with the special tokens that belong around it.
    ///
    /// add_special_tokens: false for a text that contains them, such as a rendered chat template.
    /// A code such as >>deu<<, the target language of an OPUS-MT model, is a token only at the
    /// beginning of a source.
    /// Error: the text is not UTF-8 or begins with a code that the model lacks, or
    /// `encoding_refusal`.
    std::vector<std::int64_t> encode(std::string_view text, bool add_special_tokens = true) const;

    /// Return the text without special tokens; bytes that are not UTF-8 become U+FFFD.
    std::string decode(TokenIds token_ids, bool skip_special_tokens = true) const;

    /// Return the bytes that a token of a byte-level tokenizer is.
    std::string bytes_of(std::int64_t token_id) const;
    const TextJoints& joints() const;
    /// Return the byte that a token is in a run of bytes, no value for every other token.
    std::optional<char> byte_of(std::int64_t token_id) const;
    /// Whether a token ever changes a text; special and unknown tokens do not.
    bool adds_text(std::int64_t token_id) const;
    /// Whether texts leave out this token.
    bool is_special(std::int64_t token_id) const;
    /// Return a text with a mark in place of each special token, the longest at its place. A token
    /// takes the spaces around it that it strips.
    std::string marked(std::string_view text) const;
    /// The first token that is text by itself, not part of a character.
    std::int64_t letter() const { return letter_; }

private:
    struct TextOut;  // vocabulary, added tokens and decoder
    struct TextIn;   // the rest

    void read_bos_token(const std::filesystem::path& folder, std::int64_t bos_token_id);
    std::int64_t first_letter() const;
    /// Return a token as the vocabulary spells it, an empty text for an unknown id.
    std::string piece(std::int64_t token_id) const;

    std::unique_ptr<const TextOut> out_;
    std::unique_ptr<const TextIn> in_;
    std::string encoding_refusal_;
    std::vector<std::int64_t> added_first_;
    std::optional<std::map<std::string, std::int64_t>> id_by_code_;  // of a tokenizer of sources
    std::int64_t letter_ = 0;
    // by token: 0 not computed yet, 1 does not add text, 2 does
    mutable std::vector<std::atomic<std::uint8_t>> adds_text_;
};

}  // namespace dsbd
