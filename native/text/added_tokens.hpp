// Added tokens: texts that are tokens wherever they occur, found before words are split.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "steps.hpp"
#include "word_model.hpp"

namespace dsbd {

struct AddedToken {
    std::int64_t id = 0;
    std::string content;
    std::string
        spelling;  // as it is looked for, and as a decoder gets it: normalized, or `content`
    bool is_special = false;
    bool is_single_word = false;
    bool strips_left = false;
    bool strips_right = false;
    bool is_normalized = false;
};

/// A word of a text, or an added token.
struct Piece {
    Word word;
    const AddedToken* token = nullptr;  // null: a word
};

/// The field `added_tokens` of tokenizer.json.
class AddedTokens {
public:
    /// `normalizer`: nullptr if it is not understood; then no token may be normalized.
    AddedTokens(const JsonObject& tokenizer, const Vocabulary& vocabulary,
                const Normalizer* normalizer);

    const AddedToken* find(std::int64_t id) const;
    /// Whether a decoder leaves out tokens of this spelling.
    bool is_special(const std::string& spelling) const { return special_.count(spelling) != 0; }
    std::size_t size() const { return by_id_.size(); }

    /// Return the added tokens of a text and the words between them, which are normalized.
    std::vector<Piece> split(std::string_view text, const Normalizer& normalizer) const;
    /// Return the special tokens of a text and the texts between them, both as they are spelled.
    std::vector<Piece> split_special(std::string_view text) const;

private:
    /// Tokens by the first byte of their spelling.
    using ByFirstByte = std::unordered_map<char, std::vector<const AddedToken*>>;

    static std::vector<Piece> split(const Word& word, const ByFirstByte& tokens);

    std::map<std::int64_t, AddedToken> by_id_;
    std::set<std::string> special_;  // contents
    std::list<AddedToken> special_tokens_;  // spelled as their contents
    ByFirstByte plain_, normalized_, special_by_byte_;
};

}  // namespace dsbd
