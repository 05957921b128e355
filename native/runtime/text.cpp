// Text of streams up to stop strings, and the search for these.
#include "runtime/text.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "text/chat_template.hpp"
#include "text/unicode.hpp"

namespace dsbd {

namespace {

std::size_t first_stop(std::string_view text, const std::vector<std::string>& stops,
                       std::size_t num_exempt_bytes = 0) {
    std::size_t first = std::string_view::npos;
    for (const std::string& stop : stops) {
        first = std::min(first, text.find(stop, num_exempt_bytes));
    }
    return first;
}

bool has_stop(std::string_view text, const std::vector<std::string>& stops) {
    return first_stop(text, stops) != std::string_view::npos;
}

/// A StopState that searches the text of one path for stop strings.
class StopSearch final : public StopState {
public:
    StopSearch(const TextRun& start, std::shared_ptr<const std::vector<std::string>> stops)
        : run_(start.copied()), stops_(std::move(stops)) {
        for (const std::string& stop : *stops_) most_ = std::max(most_, num_characters(stop));
    }

    bool has_ended() const override { return has_ended_; }
    std::shared_ptr<const StopState> extended(std::int64_t token) const override {
        auto next = std::make_shared<StopSearch>(*run_, stops_);
        next->has_ended_ = has_ended_;
        if (!has_ended_) next->search(tail_ + next->run_->push({&token, 1}));
        return next;
    }

private:
    void search(const std::string& text) {
        tail_ = last_characters(text, most_ - 1);
        const std::string uncertain = run_->rest(most_);
        const bool is_long = num_characters(uncertain) >= most_;
        has_ended_ =
            has_stop(text, *stops_) || has_stop(is_long ? uncertain : tail_ + uncertain, *stops_);
    }

    std::unique_ptr<TextRun> run_;
    std::shared_ptr<const std::vector<std::string>> stops_;
    std::size_t most_ = 1;  // characters of a stop string
    std::string tail_;      // the end of the final text, in which a stop string may have begun
    bool has_ended_ = false;
};

/// A StopState that ends with either of two.
class TwoSearches final : public StopState {
public:
    using Pointer = std::shared_ptr<const StopState>;
    TwoSearches(Pointer first, Pointer second)
        : first_(std::move(first)), second_(std::move(second)) {}

    bool has_ended() const override { return first_->has_ended() || second_->has_ended(); }
    Pointer extended(std::int64_t token) const override {
        return std::make_shared<TwoSearches>(first_->extended(token), second_->extended(token));
    }

private:
    Pointer first_, second_;
};

/// Return the stop strings that name special tokens, marked.
std::vector<std::string> special_stops(const TextRun& start,
                                       const std::vector<std::string>& stops) {
    std::vector<std::string> special;
    for (const std::string& stop : stops) {
        std::string marked = start.marked(stop);
        if (marked != stop) special.push_back(std::move(marked));
    }
    return special;
}

/// Tokens decoded by a program, all of them again with every piece.
class CalledRun final : public TextRun {
public:
    CalledRun(std::shared_ptr<const TextCallbacks> callbacks, Ints token_ids)
        : callbacks_(std::move(callbacks)),
          token_ids_(std::move(token_ids)),
          num_given_(callbacks_->decode(token_ids_).size()) {}

    std::unique_ptr<TextRun> copied() const override { return std::make_unique<CalledRun>(*this); }
    std::string push(TokenSpan token_ids) override {
        token_ids_.insert(token_ids_.end(), token_ids.begin(), token_ids.end());
        std::string text = rest();
        while (text.ends_with(replacement_character)) {  // may be incomplete
            text.resize(text.size() - replacement_character.size());
        }
        num_given_ += text.size();
        return text;
    }
    std::string rest(std::size_t num_characters = 0) const override {
        const std::string text = callbacks_->decode(token_ids_);
        const std::string rest = text.substr(std::min(num_given_, text.size()));
        return num_characters ? last_characters(rest, num_characters) : rest;
    }
    bool is_special(std::int64_t token_id) const override {
        return callbacks_->decode({&token_id, 1}).empty();
    }
    std::string marked(std::string_view text) const override {
        Ints ids = callbacks_->encode(text);
        const auto special = [&](std::int64_t id) { return is_special(id); };
        if (std::ranges::any_of(ids, special)) ids = without_added(std::move(ids));
        if (std::ranges::none_of(ids, special)) return std::string(text);
        std::string marked;
        for (auto at = ids.begin(); at != ids.end();) {
            const auto next = std::find_if(at, ids.end(), special);
            if (at != next) marked += callbacks_->decode({at, next});
            if (next == ids.end()) break;
            marked += mark_of(*next);
            at = next + 1;
        }
        return marked;
    }

private:
    /// Return token ids of a text without those that `encode` adds to every text.
    Ints without_added(Ints ids) const {
        const Ints added = callbacks_->encode("");
        const auto [begin, at_end] = std::ranges::mismatch(ids, added);
        const auto num_at_end = added.end() - at_end;
        const bool has_end = num_at_end <= ids.end() - begin &&
                             std::equal(at_end, added.end(), ids.end() - num_at_end);
        return {begin, has_end ? ids.end() - num_at_end : ids.end()};
    }

    std::shared_ptr<const TextCallbacks> callbacks_;
    Ints token_ids_;
    std::size_t num_given_;  // bytes of the text
};

class CalledText final : public Text {
public:
    explicit CalledText(TextCallbacks callbacks)
        : callbacks_(std::make_shared<const TextCallbacks>(std::move(callbacks))) {}
    Ints prompt(std::string_view text) const override { return callbacks_->encode(text); }
    Ints encode(std::string_view text) const override { return callbacks_->encode(text); }
    Ints chat(const Json&) const override {
        throw Error(
            "messages are given, but the text of this bundle is the program's; give the "
            "prompt that the chat template makes of them");
    }
    std::unique_ptr<TextRun> after(TokenSpan prompt_ids, bool) const override {
        return std::make_unique<CalledRun>(callbacks_, Ints(prompt_ids.begin(), prompt_ids.end()));
    }

private:
    std::shared_ptr<const TextCallbacks> callbacks_;
};

/// Text of the bundle's own tokenizer. What is not as in Python is refused with its reason.
class NativeText final : public Text {
public:
    explicit NativeText(const Bundle& bundle) : folder_(bundle.path) {
        const bool has_checks = bundle.size_by_file.count(TEXT_CHECKS_FILE) > 0;
        if (const auto& measured = bundle.target.native_text) entry_ = *measured;
        if (!has_checks && !entry_.decodes) return;
        try {
            tokenizer_.emplace(bundle.path, bundle.target.bos_token_id);
        } catch (const Error& error) {  // a kind of tokenizer that is not understood
            entry_ = {false, false, false, error.what()};
            return;
        }
        if (has_checks) entry_ = TextAnswers(*tokenizer_, bundle.path).verdict();
        if (entry_.encodes && bundle.size_by_file.count(SOURCE_TOKENIZER_FILE)) {
            sources_.emplace(bundle.path, std::nullopt, SOURCE_TOKENIZER_FILE);
        }
    }
    Ints prompt(std::string_view text) const override {
        check(entry_.encodes, "text to token ids");
        return (sources_ ? sources_ : tokenizer_)->encode(text);
    }
    Ints encode(std::string_view text) const override {
        check(entry_.encodes, "text to token ids");
        return tokenizer_->encode(text, false);
    }
    Ints chat(const Json& messages) const override {
        check(entry_.encodes && entry_.renders, "chats to text");
        return tokenizer_->encode(ChatTemplate(folder_).render(messages), false);
    }
    std::unique_ptr<TextRun> after(TokenSpan prompt_ids, bool skips_special) const override {
        if (!entry_.decodes) return nullptr;
        if (!skips_special) {
            throw Error(
                "skip_special_tokens is false, which the native library does not do yet; "
                "leave it out, or use the token ids of the result");
        }
        return std::make_unique<TextWindow>(TextWindow::after(*tokenizer_, prompt_ids));
    }

private:
    void check(bool holds, const char* what) const {
        if (holds && tokenizer_) return;
        throw Error("the native library does not read " + std::string(what) + " for " +
                    folder_.string() + " as Python does: " + entry_.reason +
                    "; give token ids, or callbacks by dsbd_set_text");
    }

    std::filesystem::path folder_;
    TextVerdict entry_{false, false, false,
                       "the bundle has no text_checks.json, as an earlier version exported it; "
                       "export it again, or replace its draft by dsbd-export --bundle --draft"};
    std::optional<Tokenizer> tokenizer_, sources_;  // sources_: if they are tokenized otherwise
};

}  // namespace

std::unique_ptr<const Text> text_by(TextCallbacks callbacks) {
    return std::make_unique<CalledText>(std::move(callbacks));
}

std::unique_ptr<const Text> text_of(const Bundle& bundle) {
    return std::make_unique<NativeText>(bundle);
}

std::string text_until_stop(const TextRun& start, const Ints& token_ids,
                            const DecodingConfig& config) {
    if (!special_stops(start, config.stop_strings).empty()) {
        TextStream stream(start, config);
        const std::string text = stream.push(token_ids);
        return text + stream.finish();
    }
    const auto text_of_first = [&](std::size_t count) {
        const std::unique_ptr<TextRun> run = start.copied();
        std::string text = run->push(TokenSpan(token_ids).first(count));
        return text + run->rest();
    };
    std::string text = text_of_first(token_ids.size()), exempt;
    if (!config.stop_strings.empty() && config.min_new_tokens) {
        exempt = text_of_first(std::min(config.min_new_tokens, token_ids.size()));
        while (!text.starts_with(exempt)) exempt.pop_back();  // its end became another character
    }
    return text.substr(0, first_stop(text, config.stop_strings, exempt.size()));
}

std::shared_ptr<const StopState> stop_state(const TextRun& start, const DecodingConfig& config) {
    if (config.stop_strings.empty()) return nullptr;
    const auto search_for = [](const TextRun& run, std::vector<std::string> stops) {
        return std::make_shared<StopSearch>(
            run, std::make_shared<const std::vector<std::string>>(std::move(stops)));
    };
    const auto search = search_for(start, config.stop_strings);
    auto special = special_stops(start, config.stop_strings);
    if (special.empty()) return search;
    return std::make_shared<TwoSearches>(search, search_for(MarkedRun(start), std::move(special)));
}

TextStream::TextStream(const TextRun& start, const DecodingConfig& config)
    : num_exempt_(config.min_new_tokens) {
    auto special = special_stops(start, config.stop_strings);
    run_ = special.empty() ? start.copied() : std::make_unique<MarkedRun>(start);
    if (!special.empty()) filters_.emplace_back(std::move(special));
    filters_.emplace_back(config.stop_strings);
}

std::string TextStream::push(TokenSpan token_ids) {
    const std::size_t count = std::min(num_exempt_, token_ids.size());
    num_exempt_ -= count;
    Ints exempt(token_ids.begin(), token_ids.begin() + static_cast<std::ptrdiff_t>(count));
    if (filters_.size() > 1) std::erase_if(exempt, [&](auto id) { return run_->is_special(id); });
    const std::string first = exempt.empty() ? "" : run_->push(exempt);
    std::string text = run_->push(token_ids.subspan(count));
    for (StopFilter& filter : filters_) text = without_marks(filter.push(text));
    return first + text;
}

std::string TextStream::finish() {
    std::string text = run_->rest();
    for (StopFilter& filter : filters_) {
        text = filter.push(text);
        text = without_marks(text + filter.finish());
    }
    return text;
}

std::string StopFilter::push(const std::string& piece) {
    if (is_over_) return "";
    const std::string text = held_ + piece;
    const std::size_t stop = first_stop(text, stops_);
    is_over_ = stop != std::string::npos;
    const std::size_t num_held = is_over_ ? 0 : num_begun(text);
    held_ = text.substr(text.size() - num_held);
    return text.substr(0, std::min(stop, text.size() - num_held));
}

std::string StopFilter::finish() { return is_over_ ? "" : std::exchange(held_, ""); }

/// Bytes at the end of a text that may begin a stop string.
std::size_t StopFilter::num_begun(std::string_view text) const {
    std::size_t most = 0;
    for (const std::string& stop : stops_) {
        for (std::size_t n = std::min(stop.size() - 1, text.size()); n > most; --n) {
            if (text.ends_with(std::string_view(stop).substr(0, n))) most = n;
        }
    }
    return most;
}

}  // namespace dsbd
