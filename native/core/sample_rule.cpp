// Rule "sample": layers drawn from the target's distribution (docs/algorithm.md 3.1, 3.2).
#include "sample_rule.hpp"

#include "config.hpp"
#include "drafting/draft.hpp"
#include "error.hpp"
#include "forest_runner.hpp"
#include "joint_distribution.hpp"
#include "noise.hpp"
#include "numbers.hpp"

namespace dsbd {
namespace {

/// Return the first entries of the convolution of two arrays of one length.
Floats convolved(const Floats& first, const Floats& second) {
    Floats found(first.size());
    for (std::size_t i = 0; i < first.size(); ++i) {
        if (first[i] == 0.0) continue;
        for (std::size_t j = 0; i + j < found.size(); ++j) found[i + j] += first[i] * second[j];
    }
    return found;
}

/// Rule of beam sampling.
class SampleRule final : public SelectionRule {
public:
    SampleRule(const DecodingConfig& config, LayerBuilder& builder,
               std::unique_ptr<DrawCoupling> coupling)
        : SelectionRule(config, builder), coupling_(std::move(coupling)) {
        keeps_descendants = coupling_->keeps_descendants;
        reads_draft_distributions =
            coupling_->reads_draft_distributions || config.width_policy == WidthPolicy::threshold;
    }

    Ints propose(JointDistribution& joint, std::size_t num_draws, std::size_t depth) override {
        return coupling_->propose(joint, num_draws, depth);
    }
    Floats draft_scores(JointDistribution& joint, std::size_t depth) override {
        // The throughput policy, which alone asks, reads so many.
        const std::size_t most = std::max(config_.most_draft_beams(), config_.num_beams) + 1;
        if (joint.whole) joint = joint.few_by_noise(builder_.forest.path_keys, most, depth);
        return coupling_->scores(joint, depth);
    }
    std::vector<Beams> select(ForestRunner& target, Beams beams,
                              const std::vector<DraftLayer>& drafted, std::size_t depth) override {
        const bool reads_best =
            coupling_->reads_best_by_noise && config_.width_policy == WidthPolicy::fixed;
        std::vector<Beams> committed;
        bool may_go_on = true;
        while (may_go_on && target.are_computed(beams.nodes)) {
            const JointDistribution joint =
                reads_best
                    ? target.distributions.best_by_noise(beams.nodes, beams.log_weights,
                                                         beams.copies, config_.num_beams, depth)
                    : target.joint(beams.nodes, beams.log_weights, beams.copies);
            const DraftLayer* layer =
                committed.size() < drafted.size() ? &drafted[committed.size()] : nullptr;
            std::size_t width = config_.num_beams;
            if (layer && config_.width_policy != WidthPolicy::fixed) {
                width = layer_width(config_, joint, *layer);
            }
            Choice choice = coupling_->choose(joint, layer, width, depth);
            may_go_on = choice.may_go_on;
            beams = builder_.descended(beams, joint, std::move(choice.drawn));
            committed.push_back(beams);
            if (is_finished(beams, ++depth)) break;
        }
        return committed;
    }

    bool is_finished(const Beams& beams, std::size_t num_layers) override {
        const Forest& forest = builder_.forest;
        if (SelectionRule::is_finished(beams, num_layers)) return true;
        // Memory "single" goes on with one beam of an iteration, whether that has ended or not.
        if (!forest.has_ends || config_.memory == Memory::single) return false;
        const Finished best = results(beams).first(config_.num_return_sequences);
        if (best.scores.size() < config_.num_return_sequences) return false;
        double best_logprob = LOG_ZERO;
        for (std::size_t beam = 0; beam < beams.nodes.size(); ++beam) {
            if (forest.is_absorbing[at(beams.nodes[beam])]) continue;
            const double logprob = builder_.hypotheses.logprobs[at(beams.hypotheses[beam])];
            best_logprob = std::max(best_logprob, logprob);
        }
        return is_decided(config_, best.scores.back(), best_logprob, num_layers);
    }

    /// Return the hypotheses that are complete, copies repeated, by score.
    Finished results(const Beams& beams) override {
        Ints complete;
        for (auto beam : beams.repeated()) {
            const auto length = at(builder_.hypotheses.lengths[at(beams.hypotheses[at(beam)])]);
            if (length == config_.max_new_tokens ||
                builder_.forest.is_absorbing[at(beams.nodes[at(beam)])]) {
                complete.push_back(beam);
            }
        }
        return ranked(beams, complete);
    }

private:
    std::unique_ptr<DrawCoupling> coupling_;
};

}  // namespace

Ints GumbelCoupling::propose(const JointDistribution& joint, std::size_t num_draws,
                             std::size_t depth) {
    if (joint.whole && !replacement_) {
        return joint.best_by_noise(forest_.path_keys, num_draws, depth);
    }
    if (!replacement_) return best_candidates(scores(joint, depth), num_draws);
    const auto& keys = forest_.candidate_keys(joint);
    Ints drawn;
    Floats found(keys.size());
    for (std::size_t draw = 0; draw < num_draws; ++draw) {
        noisy(joint.log_masses(), keys, depth, draw, found);
        drawn.push_back(std::max_element(found.begin(), found.end()) - found.begin());
    }
    return drawn;
}

Floats GumbelCoupling::scores(const JointDistribution& joint, std::size_t depth) const {
    Floats found(joint.num_candidates());
    noisy(joint.log_masses(), forest_.candidate_keys(joint), depth, {}, found);
    return found;
}

std::unique_ptr<SelectionRule> sample_rule(const DecodingConfig& config, LayerBuilder& builder,
                                           std::unique_ptr<DrawCoupling> coupling) {
    return std::make_unique<SampleRule>(config, builder, std::move(coupling));
}

std::size_t layer_width(const DecodingConfig& config, const JointDistribution& joint,
                        const DraftLayer& layer) {
    const Floats drafted = layer.distribution->probabilities();
    const Ints index = layer.distribution->aligned_to(joint);
    Floats q(index.size());
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = index[i] < 0 ? 0.0 : drafted[at(index[i])];
    const Floats waits = waiting_distribution(joint.probabilities(), q, layer.drawn.size());
    return threshold_width(waits, config.num_beams, config.smallest_width(),
                           config.accept_threshold);
}

std::size_t threshold_width(const Floats& waits, std::size_t most, std::size_t least,
                            double threshold) {
    std::vector<Floats> powers(1);  // the first, second, fourth ... power, by number of drafts
    powers[0].push_back(0.0);
    powers[0].insert(powers[0].end(), waits.begin(), waits.end());
    while (std::size_t{1} << powers.size() <= std::min(most, waits.size())) {
        powers.push_back(convolved(powers.back(), powers.back()));
    }
    Floats of_sum(waits.size() + 1);
    of_sum[0] = 1.0;
    std::size_t width = 0;
    for (std::size_t bit = powers.size(); bit-- > 0;) {
        Floats longer = convolved(of_sum, powers[bit]);
        if (pairwise_sum(longer) < threshold) continue;
        of_sum = std::move(longer);
        width += std::size_t{1} << bit;
    }
    return std::min(std::max(std::min(width, waits.size()), least), most);
}

Floats waiting_distribution(const Floats& p, const Floats& q, std::size_t num_drafts) {
    struct Drafted {
        double ratio, p, q;
    };
    std::vector<Drafted> drafted;
    for (std::size_t i = 0; i < p.size(); ++i) {
        if (q[i] > 0.0) drafted.push_back({p[i] / q[i], p[i], q[i]});
    }
    std::stable_sort(drafted.begin(), drafted.end(),
                     [](const Drafted& a, const Drafted& b) { return a.ratio > b.ratio; });
    Floats p_sums{0.0}, q_sums{0.0};
    for (const Drafted& each : drafted) {
        p_sums.push_back(p_sums.back() + each.p);
        q_sums.push_back(q_sums.back() + each.q);
    }
    const double p_elsewhere = std::max(pairwise_sum(p) - p_sums.back(), 0.0);
    Floats waits;
    double rejected = 1.0, multiple = 0.0;
    for (std::size_t draft = 0; draft < num_drafts; ++draft) {
        multiple += rejected;
        const auto above = static_cast<std::size_t>(
            std::partition_point(drafted.begin(), drafted.end(),
                                 [&](const Drafted& each) { return each.ratio > multiple; }) -
            drafted.begin());
        const double mass = p_elsewhere + p_sums[above] - multiple * q_sums[above];
        const double next = std::min(std::max(mass, 0.0), rejected);
        waits.push_back(-(next - rejected));
        rejected = next;
    }
    return waits;
}

}  // namespace dsbd
