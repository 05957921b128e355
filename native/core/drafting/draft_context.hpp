// The part of a path that the draft model reads: its end, from a start on. draft_context.py has the
// reasons.
#pragma once

#include "drafting/acceptance.hpp"
#include "drafting/cost_curve.hpp"

namespace dsbd {

/// Whether a draft's rows need all rows before them: features, or those of a source.
bool reads_whole_path(const EngineSpec& draft, const SourcePointer& source);

/// What a context depends on, of its request and its draft.
struct ContextSettings {
    std::size_t size = WHOLE_CONTEXT;  // of DecodingConfig::draft_context
    std::size_t most_tokens = 0;  // positions of the draft; 0: no limit
    std::optional<std::int64_t> begin_token = {};
    std::size_t num_prompt_tokens = 0, max_new_tokens = 0;
    std::size_t most_layers = 0;  // of a draft
    const RequestCosts* costs = nullptr;  // null: unknown
};

/// Return the tokens of the best draft in the time of an iteration without one, 1 at least.
///
/// As if every layer were as wide as there are beams and accepted with the mean probability of the
/// latest layers times `agreement`.
double expected_speed(const RequestCosts& costs, const AcceptanceEstimator& estimator,
                      double agreement = 1.0);

/// Where the draft's path of one request begins.
///
/// Position p of the request's path is position p - `offset` of the draft's.
class DraftContext {
public:
    /// Takes what lives as long as the context.
    DraftContext(const ContextSettings& settings, const AcceptanceEstimator& estimator);

    /// The first token that is read after the begin token; 0: the whole path is read.
    std::size_t start() const { return start_; }
    /// Positions by which the draft's are lower: the start, less the row of a begin token before
    /// it.
    std::size_t offset() const { return start_ - num_begin(); }
    /// Rows before the one of the start: that of a begin token.
    std::size_t num_begin() const { return num_begin(start_); }
    /// Its size, WHOLE_CONTEXT if the path is read from its beginning on.
    std::size_t size() const { return size_; }
    /// Return the draft's tokens of a path.
    Ints tokens(const Ints& path) const { return tokens(path, start_); }
    Ints tokens(const Ints& path, std::size_t start) const;
    /// Whether a draft after this position of the request's path has positions.
    bool reaches(std::size_t position) const {
        return !most_ || position + settings_.most_layers - offset() < most_;
    }
    /// Whether it would have positions if the path began with `first`.
    bool can_reach(std::size_t first, std::size_t position) const {
        return !most_ || least_start(position) <= first;
    }
    /// Move the start on, to `first` at most, until `reaches`; return by how much.
    std::size_t begin_again(std::size_t first, std::size_t position);
    /// Choose the start for a path of which so many tokens are read next; return how many.
    ///
    /// num_cached: returns, by start, how many of the draft's tokens have rows already.
    std::size_t choose(std::size_t num_tokens,
                       const std::function<std::size_t(std::size_t)>& num_cached);

private:
    using Choice = std::pair<std::size_t, std::size_t>;  // start, size
    std::size_t num_begin(std::size_t start) const {
        return start && settings_.begin_token ? 1 : 0;
    }
    std::size_t least_start(std::size_t position) const {
        const std::size_t end = position + settings_.most_layers + 1;
        return end + settings_.begin_token.has_value() - std::min(end, most_);
    }
    std::size_t tokens_left(std::size_t num_tokens) const;
    std::vector<Choice> choices(std::size_t num_tokens, std::size_t num_left) const;
    double gain(std::size_t size, std::size_t num_unread, std::size_t num_left) const;

    ContextSettings settings_;
    const AcceptanceEstimator& estimator_;
    std::size_t most_;  // positions of a path before it begins again; 0: no limit
    std::size_t start_ = 0, size_ = WHOLE_CONTEXT;  // start: after the begin token; 0: whole path
    bool is_chosen_ = false;
};

}  // namespace dsbd
