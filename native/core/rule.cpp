// Selection rules: how a strategy proposes candidates, selects layers and ranks its results.
#include "rule.hpp"

#include <cmath>

#include "config.hpp"
#include "drafting/draft.hpp"
#include "joint_distribution.hpp"

namespace dsbd {

Finished Finished::first(std::size_t number) const {
    Finished found = *this;
    found.hypotheses.resize(std::min(number, hypotheses.size()));
    found.scores.resize(found.hypotheses.size());
    return found;
}

Finished Finished::ranked() const {
    Ints order;
    count_up(order, scores.size());
    std::ranges::stable_sort(order, std::greater<>(),
                             [&](auto place) { return scores[at(place)]; });
    return {entries_at(hypotheses, order), entries_at(scores, order)};
}

Beams LayerBuilder::descended(const Beams& beams, const JointDistribution& joint, Ints drawn) {
    Beams found;
    if (repeats_) {
        DistinctDraws distinct = distinct_in_order(drawn);
        drawn = std::move(distinct.values);
        found.copies = std::move(distinct.copies);
    }
    found.nodes = forest.descend(joint, drawn);
    found.log_weights = entries_at(joint.log_weights, drawn);
    found.hypotheses = extended(beams, joint, drawn);
    return found;
}

Ints LayerBuilder::extended(const Beams& beams, const JointDistribution& joint, IntSpan chosen) {
    Ints entries;
    for (auto candidate : chosen) {
        const std::int64_t parent = beams.hypotheses[at(joint.parents[at(candidate)])];
        const std::int64_t token = joint.tokens[at(candidate)];
        entries.push_back(
            token < 0 ? parent
                      : hypotheses.extend(parent, token, joint.raw_log_probs[at(candidate)]));
    }
    return entries;
}

bool is_decided(const DecodingConfig& config, double last_score, double best_logprob,
                std::size_t num_layers) {
    if (config.early_stopping == EarlyStopping::yes) return true;
    // A beam's log-probability only falls; "no" scores it as if it ended now, "never" at its best
    // length, the longest if `length_penalty` is above 0.
    const bool is_hopeful =
        config.early_stopping == EarlyStopping::never && config.length_penalty > 0.0;
    const auto length = static_cast<double>(is_hopeful ? config.max_new_tokens : num_layers);
    return best_logprob / std::pow(length, config.length_penalty) <= last_score;
}

bool SelectionRule::is_finished(const Beams& beams, std::size_t num_layers) {
    return num_layers == config_.max_new_tokens || builder_.forest.are_absorbing(beams.nodes);
}

Finished SelectionRule::ranked(const Beams& beams, IntSpan chosen) const {
    Finished found;
    for (auto beam : chosen) {
        const std::int64_t entry = beams.hypotheses[at(beam)];
        found.hypotheses.push_back(entry);
        found.scores.push_back(builder_.hypotheses.score(entry, config_.length_penalty));
    }
    return found.ranked();
}

}  // namespace dsbd
