// The steps of a tokenizer: added tokens, normalizer, words, model, special tokens.
#include "tokenizer.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "../core/error.hpp"
#include "added_tokens.hpp"
#include "special_marks.hpp"
#include "unicode.hpp"

namespace dsbd {

namespace {

/// Ids by token, as they are in the file.
using Ids = std::map<std::string, Json>;

/// Return the content of tokenizer.json, except for the fields of model.vocab: those are added to
/// `ids`, as Json is slow with so many.
Json content_of(const std::filesystem::path& file, Ids& ids) {
    std::array<std::string, 4> names;  // of the field at each depth
    return json_from_file(file, [&](int depth, Json::parse_event_t event, Json& value) {
        const auto level = static_cast<std::size_t>(depth);
        const bool is_name = event == Json::parse_event_t::key;
        if (is_name && level < names.size()) names[level] = value.get<std::string>();
        const bool is_token = level == 3 && names[1] == "model" && names[2] == "vocab";
        if (is_token && event == Json::parse_event_t::value) ids[names[3]] = value;
        return !(is_token && is_name);
    });
}

/// Return the normalizer if it is understood, and why it is not.
std::pair<std::unique_ptr<const Normalizer>, std::string> normalizer_of(const JsonObject& json) {
    try {
        return {std::make_unique<Normalizer>(json), ""};
    } catch (const Error& error) {
        return {nullptr, error.what()};
    }
}

using IdByCode = std::map<std::string, std::int64_t>;

/// Return the bytes of the code that a source begins with, spaces before it included.
std::size_t length_of_code(std::string_view text) {
    static const Regex code("\\A[\\s\\x1C-\\x1F]*>>[^\\s\\x1C-\\x1F<>]+<<", "codes");
    const std::vector<Range> found = code.find_all(text);
    return found.empty() ? 0 : found[0].end;
}

/// Make the codes of a tokenizer of sources text, and return their tokens.
IdByCode take_codes(Json& content, const std::string& file) {
    IdByCode found;
    try {
        Json& vocabulary = content.at("model").at("vocab");
        std::erase_if(content.at("added_tokens").get_ref<Json::array_t&>(), [&](const Json& token) {
            const auto& piece = token.at("content").get_ref<const std::string&>();
            if (piece.empty() || length_of_code(piece) != piece.size()) return false;
            const auto id = token.at("id").get_ref<const std::uint64_t&>();
            vocabulary.at(id).at(0) = std::string(replacement_character) + piece;  // in no text
            found[piece] = static_cast<std::int64_t>(id);
            return true;
        });
    } catch (const Json::exception&) {
        throw Error(file + " has added tokens that are invalid; export the bundle again");
    }
    return found;
}

std::int64_t id_of_code(const std::string& code, const IdByCode& id_by_code) {
    const auto found = id_by_code.find(code);
    if (found != id_by_code.end()) return found->second;
    throw Error("the source begins with " + code + ", a code that this model lacks; it has " +
                (id_by_code.empty() ? "none: leave the code out"
                                    : std::to_string(id_by_code.size()) + ", such as " +
                                          id_by_code.begin()->first));
}

}  // namespace

struct Tokenizer::TextOut {
    TextOut(const JsonObject& json, const Ids& ids, const Normalizer* normalizer)
        : vocabulary(json.object("model"), ids),
          added(json, vocabulary, normalizer),
          decoder(json) {}

    /// Return a token as the decoder gets it, nullptr for an unknown id.
    const std::string* spelling_of(std::int64_t id) const {
        const AddedToken* token = added.find(id);
        return token == nullptr ? vocabulary.token_of(id) : &token->spelling;
    }

    Vocabulary vocabulary;
    AddedTokens added;
    Decoder decoder;
};

struct Tokenizer::TextIn {
    TextIn(const JsonObject& json, std::unique_ptr<const Normalizer> given, const TextOut& out)
        : normalizer(std::move(given)), pre_tokenizer(json), post_processor(json) {
        const auto version = json.text_or_null("version");
        if (version && version != "1.0") json.refuse("version", "1.0");
        model = word_model(json.object("model"), out.vocabulary);
        json.skip({"truncation", "padding"});
        json.check_all_read();
        if (pre_tokenizer.asks_for_start() && !normalizer->keeps_start()) {
            json.refuse("pre_tokenizer",
                        "no prepend_scheme first after a normalizer that may "
                        "drop the beginning of a text");
        }
    }

    std::unique_ptr<const Normalizer> normalizer;
    PreTokenizer pre_tokenizer;
    PostProcessor post_processor;
    std::unique_ptr<const WordModel> model;
};

Tokenizer::Tokenizer(const std::filesystem::path& folder, std::optional<std::int64_t> bos_token_id,
                     const std::string& name) {
    const std::filesystem::path file = folder / name;
    Ids ids;
    Json content = content_of(file, ids);
    if (name == SOURCE_TOKENIZER_FILE) id_by_code_ = take_codes(content, file.string());
    const JsonObject json(content, file.string(),
                          "use the C library or callbacks for this tokenizer");
    auto [normalizer, refusal] = normalizer_of(json);
    out_ = std::make_unique<TextOut>(json, ids, normalizer.get());
    if (normalizer == nullptr) {
        encoding_refusal_ = refusal;
    } else {
        try {
            in_ = std::make_unique<TextIn>(json, std::move(normalizer), *out_);
        } catch (const Error& error) {
            encoding_refusal_ = error.what();
        }
    }
    const std::size_t num_tokens = out_->vocabulary.size() + out_->added.size();
    adds_text_ = std::vector<std::atomic<std::uint8_t>>(num_tokens);
    letter_ = first_letter();
    if (bos_token_id && in_ != nullptr) read_bos_token(folder, *bos_token_id);
}

Tokenizer::~Tokenizer() = default;

void Tokenizer::read_bos_token(const std::filesystem::path& folder, std::int64_t bos_token_id) {
    const std::filesystem::path file = folder / "tokenizer_config.json";
    if (!std::filesystem::exists(file)) return;
    const Json config = json_from_file(file);
    const bool adds = config.is_object() && config.value("add_bos_token", Json()) == Json(true);
    const std::vector<std::int64_t> around = encode("");
    if (adds && std::find(around.begin(), around.end(), bos_token_id) == around.end()) {
        added_first_ = {bos_token_id};
    }
}

std::vector<std::int64_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
    if (in_ == nullptr) throw Error("text cannot be encoded: " + encoding_refusal_);
    if (!is_valid(text)) {
        throw Error("the text of " + std::to_string(text.size()) +
                    " bytes is not UTF-8; convert it before");
    }
    std::vector<std::int64_t> all, ids;
    if (add_special_tokens) all = added_first_;
    if (const std::size_t length = id_by_code_ ? length_of_code(text) : 0) {
        const std::size_t begin = text.find(">>");
        all.push_back(id_of_code(std::string(text.substr(begin, length - begin)), *id_by_code_));
        text.remove_prefix(length);
    }
    for (const Piece& piece : out_->added.split(text, *in_->normalizer)) {
        if (piece.token != nullptr) {
            ids.push_back(piece.token->id);
            continue;
        }
        for (const Word& word : in_->pre_tokenizer.words(piece.word)) {
            in_->model->tokenize(word.text, ids);
        }
    }
    if (add_special_tokens) {
        in_->post_processor.append(ids, all);
    } else {
        all.insert(all.end(), ids.begin(), ids.end());
    }
    return all;
}

std::string Tokenizer::decode(TokenIds token_ids, bool skip_special_tokens) const {
    std::vector<std::string> tokens;
    for (const std::int64_t id : token_ids) {
        const std::string* token = out_->spelling_of(id);
        if (token != nullptr && !(skip_special_tokens && out_->added.is_special(*token))) {
            tokens.push_back(*token);
        }
    }
    return token_ids.empty() ? "" : out_->decoder.decoded(std::move(tokens));
}

const TextJoints& Tokenizer::joints() const { return out_->decoder.joints(); }

std::string Tokenizer::piece(std::int64_t token_id) const {
    const AddedToken* added = out_->added.find(token_id);
    const std::string* token =
        added == nullptr ? out_->vocabulary.token_of(token_id) : &added->content;
    return token == nullptr ? "" : *token;
}

std::string Tokenizer::bytes_of(std::int64_t token_id) const {
    const std::string token = piece(token_id);
    return bytes_from_symbols(token).value_or(token);
}

std::optional<char> Tokenizer::byte_of(std::int64_t token_id) const {
    return joints().has_byte_runs ? byte_of_spelling(piece(token_id)) : std::nullopt;
}

bool Tokenizer::adds_text(std::int64_t token_id) const {
    const auto index = static_cast<std::size_t>(token_id);
    if (index < adds_text_.size() && adds_text_[index] != 0) return adds_text_[index] == 2;
    const std::int64_t ids[] = {token_id, letter_, token_id};
    const std::int64_t around[] = {letter_, token_id, letter_};
    const std::int64_t letters[] = {letter_, letter_};
    const std::string one = decode({letters, 1});
    const bool adds =
        decode({ids, 2}) != one || decode({ids + 1, 2}) != one || decode(around) != decode(letters);
    if (index < adds_text_.size()) adds_text_[index] = adds ? 2 : 1;
    return adds;
}

bool Tokenizer::is_special(std::int64_t token_id) const {
    const AddedToken* token = out_->added.find(token_id);
    return token != nullptr && token->is_special;
}

std::string Tokenizer::marked(std::string_view text) const {
    std::string marked;
    for (const Piece& piece : out_->added.split_special(text)) {
        marked += piece.token == nullptr ? piece.word.text : mark_of(piece.token->id);
    }
    return marked;
}

std::int64_t Tokenizer::first_letter() const {
    const auto num_tokens = static_cast<std::int64_t>(adds_text_.size());
    for (std::int64_t id = 0; id < num_tokens; ++id) {
        const std::string text = decode({&id, 1});
        bool is_text = false;
        for_each_character(text, [&](char32_t code, std::string_view) {
            const bool is_separator = code >= 0x1C && code <= 0x1F;  // a space in Python
            is_text = is_text || !(is_space(code) || is_separator);
        });
        if (is_text && text.find(replacement_character) == std::string::npos) return id;
    }
    return 0;
}

}  // namespace dsbd
