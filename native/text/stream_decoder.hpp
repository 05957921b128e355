// Streaming decoder: the text of a growing token sequence in pieces that stay unchanged.
//
// The text of a continuation is the text that its tokens add to the tokens before them. Which text
// is certain depends on how tokens join (`TextJoints`): of byte-level tokenizers all but a U+FFFD
// at the end, which may be an incomplete character; a run of byte tokens when it ends, or once it
// cannot be UTF-8 anymore; of tokenizers that work token by token, all; of a decoder that looks for
// text across tokens, nothing before the end. Numbers of characters are of code points.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tokenizer.hpp"

namespace dsbd {

/// Text of a growing token sequence after a prompt. Copies go on from the same place.
class TextRun {
public:
    virtual ~TextRun() = default;
    virtual std::unique_ptr<TextRun> copied() const = 0;
    /// Take the next tokens; return the text that is certain now and was not returned yet.
    virtual std::string push(TokenIds token_ids) = 0;
    /// Return the text that is not certain yet, an unfinished character as U+FFFD; or with
    /// `num_characters` its end, at least so many if it is that long and its end is certain.
    virtual std::string rest(std::size_t num_characters = 0) const = 0;
    /// Whether texts leave out this token, which is special.
    virtual bool is_special(std::int64_t token_id) const = 0;
    /// Return a text with a mark (special_marks.hpp) in place of each special token.
    virtual std::string marked(std::string_view text) const = 0;
};

/// The end of a token sequence: all of it that further text depends on. Paths with a common
/// beginning can share it; without tokens it is the start of a text.
class TextWindow final : public TextRun {
public:
    explicit TextWindow(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}
    /// Return the window after a prompt, whose text counts as returned, except for an incomplete
    /// character at its end.
    static TextWindow after(const Tokenizer& tokenizer, TokenIds token_ids);

    std::unique_ptr<TextRun> copied() const override { return std::make_unique<TextWindow>(*this); }
    std::string push(TokenIds token_ids) override;
    /// With `num_characters` the work does not grow with the run; an incomplete character, and a
    /// whole run that ends in one, are left out.
    std::string rest(std::size_t num_characters = 0) const override;
    bool is_special(std::int64_t token_id) const override {
        return tokenizer_->is_special(token_id);
    }
    std::string marked(std::string_view text) const override { return tokenizer_->marked(text); }

private:
    void add(std::int64_t token_id);
    void end_run();
    std::string give_text();
    std::string text_after_given(TokenIds run) const;
    void give_characters_of_run();

    const Tokenizer* tokenizer_;
    std::vector<std::int64_t> tokens_;  // the last ones before `run_`
    std::size_t num_given_ = 0;  // characters of the text of `tokens_` that were returned
    std::size_t num_held_ = 0;  // characters after those: they can still change
    std::vector<std::int64_t> run_;  // byte tokens at the end that are UTF-8 so far
    std::string unfinished_;  // the last bytes of `run_`, where they begin a character
    std::vector<std::int64_t> invalid_;  // those that made the run at the end of `tokens_` invalid
};

}  // namespace dsbd
