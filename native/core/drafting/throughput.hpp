// Draft policy "throughput" (docs/algorithm.md 3.5): as much as pays, by costs and acceptance.
//
// Only for outputs that do not depend on the draft (gumbel coupling or search, fixed width): it
// looks at the noise of a layer before the layer is selected. A candidate's *deficit* is the score
// that it lacks to be among the best `num_beams`, plus the deficit of its parent. A layer takes
// candidates by increasing deficit; that of the best one left out is its *gap*. throughput.py has
// the reasons.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "drafting/acceptance.hpp"
#include "drafting/cost_curve.hpp"
#include "drafting/draft.hpp"

namespace dsbd {

/// Drafts as many candidates as are expected to pay.
class ThroughputDraftPolicy final : public DraftPolicy {
public:
    struct Settings {
        std::size_t most_layers;
        std::function<double()> host_seconds;    // the request's time outside engine calls
        std::function<double()> target_seconds;  // and in the target's
        // Tokens of prompt and source that the draft model has to read.
        std::function<std::pair<std::size_t, std::size_t>()> unread;
        // Whether an iteration without a draft predicts the next ones; not with a constraint, which
        // forces tokens without notice.
        bool may_rest;
    };
    /// estimator, forest: live as long as the policy.
    ThroughputDraftPolicy(RequestCosts costs, AcceptanceEstimator& estimator, Scores scores,
                          const Forest& forest, Settings settings);

    std::size_t rest() override;
    void begin(std::size_t num_pending, std::size_t most_layers) override;
    bool takes_all(std::size_t num_candidates, std::size_t num_rows) override;
    bool wants_layer(std::size_t num_rows, std::size_t num_whole = 0) override;
    Ints choose(JointDistribution& joint, std::size_t depth) override;
    Ints choose_forced(const JointDistribution& joint) override;
    void observe(const Iteration& iteration) override;

private:
    /// A drafted layer, for learning from it.
    struct Layer {
        Nodes nodes;     // the beams and draft beams it continues
        Ints best;       // ids of its candidates
        Floats gaps;     // (num_widths,) by width from `narrowest` on
        std::size_t narrowest = 0;
        bool is_forced = false;
    };
    /// The draft of the current iteration; times in seconds.
    struct Draft {
        std::size_t limit = 0;     // most layers
        bool may_call = false;     // whether the draft model may be called for them
        double stake = 0.0;        // most that it may cost
        double prompt = 0.0;       // to read the prompt and source, 0 once they are read
        std::size_t num_left = 1;  // iterations that may share the cost of the prompt
        std::size_t num_rows = 0;    // of the target call, with the layers that were chosen
        std::size_t num_needed = 0;  // without them
        double worth = 0.0;    // gain of further layers after those chosen, their calls included
        bool may_try = false;  // the budget may buy a first layer that is not expected to pay
        bool is_try = false;   // it does
        double reach = 1.0;    // probability that all layers are accepted
        double expected = 1.0;                             // tokens
        std::pair<std::size_t, double> next_call{0, 0.0};  // rows, seconds to read the prompt
        std::vector<std::pair<std::size_t, double>> called;
        std::vector<Layer> layers;
        std::size_t num_forced = 0;
        Floats parent_deficits;  // (num_beams,) of the last layer; empty: all are 0
        double refused = 0.0;    // cost of a first layer that exceeds the budget
    };
    /// A width, counted from the narrowest, its gain and that of the layers after it.
    struct Width {
        std::size_t index = 0;
        double gain = LOG_ZERO, worth = 0.0;  // no gain: none can be paid
    };
    /// Candidates of least deficit, in order, (num_best,).
    struct Deficits {
        Ints best;
        Floats values;
    };

    void refresh();
    void begin_draft(std::size_t num_pending, std::size_t most_layers, double prompt,
                     std::size_t num_unread_source);
    void plan_rest();
    bool learn(const std::vector<Beams>& committed);
    double spent() const;
    double seconds_of_rows(std::size_t num_new) const;
    Width best_width(const Floats& accepted, std::size_t narrowest) const;
    Deficits least_deficits(const JointDistribution& joint, Floats scores) const;
    Floats gaps_of(const JointDistribution& joint, const Deficits& found, std::size_t narrowest,
                   std::size_t widest) const;
    double worth_of_more(double reach, std::size_t num_rows) const;

    RequestCosts costs_;
    AcceptanceEstimator& estimator_;
    Scores scores_;
    const Forest& forest_;
    Settings settings_;
    std::size_t num_to_rest_ = 0, num_iterations_ = 0;
    bool has_begun_ = false;  // an iteration: not while the policy rests
    double began_ = 0.0;
    Draft now_;
    double layer_ = 0.0, usual_call_ = 0.0, usual_ = 0.0;  // seconds, as known now
    double try_cost_ = 0.0, token_seconds_ = 0.0;
    std::array<double, LOOK_AHEAD + 1> powers_{};  // sums of the powers of the usual acceptance
};

}  // namespace dsbd
