// Seconds of engine calls by their rows: given, or learned from the calls that requests make.
//
// No request waits for a measurement: cost_curve.py and docs/algorithm.md 3.5 say how a curve is
// learned.
#pragma once

#include <array>
#include <deque>

#include "engine.hpp"
#include "engine_call.hpp"

namespace dsbd {

inline constexpr std::array<std::size_t, 15> LEARNED_ROWS = {1,  2,  4,  6,  8,   12,  16, 24,
                                                             32, 48, 64, 96, 128, 192, 256};
inline constexpr std::size_t LOOK_AHEAD = 6;  // layers after the next one whose gain is estimated

/// Seconds of a call by its rows, increasing: linear between and beyond.
struct CostCurve {
    Floats rows, seconds;  // (num_points,)
    // Fewest and most rows of the calls learned from; none: given.
    std::optional<std::pair<std::size_t, std::size_t>> seen;

    /// Return the seconds of calls with 0, 1, ... `most_rows` rows; 0 rows are no call.
    ///
    /// With `num_sharers` requests in each call, one's share: twice 3 rows in 8 ms are 3 in 4 ms.
    Floats up_to(std::size_t most_rows, std::size_t num_sharers = 1) const;
    /// Of a draft that makes no engine call.
    static CostCurve free() { return {{1.0, 2.0}, {0.0, 0.0}, {}}; }
};

/// The cost curves by rows.
struct EngineCosts {
    CostCurve target, draft;
    CostCurve source = CostCurve::free();  // by tokens of a source that the draft reads before its
                                           // first call
};

enum class CostKind : std::uint8_t { target, draft, source };

/// Costs of the calls of both engines of a pair, which may change with every call.
class Costs {
public:
    virtual ~Costs() = default;
    /// Return the costs as they are known now; the same object until they change.
    virtual std::shared_ptr<const EngineCosts> now() = 0;
    /// Learn from a call, all of whose rows returned logits, or from a source's tokens.
    virtual void observe(CostKind kind, std::size_t num_rows, double seconds) = 0;
};

/// Costs that are given and never change.
class GivenCosts final : public Costs {
public:
    explicit GivenCosts(EngineCosts costs)
        : costs_(std::make_shared<const EngineCosts>(std::move(costs))) {}
    std::shared_ptr<const EngineCosts> now() override { return costs_; }
    void observe(CostKind, std::size_t, double) override {}

private:
    std::shared_ptr<const EngineCosts> costs_;
};

/// Learned cost curve of an engine.
class LearnedCurve {
public:
    /// guess: seconds of a row.
    explicit LearnedCurve(double guess) : guess_(std::max(guess, 1e-6)) {}

    /// Store a call; return whether enough were stored since to change the curve.
    bool learn(std::size_t num_rows, double seconds);
    /// Return the curve; before the first call, the guess times `scale`.
    CostCurve curve(double scale);

    std::int64_t num_calls = 0;
    double times_guessed = 1.0;  // real over guess

private:
    struct Point {
        double rows, seconds, weight;
    };
    struct Line {
        double slope, start;
    };
    std::vector<Point> points() const;
    Line line_through(const std::vector<Point>& known);

    double guess_;
    std::array<std::deque<std::pair<double, std::size_t>>, LEARNED_ROWS.size()> calls_;
    std::int64_t next_fit_ = 1;
};

/// The costs of a pair, learned from the calls that its requests make.
class LearnedCosts final : public Costs {
public:
    /// Take the bytes of the weights of target, draft and the draft's encoder of sources, 0: none.
    explicit LearnedCosts(double target_bytes = 1e7, double draft_bytes = 1e7,
                          double source_bytes = 0.0);

    std::shared_ptr<const EngineCosts> now() override;
    /// The time of a long source is scaled to the longest size.
    void observe(CostKind kind, std::size_t num_rows, double seconds) override;

private:
    LearnedCurve target_, draft_;
    std::optional<LearnedCurve> source_;
    std::shared_ptr<const EngineCosts> costs_;
};

/// Let costs learn from calls that were made together, and from the source that they read.
void observe_call(Costs& costs, std::span<EngineCall* const> calls, double seconds,
                  const ForwardResult& result);

/// Let costs learn from calls of one row and of many on empty caches; cost_curve.py says why.
void learn_from_first_calls(Costs& costs, Engine& draft, const Clock& clock,
                            std::shared_ptr<const Source> source = nullptr);

/// Return the means sums / weights, pooled over neighbours until none is below the one before.
///
/// Isotonic regression (pool adjacent violators): [1/2, 3/4, 1/4] becomes [1/2, 4/8, 4/8].
Floats never_falling(FloatSpan sums, FloatSpan weights);

/// What a request may draft.
struct DraftLimits {
    std::size_t num_beams;
    std::size_t most_rows;  // calls beyond cost as much as one of so many
    std::size_t most_beams;
    bool has_draft_model;
};

/// Seconds of calls, by rows, as `refresh` has found them last, for one request.
class RequestCosts : public DraftLimits {
public:
    /// num_sharers: returns how many requests share the engine calls now.
    RequestCosts(Costs& costs, std::function<std::size_t()> num_sharers, DraftLimits limits);

    void refresh();
    /// Return the seconds in which the draft model reads so much of prompt and source.
    double reading(std::size_t num_unread, std::size_t num_unread_source) const;
    /// Return the seconds of a call of so many rows, of the target or of the draft.
    double target(std::size_t num_rows) const { return target_[std::min(num_rows, most_rows)]; }
    double draft(std::size_t num_rows) const { return draft_[std::min(num_rows, most_rows)]; }

    std::size_t num_sharers = 0;
    double row = 0.0;  // seconds of a target call of one row that is not shared
    bool are_learned = false;
    std::size_t most_known = 0;  // rows of the largest target call whose cost is known well enough
                                 // for a draft
private:
    Costs& costs_;
    std::function<std::size_t()> sharers_now_;
    std::shared_ptr<const EngineCosts> known_;
    Floats target_, draft_;  // (most_rows + 1,)
};

}  // namespace dsbd
