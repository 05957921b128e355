// The estimates of draft policy "throughput", and its budget, from request to request.
//
// How often layers are accepted, and what the loop costs, once for each setting. The budget bounds
// what drafts may lose, and buys tries; it is counted in iterations without a draft, one for each
// load. acceptance.py has the reasons.
#pragma once

#include <array>
#include <bit>
#include <limits>
#include <optional>

#include "config.hpp"

namespace dsbd {

/// Budget for rejected drafts, in iterations without a draft; kept from request to request.
struct DraftBudget {
    static constexpr double SHARE = 0.02;
    static constexpr int SHORT_ANSWER = 64;  // iterations

    double balance = SHARE * SHORT_ANSWER;  // negative after a draft that cost more than expected
    double most = 3.0;  // of the balance, the prompt that the draft model reads included
    double share = SHARE;  // added by an iteration
    double saved = 0.0;  // the shares since the last draft
    double gained = 0.0;  // by drafts, beyond their cost, the latest counting most
    int num_prepaid = SHORT_ANSWER;  // iterations whose share is in the balance already

    /// Whether a draft may be made because it is expected to pay; else tries alone are made.
    bool believes_estimates() const;
    /// Whether the latest drafts have earned so much that one need not be expected to pay.
    bool has_earned() const;
    /// Add the share of a prompt, by its cost to the target and to the draft model.
    void begin_request(double prompt, double draft_prompt);
    /// Advance a share of a request's expected time as it begins, while estimates are believed.
    void advance(double expected);
    void pass_iteration();
    /// Add earnings less their cost, which may be negative.
    void add(double earned);
    void settle(double cost, double earned, bool is_try);
    /// Return after how many iterations their shares pay for a draft of this cost.
    double iterations_until(double cost, bool is_try = false) const;
};

/// Seconds of the loop itself, outside engine calls; the latest iterations count most.
struct LoopCost {
    double iteration = 2e-4;  // seconds without a draft
    double layer = 0.6 * 2e-4;  // seconds that a drafted layer adds
    std::int64_t num_plain = 0;  // iterations without a draft so far
    std::int64_t num_drafted = 0;

    /// Count an iteration; a disturbance counts at most four times what was expected.
    void learn(std::size_t num_layers, double seconds);
};

/// Sizes of the draft's context that are told apart; a larger one is as good as the next below it.
inline constexpr std::array<std::size_t, 5> CONTEXT_SIZES = {64, 128, 256, 512, WHOLE_CONTEXT};

/// How often a gap was enough, and how fast tokens are committed.
///
/// For a gap that was rarely seen the guess is the first guess times the level of all gaps: how
/// often layers were accepted over how often that was guessed. So a bad draft is recognized after a
/// few layers, whatever their gaps were.
class AcceptanceEstimator {
public:
    static constexpr std::size_t NUM_BINS = 16;
    using Bins = std::array<double, NUM_BINS>;  // by gap

    /// agreement: how often the draft's best token is the target's; none: unknown.
    explicit AcceptanceEstimator(std::optional<double> agreement = {});

    /// Return the estimated probability that a layer after `depth` others is accepted, by gap.
    Floats accepted(FloatSpan gaps, std::size_t depth) const;
    /// Count a layer by its widths' gaps, narrowest first; `num_short` were too narrow.
    void learn(FloatSpan gaps, std::size_t num_short, std::size_t depth);
    void learn_rate(double new_tokens, double new_calls);
    void choose(double chosen_acceptance, std::size_t width);
    /// Return how often drafts with a context of a size agree, over how often with the whole.
    double agreement(std::size_t size) const;
    /// Count a first layer, drafted with a context of this size.
    void learn_agreement(std::size_t size, bool agrees);
    /// Count an answer that has ended.
    void learn_length(std::size_t num_tokens);
    /// Compute `rates` anew if enough was learned since to matter.
    void refresh();
    /// Return the budget of drafts while 1, 2, 3 to 4, 5 to 8, ... requests share the calls.
    DraftBudget& budget(std::size_t num_sharers) {
        return budgets[static_cast<std::size_t>(std::bit_width(num_sharers - 1))];
    }

    bool is_measured = false;  // whether it began with a measured agreement
    double level = 1.0;  // of the guess, before there are layers
    double level_weight = 3.0;  // accepted layers that it counts for, of all gaps
    // Of first layers, of later ones.
    std::array<Bins, 2> enough{}, seen{};  // accepted layers, all
    std::array<Bins, 2> rates{};  // the estimates made from them: a wider gap is never worse
    std::array<int, 2> num_new{1, 1};  // layers since `rates` were computed; 1: not yet
    std::int64_t num_learned = 0;  // layers so far
    double tokens = 0.0;  // expected from drafts
    double calls = 0.0;  // the time that they took, in target calls of one row
    double acceptance = 0.7;  // running mean of the estimate of chosen layers
    double rows = 0.0;  // of their width
    std::int64_t num_chosen = 0;  // layers in the running means
    double answer_length = 0.0;  // running mean of the tokens of an answer; 0 before the first
    // First layers by size of the draft's context: all, those accepted at their narrowest.
    std::array<double, CONTEXT_SIZES.size()> first_layers{}, agreed{};
    LoopCost loop;
    std::array<DraftBudget, std::numeric_limits<std::size_t>::digits + 1> budgets;
};

}  // namespace dsbd
