// One engine's rows of the forest: the nodes that it has computed, and the calls that do.
#pragma once

#include <map>

#include "beams.hpp"
#include "cache_view.hpp"
#include "computed_distributions.hpp"
#include "drafting/draft.hpp"
#include "drafting/draft_context.hpp"
#include "engine_call.hpp"
#include "error.hpp"
#include "forest.hpp"

namespace dsbd {

class NodeFeatures;
class PromptScorer;

/// The computed nodes of the forest in one engine; none is computed twice while it is live, except
/// those of a feature draft whose rows are outdated, see node_features.hpp.
///
/// A computed node has a slot, the same in the CacheView (its row and what that sees) and in the
/// distributions. Slot 0 is reserved: the prompt in the former, "stays what it is" in the latter.
class ForestRunner : public Drafter {
public:
    /// scorer: takes the logits after the prompt's tokens, if the request returns these. features:
    /// those that its calls return and read; null: none.
    ForestRunner(Role role, CacheView& view, Forest& forest, ComputedDistributions& distributions,
                 PromptScorer* scorer = nullptr, NodeFeatures* features = nullptr);

    Nodes& slots() { return forest.slots_of(role_); }
    const Nodes& slots() const { return forest.slots_of(role_); }
    Meter& meter() { return view_.meter; }
    PromptScorer* scorer() { return scorer_; }

    /// Compute the prompt except its last token; `followers` compute every part after it.
    EngineCalls<void> prefill(Ints token_ids, std::vector<ForestRunner*> followers = {});
    /// Leave the rows of the prompt and the new tokens that all beams share to the next one.
    virtual void finish(const Ints& agreed_tokens) { view_.end(agreed_tokens); }
    /// Whether the distribution after each is known; an absorbing one needs none.
    bool are_computed(IntSpan nodes) const;
    Nodes missing() const;
    Nodes pending(IntSpan nodes) const { return forest.pending(nodes, slots()); }

    /// Every row needs the model, and what it has not computed above.
    std::optional<LayerNeeds> look_up(const Nodes& nodes, const TakesAll&) override {
        return LayerNeeds{pending(nodes)};
    }
    /// Compute `pending` or `missing` nodes in one call; a feature draft needs several.
    EngineCalls<void> compute(Nodes pending) override;
    JointDistribution joint(const Nodes& nodes, const Floats& log_weights,
                            const Ints& copies) override {
        return distributions.joint(nodes, log_weights, copies);
    }
    /// The warped log-probability of one token after each computed node.
    Floats log_probs(IntSpan nodes, IntSpan tokens) {
        return distributions.log_probs(nodes, tokens);
    }

    /// Look for continuations that an engine with a top-k head did not return.
    ///
    /// Of every beam that may have one with a log-weight of at least `threshold`, the `most` best
    /// are read. If they are GONE, the beam counts as not computed; what its parent sees remains
    /// known.
    LeftOut read_left_out(const Beams& beams, double threshold, std::size_t most);

    /// Keep the nodes as well that are needed to compute kept ones later: (num_nodes,).
    virtual void keep_needed(Flags& is_kept) const;
    /// Forget the nodes that the forest has dropped.
    virtual void prune();

    Forest& forest;
    ComputedDistributions& distributions;

protected:
    Role role_;
    CacheView& view_;
    std::size_t num_calls_ = 0;
    std::map<std::int64_t, std::int64_t> slots_above_;  // by node set back: a slot of what is above
    std::size_t offset_ = 0;  // the forest's position 5 is the engine's position 5 - offset_

private:
    /// Nodes that are about to be computed.
    struct Computing {
        Nodes nodes;
        Ints parent_slots;
        ParentFeatures parent_features;
    };
    Computing begin_computing(Nodes nodes);
    void write(const Computing& computing, std::size_t first_row, Forward& forward);
    void write_prompt(IntSpan chunk, std::size_t start, std::size_t first_row, Forward& forward);
    ModelError named(const ModelError& error) const;

    std::int64_t slot_after_pruning(std::int64_t slot) const;

    PromptScorer* scorer_;
    NodeFeatures* features_;
};

/// The draft's rows of the forest; it reads the end of the prompt just before its first node.
///
/// During a long rest it is *put off*: nothing is kept for it, and its next rows are computed as a
/// prompt is, all at once.
class LateRunner final : public ForestRunner {
public:
    LateRunner(CacheView& view, Forest& forest, ComputedDistributions& distributions,
               const Ints& prompt_ids, const Hypotheses& hypotheses, DraftContext context);

    /// Be put off if that costs less than to stay up to date in iterations without a draft. With 0
    /// iterations, be ready for a draft below these beams.
    void rest(std::size_t num_iterations, const Beams& beams);
    /// Return how many tokens of prompt and source are read before the first node.
    std::pair<std::size_t, std::size_t> unread() const;
    /// Whether the draft has positions for layers below these beams.
    bool can_draft(const Beams& beams);
    /// Compute nodes; before, read what is unread, or begin the path again.
    EngineCalls<void> compute(Nodes pending) override;
    void keep_needed(Flags& is_kept) const override {
        if (!is_put_off_) ForestRunner::keep_needed(is_kept);
    }
    void prune() override {
        if (!is_put_off_) ForestRunner::prune();
    }
    /// Rows of an earlier prompt that began alike stay as they are.
    void finish(const Ints& agreed_tokens) override {
        if (!is_unread_) ForestRunner::finish(context.tokens(agreed_tokens));
    }

    DraftContext context;  // where the draft's path begins

private:
    PrefixCache longest_prefix(const RowIdentity& identity) const;
    EngineCalls<void> read_prompt();
    void start_here();
    void prefill_later(const Beams& beams);
    void put_off(const Beams& beams);
    Ints tokens() const;

    const Ints& prompt_ids_;
    const Hypotheses& hypotheses_;
    bool is_unread_ = false, is_put_off_ = false;
    Beams read_to_;
    std::size_t num_unread_ = 0;
    std::size_t first_ = 0, newest_ = 0;  // positions of what a draft continues, see `can_draft`
};

}  // namespace dsbd
