// Byte-pair encoding: the neighbours of the earliest merge are joined first.
#include <queue>
#include <tuple>

#include "unicode.hpp"
#include "word_model.hpp"

namespace dsbd {

namespace {

struct Merge {
    std::size_t rank = 0;
    std::int64_t id = 0;  // of the joined token
};

/// A token of a word; `length` 0: it was joined with the one before it.
struct Symbol {
    std::int64_t id = 0;
    std::size_t length = 0;
    std::size_t previous = 0;  // `none` for the first
    std::size_t next = 0;
};

constexpr std::size_t none = static_cast<std::size_t>(-1);

class Bpe final : public WordModel {
public:
    Bpe(const JsonObject& model, const Vocabulary& vocabulary) : vocabulary_(vocabulary) {
        const Json* dropout = model.find("dropout");
        if (dropout != nullptr && (!dropout->is_number() || dropout->get<double>() != 0.0)) {
            model.refuse("dropout", "null: merges at random cannot be repeated");
        }
        for (const auto* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
            if (!model.text_or_null(name).value_or("").empty()) {
                model.refuse(name, "null or an empty text");
            }
        }
        if (const auto token = model.text_or_null("unk_token")) {
            unknown_ = vocabulary.id_of(*token);
            if (!unknown_) model.refuse("unk_token", "a token of the vocabulary");
        }
        fuses_unknown_ = model.boolean("fuse_unk", false);
        falls_back_to_bytes_ = model.boolean("byte_fallback", false);
        ignores_merges_ = model.boolean("ignore_merges", false);
        read_merges(model);
    }

    void tokenize(std::string_view word, std::vector<std::int64_t>& ids) const override {
        if (ignores_merges_) {
            if (const auto id = vocabulary_.id_of(word)) {
                ids.push_back(*id);
                return;
            }
        }
        std::vector<Symbol> symbols = symbols_of(word);
        merge(symbols);
        for (const Symbol& symbol : symbols)
            if (symbol.length > 0) ids.push_back(symbol.id);
    }

private:
    static std::uint64_t key(std::int64_t left, std::int64_t right) {
        return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint64_t>(right);
    }

    void read_merges(const JsonObject& model) {
        const Json& merges = model.list("merges");
        for (std::size_t rank = 0; rank < merges.size(); ++rank) {
            const auto [left, right] = pair_of(merges[rank], model);
            const auto left_id = vocabulary_.id_of(left);
            const auto right_id = vocabulary_.id_of(right);
            const auto id = vocabulary_.id_of(left + right);
            if (!left_id || !right_id || !id) {
                model.refuse("merges",
                             "tokens of the vocabulary, not '" + left + "' and '" + right + "'");
            }
            merges_[key(*left_id, *right_id)] = {rank, *id};
        }
    }

    /// Return the two parts of a merge: ["a", "b"], or "a b" in older files.
    static std::pair<std::string, std::string> pair_of(const Json& merge, const JsonObject& model) {
        if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
            return {merge[0].get<std::string>(), merge[1].get<std::string>()};
        }
        const std::string text = merge.is_string() ? merge.get<std::string>() : "";
        const std::size_t space = text.find(' ');
        if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
            model.refuse("merges", "pairs of tokens");
        }
        return {text.substr(0, space), text.substr(space + 1)};
    }

    /// Return the characters of a word as tokens, those without one as bytes or unknown.
    std::vector<Symbol> symbols_of(std::string_view word) const {
        std::vector<Symbol> symbols;
        const auto add = [&](std::int64_t id, std::size_t length) {
            const std::size_t index = symbols.size();
            symbols.push_back({id, length, index == 0 ? none : index - 1, index + 1});
        };
        std::size_t num_unknown = 0;  // bytes of unknown characters that were not added yet
        for_each_character(word, [&](char32_t, std::string_view character) {
            if (const auto id = vocabulary_.id_of(character)) {
                if (num_unknown > 0) {
                    add(*unknown_, num_unknown);
                    num_unknown = 0;
                }
                add(*id, character.size());
            } else if (const auto bytes = vocabulary_.bytes_of(character);
                       falls_back_to_bytes_ && !bytes.empty()) {
                for (const std::int64_t byte : bytes) add(byte, 1);  // before unknown ones
            } else if (unknown_) {
                if (num_unknown > 0 && !fuses_unknown_) {
                    add(*unknown_, num_unknown);
                    num_unknown = 0;
                }
                num_unknown += character.size();
            }
        });
        if (num_unknown > 0) add(*unknown_, num_unknown);
        return symbols;
    }

    void merge(std::vector<Symbol>& symbols) const {
        using Entry = std::tuple<std::size_t, std::size_t, std::int64_t>;  // rank, place, id
        std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
        const auto push = [&](std::size_t left, std::size_t right) {
            const auto found = merges_.find(key(symbols[left].id, symbols[right].id));
            if (found != merges_.end()) queue.emplace(found->second.rank, left, found->second.id);
        };
        for (std::size_t i = 1; i < symbols.size(); ++i) push(i - 1, i);
        while (!queue.empty()) {
            const auto [rank, place, id] = queue.top();
            queue.pop();
            Symbol& left = symbols[place];
            if (left.length == 0 || left.next >= symbols.size()) continue;
            Symbol& right = symbols[left.next];
            const auto found = merges_.find(key(left.id, right.id));
            if (found == merges_.end() || found->second.id != id) {
                continue;  // one of the two has changed since
            }
            left.id = id;
            left.length += right.length;
            left.next = right.next;
            right.length = 0;
            if (left.next < symbols.size()) {
                symbols[left.next].previous = place;
                push(place, left.next);
            }
            if (left.previous != none) push(left.previous, place);
        }
    }

    const Vocabulary& vocabulary_;
    std::unordered_map<std::uint64_t, Merge> merges_;
    std::optional<std::int64_t> unknown_;
    bool fuses_unknown_ = false;
    bool falls_back_to_bytes_ = false;
    bool ignores_merges_ = false;
};

}  // namespace

std::unique_ptr<WordModel> bpe(const JsonObject& model, const Vocabulary& vocabulary) {
    return std::make_unique<Bpe>(model, vocabulary);
}

}  // namespace dsbd
