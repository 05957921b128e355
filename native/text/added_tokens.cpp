// Added tokens of tokenizer.json, and where they occur in a text.
#include "added_tokens.hpp"

#include <algorithm>
#include <utility>

#include "../core/error.hpp"
#include "regex.hpp"
#include "unicode.hpp"

namespace dsbd {

namespace {

/// Return the id that the tokenizers library gives to a token, whatever the file says.
std::int64_t id_of(const std::string& content, const Vocabulary& vocabulary,
                   const std::map<std::int64_t, AddedToken>& by_id) {
    if (const auto id = vocabulary.id_of(content)) return *id;
    const auto size = static_cast<std::int64_t>(vocabulary.size());
    return by_id.empty() ? size : std::max(by_id.rbegin()->first + 1, size);
}

AddedToken added_token(const JsonObject& json) {
    AddedToken token;
    token.id = static_cast<std::int64_t>(json.number("id"));
    token.content = token.spelling = json.text("content");
    token.is_single_word = json.boolean("single_word");
    token.strips_left = json.boolean("lstrip");
    token.strips_right = json.boolean("rstrip");
    token.is_normalized = json.boolean("normalized");
    token.is_special = json.boolean("special");
    json.check_all_read();
    return token;
}

std::size_t begin_of_spaces(std::string_view text, std::size_t end) {
    std::size_t begin = 0;
    std::size_t at = 0;
    for_each_character(text.substr(0, end), [&](char32_t code, std::string_view character) {
        at += character.size();
        begin = is_space(code) ? begin : at;
    });
    return begin;
}

std::size_t end_of_spaces(std::string_view text, std::size_t begin) {
    while (begin < text.size()) {
        const std::size_t length = scanned(text, begin).length;
        if (!is_space(code_at(text, begin, length))) break;
        begin += length;
    }
    return begin;
}

/// Whether a character of a word is next to a range.
bool is_within_word(std::string_view text, Range range) {
    std::size_t last = range.begin;
    while (last > 0 && (static_cast<unsigned char>(text[--last]) & 0xC0) == 0x80) {
    }
    const auto is_word_at = [&](std::size_t begin) {
        return is_word(code_at(text, begin, scanned(text, begin).length));
    };
    return (range.begin > 0 && is_word_at(last)) ||
           (range.end < text.size() && is_word_at(range.end));
}

/// Return the token with the longest spelling at a place, nullptr without one.
const AddedToken* longest(const std::unordered_map<char, std::vector<const AddedToken*>>& tokens,
                          std::string_view text, std::size_t begin) {
    const AddedToken* found = nullptr;
    const auto candidates = tokens.find(text[begin]);
    if (candidates == tokens.end()) return found;
    for (const AddedToken* token : candidates->second) {
        const bool is_longer = found == nullptr || token->spelling.size() > found->spelling.size();
        if (is_longer && text.substr(begin).starts_with(token->spelling)) found = token;
    }
    return found;
}

}  // namespace

AddedTokens::AddedTokens(const JsonObject& tokenizer, const Vocabulary& vocabulary,
                         const Normalizer* normalizer) {
    if (!tokenizer.has("added_tokens")) return;
    for (const JsonObject& json : tokenizer.objects("added_tokens")) {
        AddedToken token = added_token(json);
        const std::int64_t id = id_of(token.content, vocabulary, by_id_);
        if (token.content.empty() || token.id != id || by_id_.count(id) != 0) {
            throw mismatch_error("a text of its own and id " + std::to_string(id), json.json(),
                                 json.where());
        }
        if (token.is_normalized) {
            if (normalizer == nullptr) json.refuse("normalized", "a normalizer that is known here");
            token.spelling = normalizer->normalized(token.content);
        }
        if (token.is_special) {
            special_.insert(token.content);
            special_tokens_.push_back(token);
            special_tokens_.back().spelling = token.content;
            special_by_byte_[token.content[0]].push_back(&special_tokens_.back());
        }
        const AddedToken& added = by_id_.emplace(id, std::move(token)).first->second;
        ByFirstByte& tokens = added.is_normalized ? normalized_ : plain_;
        const AddedToken* other =
            added.spelling.empty() ? &added : longest(tokens, added.spelling, 0);
        if (other != nullptr && other->spelling == added.spelling) {
            json.refuse("content", "a text that its normalizer does not make equal to another");
        }
        tokens[added.spelling[0]].push_back(&added);
    }
}

const AddedToken* AddedTokens::find(std::int64_t id) const {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : &found->second;
}

std::vector<Piece> AddedTokens::split(const Word& word, const ByFirstByte& tokens) {
    const std::string& text = word.text;
    std::vector<Piece> pieces;
    std::size_t end = 0;  // of the last piece
    const auto add_word = [&](std::size_t stop) {
        if (end < stop) {
            const bool is_at_start = word.is_at_start && end == 0;
            pieces.push_back({{text.substr(end, stop - end), is_at_start}, nullptr});
        }
    };
    for (std::size_t at = 0; at < text.size();) {
        const AddedToken* token = longest(tokens, text, at);
        if (token == nullptr) {
            ++at;
            continue;
        }
        Range range{at, at + token->spelling.size()};
        at = range.end;
        if (token->is_single_word && is_within_word(text, range)) continue;
        if (token->strips_left) range.begin = std::max(begin_of_spaces(text, range.begin), end);
        if (token->strips_right) range.end = end_of_spaces(text, range.end);
        add_word(range.begin);
        pieces.push_back({{}, token});
        end = range.end;
    }
    add_word(text.size());
    return pieces;
}

std::vector<Piece> AddedTokens::split(std::string_view text, const Normalizer& normalizer) const {
    std::vector<Piece> pieces;
    for (Piece& piece : split(Word{std::string(text), true}, plain_)) {
        if (piece.token != nullptr) {
            pieces.push_back(std::move(piece));
            continue;
        }
        piece.word.text = normalizer.normalized(std::move(piece.word.text));
        for (Piece& part : split(piece.word, normalized_)) pieces.push_back(std::move(part));
    }
    return pieces;
}

std::vector<Piece> AddedTokens::split_special(std::string_view text) const {
    return split(Word{std::string(text), true}, special_by_byte_);
}

}  // namespace dsbd
