// Words to tokens, by BPE, WordPiece and Unigram.
#include "word_model.hpp"

#include <algorithm>
#include <cstdio>

#include "../core/error.hpp"
#include "unicode.hpp"

namespace dsbd {

Vocabulary::Vocabulary(const JsonObject& model, const std::map<std::string, Json>& ids) {
    const Json& entries = model.value("vocab");
    if (!entries.is_object()) {
        for (const Json& entry : model.list("vocab")) {
            if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() ||
                !entry[1].is_number()) {
                model.refuse("vocab", "pairs of a token and its score");
            }
            const auto id = static_cast<std::int64_t>(token_by_id_.size());
            id_by_token_[entry[0].get<std::string>()] = id;
            token_by_id_[id] = entry[0].get<std::string>();
        }
    }
    for (const auto& [token, id] : ids) {
        if (!is_whole(id) || !token_by_id_.emplace(id.get<std::int64_t>(), token).second) {
            model.refuse("vocab", "an id of its own, up to 2147483647, for every token");
        }
        id_by_token_[token] = id.get<std::int64_t>();
    }
}

std::optional<std::int64_t> Vocabulary::id_of(std::string_view token) const {
    const auto found = id_by_token_.find(token);
    return found == id_by_token_.end() ? std::nullopt : std::optional(found->second);
}

const std::string* Vocabulary::token_of(std::int64_t id) const {
    const auto found = token_by_id_.find(id);
    return found == token_by_id_.end() ? nullptr : &found->second;
}

std::vector<std::int64_t> Vocabulary::bytes_of(std::string_view text) const {
    std::vector<std::int64_t> ids;
    for (const char byte : text) {
        char token[8];
        std::snprintf(token, sizeof token, "<0x%02X>", static_cast<unsigned char>(byte));
        const auto id = id_of(token);
        if (!id) return {};
        ids.push_back(*id);
    }
    return ids;
}

namespace {

/// Takes the longest token that a word begins with, again and again.
class WordPiece final : public WordModel {
public:
    WordPiece(const JsonObject& model, const Vocabulary& vocabulary)
        : vocabulary_(vocabulary),
          prefix_(model.text("continuing_subword_prefix")),
          most_characters_(model.number("max_input_chars_per_word")) {
        const auto unknown = vocabulary.id_of(model.text("unk_token"));
        if (!unknown) model.refuse("unk_token", "a token of the vocabulary");
        unknown_ = *unknown;
    }

    void tokenize(std::string_view word, std::vector<std::int64_t>& ids) const override {
        std::vector<std::int64_t> pieces;
        bool is_known = num_characters(word) <= most_characters_;
        for (std::size_t begin = 0; is_known && begin < word.size();) {
            const std::size_t end = longest(word, begin, pieces);
            is_known = end > begin;
            begin = end;
        }
        if (is_known) {
            ids.insert(ids.end(), pieces.begin(), pieces.end());
        } else {
            ids.push_back(unknown_);
        }
    }

private:
    /// Add the longest token at a place and return its end, the place itself without one.
    std::size_t longest(std::string_view word, std::size_t begin,
                        std::vector<std::int64_t>& pieces) const {
        const std::string prefix = begin > 0 ? prefix_ : "";
        for (std::size_t end = word.size(); end > begin; --end) {
            if (end < word.size() && (static_cast<unsigned char>(word[end]) & 0xC0) == 0x80) {
                continue;  // within a character
            }
            const auto token = prefix + std::string(word.substr(begin, end - begin));
            if (const auto id = vocabulary_.id_of(token)) {
                pieces.push_back(*id);
                return end;
            }
        }
        return begin;
    }

    const Vocabulary& vocabulary_;
    std::string prefix_;
    std::size_t most_characters_;
    std::int64_t unknown_ = 0;
};

/// Takes the tokens of the highest sum of scores.
class Unigram final : public WordModel {
public:
    Unigram(const JsonObject& model, const Vocabulary& vocabulary)
        : vocabulary_(vocabulary), falls_back_to_bytes_(model.boolean("byte_fallback", false)) {
        if (model.has("unk_id")) {
            unknown_ = static_cast<std::int64_t>(model.number("unk_id"));
            if (vocabulary.token_of(*unknown_) == nullptr) {
                model.refuse("unk_id", "an id of the vocabulary");
            }
        }
        for (const Json& entry : model.list("vocab")) {
            scores_.push_back(entry[1].get<double>());
            longest_ = std::max(longest_, entry[0].get_ref<const std::string&>().size());
        }
        if (!scores_.empty()) {
            unknown_score_ = *std::min_element(scores_.begin(), scores_.end()) - 10.0;
        }
    }

    void tokenize(std::string_view word, std::vector<std::int64_t>& ids) const override {
        const std::vector<Node> best = best_paths(word);
        std::vector<std::string_view> pieces;
        std::size_t unknown_end = 0;  // of the run of unknown characters before the piece
        for (std::size_t end = word.size(); end > 0; end = best[end].begin) {
            const bool is_unknown = best[end].id == unknown_;
            unknown_end = is_unknown && unknown_end == 0 ? end : unknown_end;
            const std::size_t begin = best[end].begin;
            const bool ends_run = !is_unknown || begin == 0;
            if (unknown_end > 0 && ends_run) {
                const std::size_t start = is_unknown ? begin : end;
                pieces.push_back(word.substr(start, unknown_end - start));
                unknown_end = 0;
            }
            if (!is_unknown) pieces.push_back(word.substr(begin, end - begin));
        }
        for (std::size_t i = pieces.size(); i > 0; --i) add(pieces[i - 1], ids);
    }

private:
    /// The best path to an end: its last token, and where that begins.
    struct Node {
        double score = 0.0;
        std::size_t begin = 0;
        std::optional<std::int64_t> id;
        bool is_reached = false;
    };

    std::vector<Node> best_paths(std::string_view word) const {
        std::vector<Node> best(word.size() + 1);
        const auto offer = [&](std::size_t begin, std::size_t end, double score, std::int64_t id) {
            const double sum = score + best[begin].score;
            if (!best[end].is_reached || sum > best[end].score) {
                best[end] = {sum, begin, id, true};
            }
        };
        for (std::size_t begin = 0; begin < word.size();) {
            const std::size_t width = scanned(word, begin).length;
            bool is_single = false;
            const std::size_t last = std::min(word.size(), begin + longest_);
            for (std::size_t end = begin + 1; end <= last; ++end) {
                if (const auto id = vocabulary_.id_of(word.substr(begin, end - begin))) {
                    offer(begin, end, scores_[static_cast<std::size_t>(*id)], *id);
                    is_single = is_single || end == begin + width;
                }
            }
            if (!is_single) offer(begin, begin + width, unknown_score_, unknown_or_refused(word));
            begin += width;
        }
        return best;
    }

    std::int64_t unknown_or_refused(std::string_view word) const;

    void add(std::string_view piece, std::vector<std::int64_t>& ids) const {
        if (const auto id = vocabulary_.id_of(piece)) {
            ids.push_back(*id);
            return;
        }
        std::vector<std::int64_t> bytes;
        if (falls_back_to_bytes_) bytes = vocabulary_.bytes_of(piece);
        if (bytes.empty()) bytes = {unknown_or_refused(piece)};
        ids.insert(ids.end(), bytes.begin(), bytes.end());
    }

    const Vocabulary& vocabulary_;
    std::vector<double> scores_;  // by id
    std::size_t longest_ = 0;     // bytes of a token
    std::optional<std::int64_t> unknown_;
    double unknown_score_ = 0.0;
    bool falls_back_to_bytes_;
};

std::int64_t Unigram::unknown_or_refused(std::string_view word) const {
    if (!unknown_) {
        throw Error("the tokenizer has no token for a character of '" +
                    std::string(word.substr(0, 100)) + "' and none for unknown ones; leave it out");
    }
    return *unknown_;
}

}  // namespace

std::unique_ptr<WordModel> word_model(const JsonObject& json, const Vocabulary& vocabulary) {
    const std::string type = json.text("type");
    json.skip({"vocab"});
    std::unique_ptr<WordModel> model;
    if (type == "BPE") {
        model = bpe(json, vocabulary);
    } else if (type == "WordPiece") {
        model = std::make_unique<WordPiece>(json, vocabulary);
    } else if (type == "Unigram") {
        model = std::make_unique<Unigram>(json, vocabulary);
    } else {
        json.refuse("type", "BPE, WordPiece or Unigram");
    }
    json.check_all_read();
    return model;
}

}  // namespace dsbd
