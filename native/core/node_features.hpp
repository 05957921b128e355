// Features of a request's nodes: which a feature draft reads, and where they lie.
//
// The row of a node comes from the feature of its parent: the target's if the target has computed
// the parent, else the draft's own, until the target has verified the forest. Then the row is
// *outdated*, and computed again once it is needed: the only case in which an engine computes a
// live node twice.
//
//     the prompt is a b; c and d are drafted below it, and e is selected below d
//
//     row         a  b  c  d        a  b  c  d  e
//     comes from  0  Fa Fb Oc       .  .  .  Fc Fd      0: zeros, F: the target's, O: own
//
// Left: the first draft. Right: the second one; the rows marked by a point stay as they are.
#pragma once

#include "cache_view.hpp"
#include "forest.hpp"

namespace dsbd {

/// Shorten what the target reuses if the draft needs features that were not kept.
///
/// The row of the draft at position i comes from the target's feature of position i - 1. With 7
/// rows reused by the target and 5 by the draft, the target computes from position 4 on again. The
/// draft reuses one row more than the target at most: others could not be computed again, after a
/// preemption, before the target's.
void align_prefixes(PrefixCache& target, PrefixCache& draft);

/// Return these places of features as those of rows.
ParentFeatures parents_at(std::span<const FeaturePlace> places);

/// The features of a ForestRunner: those that its calls return and read, by slot of its nodes.
/// Slot 0 is that of the prompt's last token but one, the parent of the forest's root.
class NodeFeatures {
public:
    virtual ~NodeFeatures() = default;
    /// Write what a forward of the prompt from position `start` on returns and reads.
    virtual void write_prompt(std::size_t start, std::size_t num_rows, Forward& forward) = 0;
    /// Keep the features that such a forward has returned.
    virtual void take_prompt(const ForwardResult&, std::size_t, std::size_t) {}
    /// Return which of these nodes one call can compute: those whose parents have a feature.
    virtual Nodes ready(const Nodes& nodes) const { return nodes; }
    /// Begin a call of nodes, which have no slots yet; return what it reads.
    virtual ParentFeatures begin(const Nodes& nodes) = 0;
    /// Add the features that a call has returned, of the next slots.
    virtual void take(const ForwardResult& result, std::size_t num_rows);
    /// Whether the row at a slot has to be computed again after pruning.
    virtual bool is_outdated(std::int64_t) const { return false; }
    /// Keep slot 0 and these, which become 1, 2, ...
    virtual void keep(IntSpan slots);

    std::vector<FeaturePlace> places{1};  // by slot
};

/// The features that the target's calls return.
class TargetFeatures final : public NodeFeatures {
public:
    explicit TargetFeatures(CacheView& view) : view_(view) {
        const PromptFeature& kept = view.prefix.feature;
        if (kept.num_tokens == view.prefix.tokens.size()) places[0] = kept.place;
    }

    void write_prompt(std::size_t, std::size_t num_rows, Forward& forward) override {
        count_up(forward.feature_rows, num_rows);
    }
    void take_prompt(const ForwardResult& result, std::size_t start, std::size_t num_rows) override;
    ParentFeatures begin(const Nodes&) override {
        first_ = before_ = {};
        return {};
    }
    /// Return what the draft's rows of the prompt from position `start` on come from.
    ParentFeatures of_prompt(std::size_t start, std::size_t num_rows) const;

private:
    CacheView& view_;
    // Of the part of the prompt that was computed last: the position and place of its first row,
    // and the feature before it.
    std::size_t start_ = 0;
    FeaturePlace first_, before_;
};

/// The features of a feature draft: what the rows of nodes come from, and its own.
class DraftFeatures final : public NodeFeatures {
public:
    DraftFeatures(const Forest& forest, const TargetFeatures& target)
        : forest_(forest), target_(target) {}

    void write_prompt(std::size_t start, std::size_t num_rows, Forward& forward) override {
        forward.parent_features = target_.of_prompt(start, num_rows);
    }
    Nodes ready(const Nodes& nodes) const override;
    ParentFeatures begin(const Nodes& nodes) override;
    void take(const ForwardResult& result, std::size_t num_rows) override;
    bool is_outdated(std::int64_t slot) const override {
        return slot > 0 && own_parents_[at(slot)] > 0;
    }
    void keep(IntSpan slots) override;
    /// Return the own feature that a slot's row comes from, none if it is the target's.
    FeaturePlace own_of(std::size_t slot) const;

private:
    const Forest& forest_;
    const TargetFeatures& target_;
    // By slot, that of the parent if the row comes from its own feature, else 0; and the same of
    // the call that is made now.
    Ints own_parents_{0}, next_parents_;
};

}  // namespace dsbd
