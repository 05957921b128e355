// Sources and prompts of a request to an encoder-decoder, from its options.
#include "runtime/prompts.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "option_values.hpp"

namespace dsbd {

namespace {

constexpr const char *SRC_LANG = "src_lang", *TGT_LANG = "tgt_lang";
constexpr const char* FORCED_BOS = "forced_bos_token_id";
constexpr std::size_t NUM_SHOWN = 6;  // languages, in a message

/// Take an option out; null if it is not given.
Json taken(Json& options, const char* name) {
    const Json found = options.value(name, Json());
    options.erase(name);
    return found;
}

}  // namespace

LanguageOptions PromptReader::with_language(std::string_view options) const {
    Json given = Json::parse(options, nullptr, false);  // other errors are the reader's of options
    const bool has_any =
        given.is_object() && (given.contains(SRC_LANG) || given.contains(TGT_LANG));
    if (!has_any) return {std::string(options), Json()};
    const Json src_lang = taken(given, SRC_LANG), tgt_lang = taken(given, TGT_LANG);
    if (!tgt_lang.is_null()) {
        const Json first = given.value(FORCED_BOS, Json());
        if (!first.is_null()) {
            throw Error(std::string(TGT_LANG) + " is " + options::shown(tgt_lang) + " and " +
                        FORCED_BOS + " " + options::shown(first) +
                        ": both say how a target "
                        "begins; leave out one");
        }
        given[FORCED_BOS] = language(TGT_LANG, tgt_lang);
    }
    if (!src_lang.is_null()) language(SRC_LANG, src_lang);
    return {given.dump(), src_lang};
}

RequestInputs PromptReader::read(Ints token_ids, bool is_text, const Json& src_lang) {
    if (!encoder_) return {std::move(token_ids)};
    const std::size_t vocab_size = encoder_->vocab_size;
    for (std::int64_t& token : token_ids) {
        if (token >= 0 && at(token) < vocab_size) continue;
        if (!is_text || !encoder_->unknown_token_id) {
            throw Error("the source has token id " + std::to_string(token) + "; expected 0 to " +
                        std::to_string(vocab_size - 1) + ", the vocabulary of the encoder");
        }
        token = *encoder_->unknown_token_id;
    }
    if (token_ids.empty()) throw Error("the source has no token; give at least one");
    if (!src_lang.is_null()) put_language(token_ids, language(SRC_LANG, src_lang));
    check_length(token_ids.size());
    const SourcePointer source = the_one(token_ids);
    if (vocab_size != bundle_.target.vocab_size) token_ids.clear();
    return {{encoder_->start_token_id}, source, std::move(token_ids)};
}

void PromptReader::check_length(std::size_t num_tokens) const {
    std::size_t limit = encoder_->context_length;
    if (bundle_.draft && bundle_.draft->encoder) {
        limit = std::min(limit, bundle_.draft->encoder->context_length);
    }
    if (num_tokens <= limit) return;
    throw CapacityError("the prompt is too long: this model's maximum context length is " +
                        std::to_string(limit) + " tokens of a source, the source has " +
                        std::to_string(num_tokens) + "; split it, as by sentences");
}

std::int64_t PromptReader::language(const char* option, const Json& name) const {
    const std::string given = std::string(option) + " is " + options::shown(name);
    if (!encoder_ || encoder_->languages.empty()) {
        throw Error(given + ", but the model of " + bundle_.path.string() +
                    " has no tokens for languages; leave it out");
    }
    const auto& languages = encoder_->languages;
    const std::string text = name.is_string() ? name.get<std::string>() : "";
    const auto found = languages.find(text);
    if (found != languages.end()) return found->second;
    std::vector<std::string> names;
    for (const auto& [known, token] : languages) names.push_back(known);
    std::string close = options::did_you_mean(text, names);
    if (close.empty()) {
        names.resize(std::min(names.size(), NUM_SHOWN));
        for (const std::string& each : names) close += (close.empty() ? ", such as " : ", ") + each;
    }
    throw Error(given + ", expected one of the " + std::to_string(languages.size()) +
                " languages of this model" + close);
}

/// Say the language of a source by its first or last token, which names one already.
void PromptReader::put_language(Ints& token_ids, std::int64_t language) const {
    for (std::int64_t* const token : {&token_ids.front(), &token_ids.back()}) {
        for (const auto& [name, known] : encoder_->languages) {
            if (*token != known) continue;
            *token = language;
            return;
        }
    }
    throw Error(
        "src_lang is given, but the source begins and ends with no token of a language; "
        "give it as a text, or with that token");
}

SourcePointer PromptReader::the_one(const Ints& token_ids) {
    const std::lock_guard lock(mutex_);
    std::erase_if(sources_, [](const auto& each) { return each.second.expired(); });
    std::weak_ptr<const Source>& known = sources_[token_ids];
    SourcePointer source = known.lock();
    if (!source) known = source = std::make_shared<TextSource>(token_ids);
    return source;
}

}  // namespace dsbd
