// Added tokens: texts that are tokens wherever they occur, found before words are split.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "normalizer.hpp"
#include "pre_tokenizer.hpp"
#include "word_model.hpp"

namespace dsbd {

struct AddedToken {
    std::int64_t id = 0;
    std::string content;
    std::string spelling;  // as it is looked for, and as a decoder gets it: normalized, or `content`
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

/// The entry `added_tokens` of tokenizer.json.
class AddedTokens {
public:
    /// `normalizer`: nullptr if it is not understood; then no token may be normalized.
    AddedTokens(const SortedJson& list, const Vocabulary& vocabulary, const Normalizer* normalizer,
                const std::string& where);

    const AddedToken* find(std::int64_t id) const;
    /// Whether a decoder leaves out tokens of this spelling.
    bool is_special(const std::string& spelling) const { return special_.count(spelling) != 0; }
    const std::map<std::int64_t, AddedToken>& by_id() const { return by_id_; }

    /// Return the added tokens of a text and the words between them, which are normalized.
    std::vector<Piece> split(std::string_view text, const Normalizer& normalizer) const;

private:
    /// Spellings by their first bytes, to find the longest one at a place.
    class Trie {
    public:
        void add(const AddedToken& token, const std::string& where);
        const AddedToken* longest(std::string_view text, std::size_t begin) const;

    private:
        struct Node {
            std::unordered_map<char, std::size_t> next;
            const AddedToken* token = nullptr;
        };
        std::vector<Node> nodes_{1};
    };

    static std::vector<Piece> split(const Word& word, const Trie& trie);

    std::map<std::int64_t, AddedToken> by_id_;
    std::set<std::string> special_;  // contents
    Trie plain_;
    Trie normalized_;
};

}  // namespace dsbd
