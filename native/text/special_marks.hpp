// Text with a mark in the place of every special token, for stop strings that name such tokens.
//
// A text leaves special tokens out. In a marked text each is a mark, which is no UTF-8. So a stop
// string that the tokenizer writes with special tokens is found in it like any other.
#pragma once

#include <utility>

#include "stream_decoder.hpp"

namespace dsbd {

std::string mark_of(std::int64_t token_id);
std::string without_marks(std::string text);

/// A TextRun that returns marked text.
class MarkedRun final : public TextRun {
public:
    explicit MarkedRun(const TextRun& run) : run_(run.copied()) {}

    std::unique_ptr<TextRun> copied() const override;
    std::string push(TokenIds token_ids) override;
    /// The whole rest if it has marks.
    std::string rest(std::size_t num_characters = 0) const override;
    bool is_special(std::int64_t token_id) const override { return run_->is_special(token_id); }
    std::string marked(std::string_view text) const override { return run_->marked(text); }

private:
    // Marks that are not returned yet, each with the number of uncertain characters before it.
    using Waiting = std::vector<std::pair<std::size_t, std::string>>;

    std::string with_mark(std::int64_t token_id);
    static std::string with_marks(Waiting& waiting, const std::string& text, bool ends);

    std::unique_ptr<TextRun> run_;
    Waiting waiting_;
};

}  // namespace dsbd
