// Drafting: the forest grown by the draft model, the policies that decide how much, the record.
#pragma once

#include "beams.hpp"
#include "engine_call.hpp"
#include "forest.hpp"
#include "joint_distribution.hpp"

namespace dsbd {

/// One drafted layer.
struct DraftLayer {
    Ints drawn;               // (<= W_S,) candidates of `distribution`, in the order drawn
    Nodes children;           // (<= W_S,) of the distinct ones, in the order first drawn
    std::int64_t num_new = 0;  // how many of them the forest did not have
    // Q_t, the draft's joint distribution; null unless the rule `reads_draft_distributions`.
    std::shared_ptr<JointDistribution> distribution;
};

/// The record of one iteration, when its layers are selected and nothing is pruned yet.
struct Iteration {
    Beams roots;  // the beams at its start
    std::vector<DraftLayer> drafted;
    std::vector<Beams> committed;
    Beams beams;      // those that go on; the last committed ones, or fewer
    Ints hypotheses;  // (n,) live ones, one of which begins the best sequence
    Flags survivors;  // (num_nodes,) which nodes pruning will leave
    std::int64_t num_draft_tokens = 0;     // nodes that the draft added
    std::int64_t num_accepted_tokens = 0;  // drafted nodes that were committed, of earlier drafts
                                           // too
};

/// (joint, num_draws, depth) -> the draft's candidates in the order drawn.
using Propose = std::function<Ints(JointDistribution&, std::size_t, std::size_t)>;
/// (joint, depth) -> (num_candidates,): by these a rule ranks candidates.
using Scores = std::function<Floats(JointDistribution&, std::size_t)>;
/// (num_candidates, num_rows): see DraftPolicy::takes_all.
using TakesAll = std::function<bool(std::size_t, std::size_t)>;

/// Receives every iteration before it is pruned.
class Observer {
public:
    virtual ~Observer() = default;
    virtual void observe(const Iteration& iteration) = 0;
};

/// Forced layers of one draft, in addition to those that its policy chooses: bounds the rows of a
/// request.
inline constexpr std::size_t MOST_FORCED_LAYERS = 4;

/// A layer that is about to be drafted.
struct LayerNeeds {
    Nodes pending;  // (n,) nodes that the model has to compute for it, parents first
    bool is_forced = false;  // the constraint leaves one token to every path that has not ended
    std::size_t num_whole = 0;  // candidates of a layer of all that the constraint allows, else 0
};

/// Gives the distributions that a layer is drafted from.
class Drafter : public Observer {
public:
    void observe(const Iteration&) override {}
    /// Whether layers may be forced, so that `look_up` comes before the policy is asked.
    virtual bool forces() const { return false; }
    /// Begin a layer below these nodes; none if every path ends with its next token.
    virtual std::optional<LayerNeeds> look_up(const Nodes& nodes, const TakesAll& takes_all) = 0;
    /// Let the model compute the nodes that the layer needs.
    virtual EngineCalls<void> compute(Nodes pending) = 0;
    /// Return the draft's joint distribution over the continuations of these nodes. copies: empty:
    /// once each.
    virtual JointDistribution joint(const Nodes& nodes, const Floats& log_weights,
                                    const Ints& copies) = 0;
};

/// Decides, layer by layer, whether to draft and how many candidates (docs/algorithm.md 3.5).
class DraftPolicy : public Observer {
public:
    /// Return for how many iterations, this one included, no draft is made; count one.
    virtual std::size_t rest() { return 0; }
    /// Start an iteration: `num_pending` target rows in any case, `most_layers` usable.
    virtual void begin(std::size_t num_pending, std::size_t most_layers) = 0;
    /// Return whether a layer of all candidates is better than a call of `num_rows` rows.
    virtual bool takes_all(std::size_t num_candidates, std::size_t num_rows) = 0;
    /// Return whether to draft one more layer, by an engine call of so many rows.
    ///
    /// With 0 rows, whether a draft is worth looking up. num_whole: number of candidates of a layer
    /// of all that there are, else 0.
    virtual bool wants_layer(std::size_t num_rows, std::size_t num_whole = 0) = 0;
    /// Return the candidates to add, best first; none ends the draft.
    virtual Ints choose(JointDistribution& joint, std::size_t depth) = 0;
    /// Return all candidates of a forced layer if these are worth their rows, else none.
    virtual Ints choose_forced(const JointDistribution& joint) = 0;
};

/// Return the policy of a fixed number of layers, with so many candidates each, and forced layers.
std::unique_ptr<DraftPolicy> fixed_policy(std::vector<std::size_t> layer_widths, Propose propose);

/// Add the draft's candidates to the forest: at most one engine call per layer.
///
/// The draft's weights u start at the target's weights of the input beams (the published code
/// starts from equal weights and loses acceptance), then u_child = u_parent * q~. The draft ends
/// once all draft beams have ended. The policy has begun its iteration; the arguments live until
/// the computation is over.
///
/// depth: of the first layer, counted from the prompt. keeps_distributions: whether the layers hold
/// the draft's joint distributions. repeats: whether a candidate may be drawn more than once.
EngineCalls<std::vector<DraftLayer>> draft_forest(Forest& forest, Drafter& drafter,
                                                  const Beams& beams, DraftPolicy& policy,
                                                  std::size_t depth, bool keeps_distributions,
                                                  bool repeats);

/// The candidates of a joint distribution.
inline Ints all_candidates(const JointDistribution& joint) {
    Ints all;
    count_up(all, joint.num_candidates());
    return all;
}

/// Distinct candidates in the order first drawn, and how often each was drawn.
struct DistinctDraws {
    Ints values, copies;
};
DistinctDraws distinct_in_order(const Ints& drawn);

}  // namespace dsbd
