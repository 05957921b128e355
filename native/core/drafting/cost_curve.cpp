// Seconds of engine calls by their rows: given, or learned from the calls that requests make.
#include "drafting/cost_curve.hpp"

#include <cmath>

#include "kv_cache.hpp"

namespace dsbd {
namespace {

constexpr std::size_t KEPT_CALLS = 9;  // of a size
constexpr std::size_t SOON = 3;        // calls of a size each of which changes the curve at once
constexpr double GUESSED_SHARE = 0.05;  // of the seconds of one row: the cost of a further row
constexpr std::size_t FIRST_ROWS = 8;  // of the first draft's target call; then twice those seen
constexpr double BYTES_PER_SECOND = 1e10;  // read by a call of one row
constexpr std::size_t FIRST_CALLS[] = {1, 1, 1, 32, 32};  // rows; each size warms up
constexpr std::size_t MOST_SET_UPS = 3;  // calls of a size: one binds it, one records it
constexpr std::size_t NUM_SIZES = LEARNED_ROWS.size();

std::size_t size_of(double rows) {
    const auto size = std::lower_bound(LEARNED_ROWS.begin(), LEARNED_ROWS.end(), rows);
    return static_cast<std::size_t>(size - LEARNED_ROWS.begin());
}

Floats learned_rows() { return Floats(LEARNED_ROWS.begin(), LEARNED_ROWS.end()); }

/// Return the value at x of the line through points, (n,) each; the ends' values beyond them.
double interpolated(double x, FloatSpan xs, FloatSpan ys) {
    const auto above = std::upper_bound(xs.begin(), xs.end(), x);
    if (above == xs.begin()) return ys.front();
    if (above == xs.end()) return ys.back();
    const auto i = static_cast<std::size_t>(above - xs.begin()) - 1;
    if (xs[i] == x) return ys[i];
    return (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) * (x - xs[i]) + ys[i];
}

}  // namespace

Floats CostCurve::up_to(std::size_t most_rows, std::size_t num_sharers) const {
    Floats xs{0.0}, ys{0.0}, found;
    xs.insert(xs.end(), rows.begin(), rows.end());
    ys.insert(ys.end(), seconds.begin(), seconds.end());
    const std::size_t last = xs.size() - 1;
    const double slope = (ys[last] - ys[last - 1]) / (xs[last] - xs[last - 1]);
    for (std::size_t n = 0; n <= most_rows; ++n) {
        const auto num_rows = static_cast<double>(n * num_sharers);
        const double beyond = std::max(num_rows - xs[last], 0.0) * slope;
        const double together = interpolated(num_rows, xs, ys) + beyond;
        found.push_back(together / static_cast<double>(num_sharers));
    }
    return found;
}

bool LearnedCurve::learn(std::size_t num_rows, double seconds) {
    if (num_rows < 1 || num_rows > LEARNED_ROWS.back() || !(seconds > 0.0)) return false;
    auto& calls = calls_[size_of(static_cast<double>(num_rows))];
    calls.emplace_back(seconds, num_rows);
    if (calls.size() > KEPT_CALLS) calls.pop_front();
    ++num_calls;
    if (num_calls < next_fit_ && calls.size() > SOON) return false;
    next_fit_ = num_calls + std::min<std::int64_t>(num_calls, 32);
    return true;
}

/// Return the first quartile of the calls of each size, except the first calls if others are known.
std::vector<LearnedCurve::Point> LearnedCurve::points() const {
    const bool has_others = std::any_of(calls_.begin(), calls_.end(),
                                        [](const auto& calls) { return calls.size() > 1; });
    std::vector<Point> found;
    for (const auto& calls : calls_) {
        if (calls.size() < (has_others ? 2u : 1u)) continue;
        std::vector<std::pair<double, std::size_t>> sorted(calls.begin() + (has_others ? 1 : 0),
                                                           calls.end());
        std::sort(sorted.begin(), sorted.end());
        const auto& [seconds, rows] = sorted[(sorted.size() - 1) / 4];
        found.push_back({static_cast<double>(rows), seconds, static_cast<double>(sorted.size())});
    }
    return found;
}

CostCurve LearnedCurve::curve(double scale) {
    CostCurve found{learned_rows(), {}, std::pair<std::size_t, std::size_t>(0, 0)};
    if (!num_calls) {
        for (const double rows : found.rows) {
            found.seconds.push_back(guess_ * scale * (1.0 + GUESSED_SHARE * (rows - 1.0)));
        }
        return found;
    }
    const std::vector<Point> known = points();
    double least = HUGE_VAL;  // seconds per row of any point; the line is nowhere below
    for (const Point& point : known) least = std::min(least, point.seconds / point.rows);
    const Line line = line_through(known);
    const auto on_line = [&](double rows) {
        return std::max(line.start + std::max(line.slope, 0.0) * rows, least);
    };
    // Of an observed size its own calls count as often as they were seen, the line once.
    Floats called, ratios, trust(NUM_SIZES, 0.5), sums;
    for (const Point& point : known) {
        ratios.push_back((point.weight * point.seconds / on_line(point.rows) + 1.0) /
                         (point.weight + 1.0));
        called.push_back(found.rows[size_of(point.rows)]);
        trust[size_of(point.rows)] += point.weight;
    }
    for (std::size_t i = 0; i < NUM_SIZES; ++i) {
        const double rows = found.rows[i];
        sums.push_back(trust[i] * on_line(rows) * interpolated(rows, called, ratios));
    }
    found.seconds = never_falling(sums, trust);
    found.seen = {static_cast<std::size_t>(known.front().rows),
                  static_cast<std::size_t>(known.back().rows)};
    return found;
}

/// Return the line of least relative errors through the points and two guessed ones.
LearnedCurve::Line LearnedCurve::line_through(const std::vector<Point>& known) {
    Floats ordered, xs, ys, weights;
    for (const Point& point : known) {
        ordered.push_back(point.seconds / (1.0 + GUESSED_SHARE * (point.rows - 1.0)));
        xs.push_back(point.rows);
        ys.push_back(point.seconds);
        weights.push_back(std::sqrt(point.weight) / point.seconds);
    }
    std::sort(ordered.begin(), ordered.end());
    const std::size_t n = ordered.size();
    const double one_row = (ordered[(n - 1) / 2] + ordered[n / 2]) / 2.0;
    times_guessed = one_row / guess_;
    xs.insert(xs.end(), {1.0, 1.0 + 1.0 / GUESSED_SHARE});
    ys.insert(ys.end(), {one_row, 2.0 * one_row});
    weights.insert(weights.end(), {1.0 / one_row, 1.0 / (2.0 * one_row)});
    double total = 0.0, mean_x = 0.0, mean_y = 0.0, products = 0.0, squares = 0.0;
    for (std::size_t i = 0; i < xs.size(); ++i) {
        const double weight = weights[i] * weights[i];
        total += weight;
        mean_x += weight * xs[i];
        mean_y += weight * ys[i];
    }
    mean_x /= total;
    mean_y /= total;
    for (std::size_t i = 0; i < xs.size(); ++i) {
        const double weighted = weights[i] * weights[i] * (xs[i] - mean_x);
        products += weighted * (ys[i] - mean_y);
        squares += weighted * (xs[i] - mean_x);
    }
    const double slope = products / squares;
    return {slope, mean_y - slope * mean_x};
}

LearnedCosts::LearnedCosts(double target_bytes, double draft_bytes, double source_bytes)
    : target_(target_bytes / BYTES_PER_SECOND), draft_(draft_bytes / BYTES_PER_SECOND) {
    if (source_bytes != 0.0) source_.emplace(source_bytes / BYTES_PER_SECOND);
}

std::shared_ptr<const EngineCosts> LearnedCosts::now() {
    if (!costs_) {
        EngineCosts costs;
        costs.target = target_.curve(draft_.times_guessed);
        costs.draft = draft_.curve(target_.times_guessed);
        const LearnedCurve& known = draft_.num_calls ? draft_ : target_;
        if (source_) costs.source = source_->curve(known.times_guessed);
        costs_ = std::make_shared<const EngineCosts>(std::move(costs));
    }
    return costs_;
}

void LearnedCosts::observe(CostKind kind, std::size_t num_rows, double seconds) {
    LearnedCurve* curve = kind == CostKind::target ? &target_ : &draft_;
    if (kind == CostKind::source) {
        const std::size_t counted = std::min(num_rows, LEARNED_ROWS.back());
        seconds = seconds * static_cast<double>(counted) / static_cast<double>(num_rows);
        num_rows = counted;
        curve = source_ ? &*source_ : nullptr;
    }
    if (curve && curve->learn(num_rows, seconds)) costs_ = nullptr;
}

void observe_call(Costs& costs, std::span<EngineCall* const> calls, double seconds,
                  const ForwardResult& result) {
    const bool is_draft = calls.front()->role == Role::draft;
    if (result.source_tokens) {
        if (is_draft)
            costs.observe(CostKind::source, result.source_tokens, result.source_own_seconds);
        seconds -= result.source_seconds;
    }
    if (result.sets_up) return;
    std::size_t num_rows = 0;
    for (const EngineCall* call : calls) {
        if (call->is_prefill) return;
        num_rows += call->num_rows;
    }
    costs.observe(is_draft ? CostKind::draft : CostKind::target, num_rows, seconds);
}

void learn_from_first_calls(Costs& costs, Engine& draft, const Clock& clock,
                            std::shared_ptr<const Source> source) {
    for (std::size_t num_rows : FIRST_CALLS) {
        if (const std::size_t most = draft.spec().context_length)
            num_rows = std::min(num_rows, most);
        Forward forward;
        forward.token_ids.resize(num_rows);
        count_up(forward.positions, num_rows);
        forward.logit_rows = forward.positions;
        forward.mask.reset(num_rows, num_rows);
        for (std::size_t s = 0; s < num_rows; ++s) {
            for (std::size_t row = 0; row <= s; ++row) forward.mask.set(s, row);
        }
        if (draft.spec().reads_features) {
            forward.parent_features.sources.assign(num_rows, ParentFeatures::ZEROS);
            forward.parent_features.rows = forward.positions;
        }
        if (source) forward.sources = {source};
        double seconds = 0.0;
        for (std::size_t number = 0; number < MOST_SET_UPS; ++number) {
            draft.keep({});
            const double began = clock();
            const ForwardResult result = draft.forward(forward);
            seconds = clock() - began - result.source_seconds;
            if (!result.sets_up) break;
        }
        costs.observe(CostKind::draft, num_rows, seconds);
    }
    draft.keep({});
}

Floats never_falling(FloatSpan sums, FloatSpan weights) {
    struct Pool {
        double sum, weight;
        std::size_t size;
    };
    std::vector<Pool> pools;
    for (std::size_t i = 0; i < sums.size(); ++i) {
        Pool pool{sums[i], weights[i], 1};
        while (!pools.empty() && pools.back().sum * pool.weight > pool.sum * pools.back().weight) {
            const Pool last = pools.back();
            pools.pop_back();
            pool = {last.sum + pool.sum, last.weight + pool.weight, last.size + pool.size};
        }
        pools.push_back(pool);
    }
    Floats found;
    for (const Pool& pool : pools) found.insert(found.end(), pool.size, pool.sum / pool.weight);
    return found;
}

RequestCosts::RequestCosts(Costs& costs, std::function<std::size_t()> sharers, DraftLimits limits)
    : DraftLimits(limits), costs_(costs), sharers_now_(std::move(sharers)) {
    refresh();
}

void RequestCosts::refresh() {
    const auto costs = costs_.now();
    const std::size_t sharers = sharers_now_();
    if (costs == known_ && sharers == num_sharers) return;  // usually
    known_ = costs;
    num_sharers = sharers;
    row = costs->target.seconds.front();
    target_ = costs->target.up_to(most_rows, sharers);
    draft_ = (has_draft_model ? costs->draft : CostCurve::free()).up_to(most_rows, sharers);
    const auto& seen = costs->target.seen;
    are_learned = seen.has_value();
    most_known = most_rows;
    if (seen && has_draft_model) {
        most_known = std::max(FIRST_ROWS, 2 * seen->second / sharers);
    } else if (seen) {  // begins with at most twice the rows that were seen
        const bool is_base_known = seen->first <= sharers * num_beams;
        most_known = is_base_known ? 2 * seen->second / sharers : 0;
    }
}

double RequestCosts::reading(std::size_t num_unread, std::size_t num_unread_source) const {
    if (!num_unread && !num_unread_source) return 0.0;
    const Floats seconds = known_->draft.up_to(PREFILL_CHUNK);
    const double source = known_->source.up_to(num_unread_source).back();
    const auto num_whole = static_cast<double>(num_unread / PREFILL_CHUNK);
    return num_whole * seconds.back() + seconds[num_unread % PREFILL_CHUNK] + source;
}

}  // namespace dsbd
