// Rule "sample", coupling "rejection" (docs/algorithm.md 3.2): the paper's scheme, made exact.
#include "rejection_coupling.hpp"

#include <algorithm>

#include "drafting/draft.hpp"
#include "exponentials.hpp"
#include "joint_distribution.hpp"
#include "numbers.hpp"

namespace dsbd {

namespace {

constexpr double SHORTEST_WAIT = 1e-300;  // an exponential number may round to 0

/// Divide masses by their sum; return whether anything is left.
bool normalise(Floats& masses, double total) {
    if (!(total > 0.0)) return false;
    for (double& mass : masses) mass /= total;
    return true;
}

/// Return p restricted to what may still be drawn; all zero if nothing is left.
Floats without(Floats p, const Ints& outputs) {
    for (auto output : outputs) p[at(output)] = 0.0;
    normalise(p, pairwise_sum(p));
    return p;
}

}  // namespace

Ints RandomSource::draw_distinct(const Floats& masses, std::size_t num_draws, double total) {
    constexpr double LESS = 1.0 - 1e-9;  // than any rounding: most rates are not computed
    BestByMass rates(num_draws);
    double least = LESS * total * rates.least();
    for (std::size_t i = 0; i < masses.size(); ++i) {
        const double wait = std::max(random_.next_exponential(), SHORTEST_WAIT);
        if (masses[i] < least * wait) continue;
        rates.consider(i, masses[i] / total / wait);
        least = LESS * total * rates.least();
    }
    Ints first = rates.best();
    std::erase_if(first, [&](auto index) { return !(masses[at(index)] / total > 0.0); });
    return first;
}

RejectionCoupling::RejectionCoupling(RandomGenerator& random, bool replacement)
    : source_(random), replacement_(replacement) {
    keeps_descendants = false;
    reads_draft_distributions = true;
}

Ints RejectionCoupling::propose(const JointDistribution& joint, std::size_t num_draws,
                                std::size_t) {
    joint.write_probabilities(p_);
    return fill({}, num_draws);
}

Choice RejectionCoupling::choose(const JointDistribution& joint, const DraftLayer* layer,
                                 std::size_t num_draws, std::size_t) {
    joint.write_probabilities(p_);
    if (!layer) return {fill({}, num_draws), false};
    Accepted accepted = accept(joint, *layer, num_draws);
    if (accepted.outputs.size() == num_draws) return {std::move(accepted.outputs), true};
    return {fill(std::move(accepted), num_draws), false};
}

RejectionCoupling::Accepted RejectionCoupling::accept(const JointDistribution& joint,
                                                      const DraftLayer& layer,
                                                      std::size_t num_wanted) {
    layer.distribution->write_probabilities(q_);  // loses what was drawn unless replaced
    const Ints draft_index = layer.distribution->aligned_to(joint);  // of the target's candidates
    const Ints target_index = joint.aligned_to(*layer.distribution);  // of the draft's candidates
    Accepted found;
    for (auto drawn : layer.drawn) {
        const Floats& residual = found.is_whole ? p_ : found.residual;
        const double total = pairwise_sum(q_);
        const std::int64_t here = target_index[at(drawn)];  // -1: its parent was not accepted
        const double q_drawn = q_[at(drawn)] / total;
        if (here >= 0 && source_.happens(std::min(1.0, residual[at(here)] / q_drawn))) {
            found.outputs.push_back(here);
            if (found.outputs.size() == num_wanted) break;
            found.is_whole = replacement_;
            if (!replacement_) found.residual = without(p_, found.outputs);
        } else {
            Floats left(residual.size());
            const double sum = pairwise(0, left.size(), [&](std::size_t first, std::size_t size) {
                for (std::size_t i = first; i < first + size; ++i) {
                    const std::int64_t place = draft_index[i];
                    const double q_here = place < 0 ? 0.0 : q_[at(place)] / total;
                    left[i] = std::max(residual[i] - q_here, 0.0);
                }
                return leaf_sum(left.data() + first, size);
            });
            if (normalise(left, sum)) {
                found.residual = std::move(left);
                found.is_whole = false;
            }
        }
        if (!replacement_) q_[at(drawn)] = 0.0;
    }
    return found;
}

/// Draw the next output from the residual and the remaining from what is left of p.
Ints RejectionCoupling::fill(Accepted accepted, std::size_t num_wanted) {
    Ints outputs = std::move(accepted.outputs);
    const auto is_positive = [](double mass) { return mass != 0.0; };
    if (!accepted.is_whole && std::ranges::any_of(accepted.residual, is_positive)) {
        outputs.push_back(source_.draw(accepted.residual));
    }
    if (replacement_) {
        while (outputs.size() < num_wanted) outputs.push_back(source_.draw(p_));
    } else if (outputs.size() < num_wanted) {
        for (auto output : outputs) p_[at(output)] = 0.0;
        const double left = pairwise_sum(p_), total = left > 0.0 ? left : 1.0;
        const Ints more = source_.draw_distinct(p_, num_wanted - outputs.size(), total);
        outputs.insert(outputs.end(), more.begin(), more.end());
    }
    return outputs;
}

}  // namespace dsbd
