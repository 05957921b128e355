// Rule "joint": multi-token joint decoding, MJSD and its reference MJGD (docs/algorithm.md 3.4).
#include "joint_rule.hpp"

#include <algorithm>
#include <cmath>

#include "config.hpp"
#include "drafting/draft.hpp"
#include "forest_runner.hpp"
#include "joint_distribution.hpp"
#include "numbers.hpp"

namespace dsbd {

JointDecoding::JointDecoding(const DecodingConfig& config, LayerBuilder& builder)
    : SelectionRule(config, builder) {
    reads_draft_distributions = true;
}

Ints JointDecoding::propose(JointDistribution& joint, std::size_t num_draws, std::size_t) {
    return joint.best(num_draws);
}

Floats JointDecoding::draft_scores(JointDistribution& joint, std::size_t) {
    return joint.log_masses();
}

Beams JointDecoding::next_beams(ForestRunner& target, const Beams& beams, std::size_t width) {
    const JointDistribution joint = target.joint(beams.nodes, beams.log_weights, {});
    return builder_.descended(beams, joint, joint.best(width));
}

std::vector<Beams> JointSpeculativeRule::select(ForestRunner& target, Beams beams,
                                                const std::vector<DraftLayer>& drafted,
                                                std::size_t depth) {
    const Forest& forest = builder_.forest;
    std::vector<Beams> committed;
    for (auto node : accepted_path(target, beams, drafted)) {
        const JointDistribution joint = target.joint(beams.nodes, beams.log_weights, {});
        Ints chosen = joint.with_token(forest.tokens[at(node)]);
        beams = builder_.descended(beams, joint, std::move(chosen));
        committed.push_back(beams);
        if (is_finished(beams, ++depth)) return committed;
    }
    if (forest.are_absorbing(beams.nodes)) return committed;
    if (config_.temperature == 0.0) {
        committed.push_back(next_beams(target, beams, 1));
        return committed;
    }
    const JointDistribution joint = target.joint(beams.nodes, beams.log_weights, {});
    committed.push_back(builder_.descended(beams, joint, gumbel_.propose(joint, 1, depth)));
    return committed;
}

/// Return the nodes from below the input beam to the accepted one; none if none passes.
Nodes JointSpeculativeRule::accepted_path(ForestRunner& target, const Beams& beams,
                                          const std::vector<DraftLayer>& drafted) const {
    const Forest& forest = builder_.forest;
    const std::int64_t root = beams.nodes[0];
    Floats log_p(forest.size(), LOG_ZERO);  // of the path from the root, if it is known
    log_p[at(root)] = 0.0;
    std::int64_t accepted = root;
    for (const DraftLayer& layer : drafted) {
        Nodes parents, tokens;  // of a child that has ended as well: the same again
        for (auto child : layer.children) {
            parents.push_back(forest.parents[at(child)]);
            tokens.push_back(forest.tokens[at(child)]);
        }
        Floats found = target.log_probs(parents, tokens);
        std::size_t best = 0;
        for (std::size_t i = 0; i < found.size(); ++i) {
            found[i] += log_p[at(parents[i])];
            if (found[i] > found[best]) best = i;
        }
        for (std::size_t i = 0; i < found.size(); ++i) log_p[at(layer.children[i])] = found[i];
        double largest_log_q = LOG_ZERO;
        for (auto drawn : layer.drawn) {
            largest_log_q = std::max(largest_log_q, layer.distribution->log_weights[at(drawn)]);
        }
        largest_log_q -= beams.log_weights[0];
        if (found[best] - largest_log_q > std::log(config_.joint_threshold)) {
            accepted = layer.children[best];
        }
    }
    Nodes path;
    for (; accepted != root; accepted = forest.parents[at(accepted)]) path.push_back(accepted);
    std::reverse(path.begin(), path.end());
    return path;
}

std::vector<Beams> JointGreedyRule::select(ForestRunner& target, Beams beams,
                                           const std::vector<DraftLayer>&, std::size_t depth) {
    std::vector<Beams> committed;
    bool is_over = false;
    while (!is_over && target.are_computed(beams.nodes)) {
        beams = next_beams(target, beams, config_.joint_beams);
        ++depth;
        if (depth % config_.joint_tokens == 0 || is_finished(beams, depth)) {
            const auto best = std::max_element(beams.log_weights.begin(), beams.log_weights.end());
            beams = beams.only(static_cast<std::size_t>(best - beams.log_weights.begin()));
        }
        committed.push_back(beams);
        is_over = is_finished(beams, depth);
    }
    return committed;
}

}  // namespace dsbd
