// Drafters: where the distributions of drafted layers come from (docs/algorithm.md 3.9).
//
// If the output does not depend on the draft, anything that gives a distribution over the next
// tokens of a path may draft. Each path is drafted by the first of these that can: the constraint,
// if it leaves one token, if nothing can follow the next one, or if the whole layer is worth
// drafting; the n-gram drafter; the draft model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "drafting/draft.hpp"
#include "drafting/ngram.hpp"
#include "logits_processing/allowed_after.hpp"

namespace dsbd {

class ForestRunner;
class RequestProcessing;

/// For each path the first of constraint, n-gram drafter and model that can.
class ChainedDrafter final : public Drafter, public Observer {
public:
    /// Take the drafters there are; null: none. They live as long as this one.
    ///
    /// proposes_ends: whether the constraint may draft for paths that end with their next token, as
    /// if all tokens were equally likely: not if the draft's distributions are read.
    ChainedDrafter(const Forest& forest, RequestProcessing* processing, NGramDrafter* ngram,
                   ForestRunner* model, bool proposes_ends = true);

    bool forces() const override;
    std::optional<LayerNeeds> look_up(const Nodes& nodes, const TakesAll& takes_all) override;
    EngineCalls<void> compute(Nodes pending) override;
    JointDistribution joint(const Nodes& nodes, const Floats& log_weights,
                            const Ints& copies) override;
    /// Let the n-gram drafter learn the committed tokens.
    void observe(const Iteration& iteration) override;

private:
    /// Candidates that are proposed without the model, for some of a layer's beams.
    struct Layer {
        Flags is_known;    // (num_beams,) of which beams
        Ints parents;      // (n,) the index of each candidate's beam, increasing
        Ints tokens;       // (n,) STAY for a beam that has ended
        Floats log_probs;  // (n,)
        Floats unlisted;   // (num_beams,) probability of all other tokens together

        explicit Layer(std::size_t num_beams) : is_known(num_beams), unlisted(num_beams) {}
        void add(std::size_t beam, std::int64_t token, double log_prob);
    };
    /// What the constraint says of a layer.
    struct Allowed {
        std::vector<AllowedAfter> after;  // (num_beams,); nothing of beams that have ended
        Flags are_asked;                  // (num_beams,) whether it drafts
    };

    std::optional<Allowed> ask_constraint(const Nodes& nodes, const TakesAll& takes_all,
                                          LayerNeeds& needs) const;
    void ask_ngram(std::size_t beam, std::int64_t node);
    bool has_ended(std::int64_t node) const {
        return forest_.has_ends && forest_.is_absorbing[static_cast<std::size_t>(node)];
    }

    const Forest& forest_;
    RequestProcessing* processing_;
    NGramDrafter* ngram_;
    ForestRunner* model_;
    bool proposes_ends_;
    Layer layer_{0};
};

}  // namespace dsbd
