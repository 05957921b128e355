// Rule "sample", coupling "rejection" (docs/algorithm.md 3.2): the paper's scheme, made exact.
#include "rejection_coupling.hpp"

#include <algorithm>

#include "drafting/draft.hpp"
#include "joint_distribution.hpp"
#include "numbers.hpp"

namespace dsbd {

namespace {

constexpr double SHORTEST_WAIT = 1e-300;  // an exponential number may round to 0

/// Divide masses by their sum; return whether anything is left.
bool normalise(Floats& masses) {
    const double total = pairwise_sum(masses);
    if (!(total > 0.0)) return false;
    for (double& mass : masses) mass /= total;
    return true;
}

/// Return p restricted to what may still be drawn; all zero if nothing is left.
Floats without(const Floats& p, const Ints& outputs) {
    Floats rest = p;
    for (auto output : outputs) rest[at(output)] = 0.0;
    normalise(rest);
    return rest;
}

}  // namespace

Ints RandomSource::draw_distinct(const Floats& probabilities, std::size_t num_draws) {
    Floats rates(probabilities.size());
    for (std::size_t i = 0; i < rates.size(); ++i) {
        rates[i] = probabilities[i] / std::max(random_.next_exponential(), SHORTEST_WAIT);
    }
    Ints first = best_candidates(rates, num_draws);
    std::erase_if(first, [&](auto index) { return !(probabilities[at(index)] > 0.0); });
    return first;
}

RejectionCoupling::RejectionCoupling(RandomGenerator& random, bool replacement)
    : source_(random), replacement_(replacement) {
    keeps_descendants = false;
    reads_draft_distributions = true;
}

Ints RejectionCoupling::propose(const JointDistribution& joint, std::size_t num_draws,
                                std::size_t) {
    return fill({}, joint.probabilities(), num_draws);
}

Choice RejectionCoupling::choose(const JointDistribution& joint, const DraftLayer* layer,
                                 std::size_t num_draws, std::size_t) {
    const Floats p = joint.probabilities();
    if (!layer) return {fill({}, p, num_draws), false};
    Accepted accepted = accept(p, joint, *layer, num_draws);
    if (accepted.outputs.size() == num_draws) return {std::move(accepted.outputs), true};
    return {fill(std::move(accepted), p, num_draws), false};
}

RejectionCoupling::Accepted RejectionCoupling::accept(const Floats& p,
                                                      const JointDistribution& joint,
                                                      const DraftLayer& layer,
                                                      std::size_t num_wanted) {
    Floats q = layer.distribution->probabilities();  // loses what was drawn unless replaced
    const Ints draft_index = layer.distribution->aligned_to(joint);  // of the target's candidates
    const Ints target_index = joint.aligned_to(*layer.distribution);  // of the draft's candidates
    Accepted found{{}, p};
    for (auto drawn : layer.drawn) {
        const double total = pairwise_sum(q);
        const std::int64_t here = target_index[at(drawn)];  // -1: its parent was not accepted
        const double q_drawn = q[at(drawn)] / total;
        if (here >= 0 && source_.happens(std::min(1.0, found.residual[at(here)] / q_drawn))) {
            found.outputs.push_back(here);
            if (found.outputs.size() == num_wanted) break;
            found.is_whole = replacement_;
            found.residual = replacement_ ? p : without(p, found.outputs);
        } else {
            Floats left = found.residual;
            for (std::size_t i = 0; i < left.size(); ++i) {
                const double q_here = draft_index[i] < 0 ? 0.0 : q[at(draft_index[i])] / total;
                left[i] = std::max(left[i] - q_here, 0.0);
            }
            if (normalise(left)) {
                found.residual = std::move(left);
                found.is_whole = false;
            }
        }
        if (!replacement_) q[at(drawn)] = 0.0;
    }
    return found;
}

/// Draw the next output from the residual and the remaining from what is left of p.
Ints RejectionCoupling::fill(Accepted accepted, const Floats& p, std::size_t num_wanted) {
    Ints outputs = std::move(accepted.outputs);
    const Floats& residual = accepted.residual;
    const auto is_positive = [](double mass) { return mass != 0.0; };
    if (!accepted.is_whole && std::any_of(residual.begin(), residual.end(), is_positive)) {
        outputs.push_back(source_.draw(residual));
    }
    if (replacement_) {
        while (outputs.size() < num_wanted) outputs.push_back(source_.draw(p));
    } else if (outputs.size() < num_wanted) {
        const Ints more = source_.draw_distinct(without(p, outputs), num_wanted - outputs.size());
        outputs.insert(outputs.end(), more.begin(), more.end());
    }
    return outputs;
}

}  // namespace dsbd
