// Draft policy "throughput" (docs/algorithm.md 3.5): as much as pays, by costs and acceptance.
//
// Only for outputs that do not depend on the draft (gumbel coupling or search, fixed width): it
// looks at the noise of a layer before the layer is selected. A candidate's *deficit* is the score
// that it lacks to be among the best `num_beams`, plus the deficit of its parent. A layer takes
// candidates by increasing deficit; that of the best one left out is its *gap*. throughput.py has
// the reasons.
#pragma once

#include "drafting/acceptance.hpp"
#include "drafting/cost_curve.hpp"
#include "drafting/draft.hpp"

namespace dsbd {

/// What the policy reads of its request.
struct ThroughputSettings {
    std::size_t most_layers;
    std::function<double()> host_seconds;    // the request's time outside engine calls
    std::function<double()> target_seconds;  // and in the target's
    // Tokens of prompt and source that the draft model has to read.
    std::function<std::pair<std::size_t, std::size_t>()> unread;
    std::function<std::size_t()> context_size;  // that the draft model has
    // Whether an iteration without a draft predicts the next ones; not with a constraint, which
    // forces tokens without notice.
    bool may_rest;
};

/// Return a policy that drafts as many candidates as are expected to pay. costs, estimator, forest:
/// live as long as the policy.
std::unique_ptr<DraftPolicy> throughput_policy(RequestCosts& costs, AcceptanceEstimator& estimator,
                                               Scores scores, const Forest& forest,
                                               ThroughputSettings settings);

}  // namespace dsbd
