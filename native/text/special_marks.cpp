// Marks of special tokens in stop strings, and in text.
#include "special_marks.hpp"

#include <algorithm>

#include "unicode.hpp"

namespace dsbd {

namespace {

constexpr char BEGIN = '\xFF', END = '\xFE';

}  // namespace

std::string mark_of(std::int64_t token_id) { return BEGIN + std::to_string(token_id) + END; }

std::string without_marks(std::string text) {
    for (std::size_t begin; (begin = text.find(BEGIN)) != std::string::npos;) {
        text.erase(begin, text.find(END, begin) - begin + 1);
    }
    return text;
}

std::unique_ptr<TextRun> MarkedRun::copied() const {
    auto copy = std::make_unique<MarkedRun>(*run_);
    copy->waiting_ = waiting_;
    return copy;
}

std::string MarkedRun::push(TokenIds token_ids) {
    std::string marked;
    for (const std::int64_t& token : token_ids) {
        if (is_special(token)) {
            marked += with_mark(token);
            continue;
        }
        const std::string text = run_->push({&token, 1});
        marked += waiting_.empty() ? text : with_marks(waiting_, text, run_->rest().empty());
    }
    return marked;
}

std::string MarkedRun::rest(std::size_t num_characters) const {
    if (waiting_.empty()) return run_->rest(num_characters);
    Waiting waiting = waiting_;
    return with_marks(waiting, run_->rest(), true);
}

std::string MarkedRun::with_mark(std::int64_t token_id) {
    std::size_t num_before = num_characters(run_->rest());
    if (num_before == 0 && waiting_.empty()) return mark_of(token_id);
    if (!waiting_.empty()) num_before = std::max(num_before, waiting_.back().first);
    waiting_.emplace_back(num_before, mark_of(token_id));
    return "";
}

/// Return a text with the marks that belong into it. ends: whether all do, as no text follows.
std::string MarkedRun::with_marks(Waiting& waiting, const std::string& text, bool ends) {
    const std::size_t size = num_characters(text);
    std::string marked;
    std::size_t begin = 0;
    Waiting left;
    for (auto& [number, mark] : waiting) {
        if (number <= size || ends) {
            marked += characters(text, begin, number) + mark;
            begin = std::min(number, size);
        } else {
            left.emplace_back(number - size, std::move(mark));
        }
    }
    waiting = std::move(left);
    return marked + characters(text, begin);
}

}  // namespace dsbd
