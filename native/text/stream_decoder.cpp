// The text of new tokens, as soon as no later token can change it.
#include "stream_decoder.hpp"

#include <algorithm>
#include <iterator>

#include "unicode.hpp"

namespace dsbd {

namespace {

constexpr std::size_t most_bytes = 4;  // of a UTF-8 character
// Tokens that later text can depend on. The bytes of an unfinished character are in at most three
// of them, and one of four has text that no Strip removes (`most_stripped`).
constexpr std::size_t num_context = 4;
constexpr std::size_t most_tokens = 2 * num_context;

/// Return how many characters at the end of a text belong to an incomplete character.
std::size_t num_unfinished(const Tokenizer& tokenizer, TokenIds tokens, std::string_view text) {
    if (!tokenizer.joints().is_local) {  // which bytes they are is not known
        std::size_t count = 0;
        for (; text.ends_with(replacement_character); ++count) {
            text.remove_suffix(replacement_character.size());
        }
        return count;
    }
    if (!tokenizer.joints().joins_bytes) return 0;
    std::string bytes;
    for (const std::int64_t token : tokens) bytes += tokenizer.bytes_of(token);
    return ends_within_character(bytes) ? 1 : 0;
}

/// Return the last tokens that the text of further tokens depends on.
std::vector<std::int64_t> end_of(const Tokenizer& tokenizer, TokenIds token_ids) {
    if (!tokenizer.joints().is_local) return {token_ids.begin(), token_ids.end()};
    std::vector<std::int64_t> found;
    std::size_t num_before_run = 0;
    for (std::size_t i = token_ids.size(); i > 0 && num_before_run < num_context; --i) {
        const std::int64_t token = token_ids[i - 1];
        if (tokenizer.adds_text(token)) {
            found.push_back(token);
            num_before_run += num_before_run > 0 || !tokenizer.byte_of(token);
        }
    }
    std::reverse(found.begin(), found.end());
    return found;
}

}  // namespace

TextWindow TextWindow::after(const Tokenizer& tokenizer, TokenIds token_ids) {
    TextWindow window(tokenizer);
    window.push(end_of(tokenizer, token_ids));
    if (!window.run_.empty()) {
        window.give_characters_of_run();
        return window;
    }
    const std::string text = tokenizer.decode(window.tokens_);
    window.num_held_ = num_unfinished(tokenizer, window.tokens_, text);
    window.num_given_ = num_characters(text) - window.num_held_;
    return window;
}

/// Return the text of the tokens and of these of the run that was not returned yet.
std::string TextWindow::text_after_given(TokenIds run) const {
    std::vector<std::int64_t> all = tokens_;
    all.insert(all.end(), run.begin(), run.end());
    return characters(tokenizer_->decode(all), num_given_);
}

std::string TextWindow::push(TokenIds token_ids) {
    const std::size_t num_before = tokens_.size();
    for (const std::int64_t token : token_ids)
        if (tokenizer_->adds_text(token)) add(token);
    return tokens_.size() == num_before ? "" : give_text();
}

std::string TextWindow::rest(std::size_t num_characters) const {
    if (num_characters == 0 || !tokenizer_->joints().is_local) {
        return run_.empty() && num_held_ == 0 ? "" : text_after_given(run_);
    }
    if (run_.empty() || !unfinished_.empty()) return "";
    const std::size_t most = most_bytes * num_characters;
    std::size_t start = run_.size() > most ? run_.size() - most : 0;
    while ((static_cast<unsigned char>(*tokenizer_->byte_of(run_[start])) & 0xC0) == 0x80) ++start;
    return text_after_given(TokenIds(run_).subspan(start));
}

void TextWindow::add(std::int64_t token_id) {
    const std::optional<char> byte = tokenizer_->byte_of(token_id);
    if (!byte) {
        end_run();
        tokens_.push_back(token_id);
        return;
    }
    if (!invalid_.empty()) {
        tokens_.push_back(token_id);
        return;
    }
    run_.push_back(token_id);
    unfinished_ += *byte;
    const Scan scan = scanned(unfinished_, 0);
    const bool may_be_surrogate =  // which Python finds by its last byte
        unfinished_.size() == 2 && unfinished_[0] == '\xED' && (*byte & 0xC0) == 0x80;
    if (scan.is_character) {
        unfinished_.clear();
    } else if (!scan.is_begun && !may_be_surrogate) {
        const auto first = run_.end() - static_cast<std::ptrdiff_t>(unfinished_.size());
        std::vector<std::int64_t> invalid(first, run_.end());
        end_run();
        invalid_ = std::move(invalid);
    }
}

/// Move the run to the tokens before it.
void TextWindow::end_run() {
    tokens_.insert(tokens_.end(), run_.begin(), run_.end());
    run_.clear();
    unfinished_.clear();
    invalid_.clear();
}

/// Return the certain text of the tokens; keep those that later text depends on.
std::string TextWindow::give_text() {
    const TextJoints& joints = tokenizer_->joints();
    if (!joints.is_local) {
        num_held_ = 1;
        return "";
    }
    const std::string text = tokenizer_->decode(tokens_);
    num_held_ = joints.joins_bytes && text.ends_with(replacement_character) ? 1 : 0;
    const std::size_t num_given = std::max(num_characters(text) - num_held_, num_given_);
    std::string piece = characters(text, num_given_, num_given);
    num_given_ = num_given;
    if (tokens_.size() > most_tokens) {
        tokens_ = !invalid_.empty()
                      ? invalid_
                      : std::vector<std::int64_t>(tokens_.end() - num_context, tokens_.end());
        num_given_ = num_characters(tokenizer_->decode(tokens_)) - num_held_;
    }
    return piece;
}

/// Mark complete characters of the run as returned: a letter replaces them.
void TextWindow::give_characters_of_run() {
    const std::size_t num_finished = run_.size() - unfinished_.size();
    if (num_finished > 0) {
        tokens_ = {tokenizer_->letter()};
        num_given_ = num_characters(tokenizer_->decode(tokens_));
        run_.erase(run_.begin(), run_.begin() + static_cast<std::ptrdiff_t>(num_finished));
    }
}

}  // namespace dsbd
