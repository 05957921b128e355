// Rule "search": beam search, token for token what transformers' generate(num_beams=W) returns.
#include "search_rule.hpp"

#include "config.hpp"
#include "drafting/draft.hpp"
#include "forest_runner.hpp"
#include "joint_distribution.hpp"
#include "numbers.hpp"
#include "warp.hpp"

namespace dsbd {
namespace {

/// Beam search, with the pool of finished hypotheses.
class SearchRule final : public SelectionRule {
public:
    SearchRule(const DecodingConfig& config, LayerBuilder& builder)
        : SelectionRule(config, builder), num_candidates_(num_searched(config)) {}

    /// Return the draft's best candidates that go on: an ended one is never a beam.
    Ints propose(JointDistribution& joint, std::size_t num_draws, std::size_t depth) override {
        return best_candidates(draft_scores(joint, depth), num_draws);
    }
    /// Return the log-weight of every candidate, -inf if it ends: (num_candidates,).
    Floats draft_scores(JointDistribution& joint, std::size_t) override {
        Floats scores = joint.log_weights;
        for (std::size_t i = 0; i < scores.size(); ++i) {
            if (config_.is_eos(joint.tokens[i])) scores[i] = LOG_ZERO;
        }
        return scores;
    }
    std::vector<Beams> select(ForestRunner& target, Beams beams, const std::vector<DraftLayer>&,
                              std::size_t depth) override {
        std::vector<Beams> committed;
        while (!beams.nodes.empty() && target.are_computed(beams.nodes)) {
            JointDistribution joint = target.joint(beams.nodes, beams.log_weights, {});
            Ints best = best_candidates(joint.log_weights, num_candidates_);
            const bool is_full = best.size() == num_candidates_;
            const double threshold = is_full ? joint.log_weights[at(best.back())] : LOG_ZERO;
            const LeftOut left_out = target.read_left_out(beams, threshold, num_candidates_);
            if (left_out == LeftOut::gone) break;
            if (left_out == LeftOut::read) {
                joint = target.joint(beams.nodes, beams.log_weights, {});
                best = best_candidates(joint.log_weights, num_candidates_);
            }
            beams = next_beams(beams, joint, best, ++depth);
            committed.push_back(beams);
            if (is_finished(beams, depth)) break;
        }
        return committed;
    }

    /// The heuristics are those of transformers.
    bool is_finished(const Beams& beams, std::size_t num_layers) override {
        if (num_layers == config_.max_new_tokens || beams.nodes.empty()) return true;
        if (pool_.scores.size() < config_.num_beams) return false;
        return config_.num_beams == 1 ||
               is_decided(config_, pool_.scores.back(), beams.log_weights[0], num_layers);
    }
    Ints live(const Beams& beams) override {
        Ints found = beams.hypotheses;
        found.insert(found.end(), pool_.hypotheses.begin(), pool_.hypotheses.end());
        return found;
    }
    Finished results(const Beams&) override { return pool_; }

private:
    void add_finished(const Beams& beams, const JointDistribution& joint, const Ints& finished) {
        const Ints entries = builder_.extended(beams, joint, finished);
        for (std::size_t i = 0; i < finished.size(); ++i) {
            const std::int64_t length = builder_.hypotheses.lengths[at(entries[i])];
            // By the processed log-probability, as transformers does.
            const double logprob = joint.log_weights[at(finished[i])];
            pool_.hypotheses.push_back(entries[i]);
            pool_.scores.push_back(length_score(logprob, length, config_.length_penalty));
        }
        pool_ = pool_.ranked().first(config_.num_beams);
    }

    /// Return the beams that go on; those among the first W that end enter the pool.
    Beams next_beams(const Beams& beams, const JointDistribution& joint, const Ints& best,
                     std::size_t depth) {
        const std::size_t width = config_.num_beams;
        Flags ends = builder_.forest.stopped(joint, best);
        Ints finished, next;
        for (std::size_t i = 0; i < best.size(); ++i) {
            const bool has_ended = ends[i] || depth == config_.max_new_tokens ||
                                   config_.is_eos(joint.tokens[at(best[i])]);
            if (has_ended && i < width) finished.push_back(best[i]);
            if (!has_ended && next.size() < width) next.push_back(best[i]);
        }
        if (!finished.empty()) add_finished(beams, joint, finished);
        return builder_.descended(beams, joint, next);
    }

    std::size_t num_candidates_;
    Finished pool_;
};

}  // namespace

std::unique_ptr<SelectionRule> search_rule(const DecodingConfig& config, LayerBuilder& builder) {
    return std::make_unique<SearchRule>(config, builder);
}

}  // namespace dsbd
