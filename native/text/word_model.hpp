// Models of tokenizer.json: how a word becomes tokens, by BPE, WordPiece or Unigram.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "json_fields.hpp"

namespace dsbd {

/// The tokens of a model and their ids.
class Vocabulary {
public:
    /// Read the field `vocab` of a model: for Unigram a list of [token, score]; else an object,
    /// whose fields are those of `ids`.
    Vocabulary(const JsonObject& model, const std::map<std::string, Json>& ids);

    std::optional<std::int64_t> id_of(std::string_view token) const;
    /// Return a token, nullptr for an unknown id.
    const std::string* token_of(std::int64_t id) const;
    std::size_t size() const { return token_by_id_.size(); }
    /// Return the tokens of a text's bytes, such as <0x0A>; none unless there are all.
    std::vector<std::int64_t> bytes_of(std::string_view text) const;

private:
    struct Hash {
        using is_transparent = void;
        std::size_t operator()(std::string_view token) const {
            return std::hash<std::string_view>()(token);
        }
    };

    std::unordered_map<std::string, std::int64_t, Hash, std::equal_to<>> id_by_token_;
    std::unordered_map<std::int64_t, std::string> token_by_id_;
};

class WordModel {
public:
    virtual ~WordModel() = default;
    /// Append the tokens of a word.
    virtual void tokenize(std::string_view word, std::vector<std::int64_t>& ids) const = 0;
};

/// Return a model, which refers to its vocabulary.
std::unique_ptr<WordModel> word_model(const JsonObject& model, const Vocabulary& vocabulary);
std::unique_ptr<WordModel> bpe(const JsonObject& model, const Vocabulary& vocabulary);

}  // namespace dsbd
