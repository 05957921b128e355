// The part of a path that the draft model reads.
#include "drafting/draft_context.hpp"

#include <cmath>

namespace dsbd {
namespace {

constexpr std::int64_t LEAST_LEFT = 32;  // tokens that follow after an answer of the usual length
constexpr std::size_t UNPRICED = 256;  // size if the costs of calls are unknown

/// Return where a path of so many tokens begins for the draft: 1000 tokens, size 128: at 832.
std::size_t start_of(std::size_t num_tokens, std::size_t size) {
    const std::size_t step = std::max<std::size_t>(size / 2, 1);
    return num_tokens > size ? (num_tokens - size) / step * step : 0;
}

}  // namespace

double expected_speed(const RequestCosts& costs, const AcceptanceEstimator& estimator,
                      double agreement) {
    const std::size_t width = costs.num_beams;
    const LoopCost& loop = estimator.loop;
    const double acceptance = estimator.acceptance * agreement;
    const double usual = costs.target(width) + loop.iteration;
    double tokens = 1.0, reach = 1.0, best = 1.0;
    for (std::size_t num_layers = 1; num_layers <= LOOK_AHEAD; ++num_layers) {
        double seconds = costs.target(width * (1 + num_layers)) + loop.iteration;
        seconds += static_cast<double>(num_layers) * (costs.draft(width) + loop.layer);
        reach *= acceptance;
        tokens += reach;
        best = std::max(best, tokens * usual / seconds);
    }
    return best;
}

bool reads_whole_path(const EngineSpec& draft, const SourcePointer& source) {
    return draft.reads_features || draft.reads_source || source;
}

DraftContext::DraftContext(const ContextSettings& settings, const AcceptanceEstimator& estimator)
    : settings_(settings), estimator_(estimator), most_(settings.most_tokens) {
    if (settings.size == AUTO_CONTEXT || settings.size == WHOLE_CONTEXT) return;
    const std::size_t most = 2 * settings.size + settings.most_layers;
    most_ = most_ ? std::min(most_, most) : most;
}

Ints DraftContext::tokens(const Ints& path, std::size_t start) const {
    Ints found;
    if (num_begin(start)) found.push_back(*settings_.begin_token);
    for (std::size_t i = start; i < path.size(); ++i) found.push_back(path[i]);
    return found;
}

std::size_t DraftContext::begin_again(std::size_t first, std::size_t position) {
    std::size_t size = most_ / 2;
    if (settings_.size != AUTO_CONTEXT) size = std::min(size, settings_.size);
    const std::size_t before = offset();
    start_ = std::min(std::max(start_of(position, size), least_start(position)), first);
    return offset() - before;
}

std::size_t DraftContext::choose(std::size_t num_tokens,
                                 const std::function<std::size_t(std::size_t)>& num_cached) {
    const std::size_t left = tokens_left(num_tokens);
    std::vector<Choice> found = choices(num_tokens, left);
    if (is_chosen_ && reaches(num_tokens) && num_cached(start_)) {
        if (settings_.size != AUTO_CONTEXT || !settings_.costs) found.clear();
        const auto same = std::ranges::find(found, start_, &Choice::first);
        if (same == found.end()) {
            found.insert(found.begin(), {start_, size_});
        } else {
            std::rotate(found.begin(), same, same + 1);
        }
    }
    std::size_t best_unread = 0;
    double best_gain = -HUGE_VAL;
    for (const auto& [start, size] : found) {
        const std::size_t num_unread = num_tokens - start + num_begin(start) - num_cached(start);
        const bool is_only = !settings_.costs || found.size() == 1;
        const double gained = is_only ? 0.0 : gain(size, num_unread, left);
        if (gained <= best_gain) continue;
        best_gain = gained;
        best_unread = num_unread;
        start_ = start;
        size_ = size;
    }
    is_chosen_ = true;
    return best_unread;
}

/// Return the seconds that drafts are expected to save.
double DraftContext::gain(std::size_t size, std::size_t num_unread, std::size_t num_left) const {
    const RequestCosts& costs = *settings_.costs;
    const double speed = expected_speed(costs, estimator_, estimator_.agreement(size));
    const double usual = costs.target(costs.num_beams) + estimator_.loop.iteration;
    const double saved = static_cast<double>(num_left) * usual * (1.0 - 1.0 / speed);
    return saved - costs.reading(num_unread, 0);
}

/// Return how many tokens are expected to follow a path of so many.
std::size_t DraftContext::tokens_left(std::size_t num_tokens) const {
    const auto num_new = static_cast<std::int64_t>(num_tokens) -
                         static_cast<std::int64_t>(settings_.num_prompt_tokens);
    const auto most = static_cast<std::int64_t>(settings_.max_new_tokens);
    const auto usual = static_cast<std::int64_t>(std::nearbyint(estimator_.answer_length));
    const std::int64_t expected = std::max((usual ? usual : most) - num_new, LEAST_LEFT);
    return at(std::min(expected, std::max(most - num_new, std::int64_t{1})));
}

/// Return the starts to choose from, the longest path first.
std::vector<DraftContext::Choice> DraftContext::choices(std::size_t num_tokens,
                                                        std::size_t num_left) const {
    const bool fits = !most_ || num_tokens + num_left <= most_;
    const std::size_t largest = fits ? WHOLE_CONTEXT : std::max<std::size_t>(most_ / 2, 1);
    std::vector<std::size_t> sizes{settings_.size};
    if (settings_.size == AUTO_CONTEXT && settings_.costs) {
        sizes.assign(CONTEXT_SIZES.rbegin(), CONTEXT_SIZES.rend());
    } else if (settings_.size == AUTO_CONTEXT) {
        sizes = {UNPRICED};
    }
    std::vector<Choice> found;
    for (std::size_t size : sizes) {
        size = std::min(size, largest);
        const std::size_t start = start_of(num_tokens, size);
        const bool is_new = std::ranges::find(found, start, &Choice::first) == found.end();
        if (is_new) found.emplace_back(start, start ? size : WHOLE_CONTEXT);
    }
    return found;
}

}  // namespace dsbd
