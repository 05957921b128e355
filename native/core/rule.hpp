// Selection rules: how a strategy proposes candidates, selects layers and ranks its results.
//
// A rule sees distributions and beams, never an engine; the loop that calls it is in decode.hpp.
#pragma once

#include "beams.hpp"
#include "forest.hpp"

namespace dsbd {

struct DecodingConfig;
struct DraftLayer;
class ForestRunner;

/// Hypotheses to return, entries of Hypotheses, and their scores, (n,) each; best first.
struct Finished {
    Ints hypotheses;
    Floats scores;

    Finished first(std::size_t number) const;
    /// Return them by score; of equal scores the first comes first.
    Finished ranked() const;
};

/// Builds layers: the nodes in the forest of a request, and their hypotheses.
class LayerBuilder {
public:
    /// repeats: whether a candidate may be drawn more than once.
    LayerBuilder(Forest& forest, Hypotheses& hypotheses, bool repeats)
        : forest(forest), hypotheses(hypotheses), repeats_(repeats) {}

    /// Return the beams that the drawn candidates of `joint` make of `beams`.
    Beams descended(const Beams& beams, const JointDistribution& joint, Ints drawn);
    /// Return the hypotheses of the chosen candidates, that of an absorbing beam as it is.
    Ints extended(const Beams& beams, const JointDistribution& joint, IntSpan chosen);

    Forest& forest;
    Hypotheses& hypotheses;

private:
    bool repeats_;
};

/// Return whether `early_stopping` ends a request (docs/algorithm.md 3.13).
///
/// last_score: of the finished sequences that count. best_logprob: of the live beams, by which they
/// would be scored.
bool is_decided(const DecodingConfig& config, double last_score, double best_logprob,
                std::size_t num_layers);

/// One rule of docs/algorithm.md 3, with the state of one request.
///
/// Here the final beams are the results, and ended beams stay in the set; a search differs.
class SelectionRule {
public:
    SelectionRule(const DecodingConfig& config, LayerBuilder& builder)
        : config_(config), builder_(builder) {}
    virtual ~SelectionRule() = default;

    /// Return the draft's candidates of a layer, in the order drawn. depth: from the prompt on.
    virtual Ints propose(JointDistribution& joint, std::size_t num_draws, std::size_t depth) = 0;
    /// Return the scores by which `propose` ranks candidates, (num_candidates,). Only of rules
    /// whose output does not depend on the draft.
    virtual Floats draft_scores(JointDistribution& joint, std::size_t depth) = 0;
    /// Return the beams of layer `depth`, `depth` + 1, ... as far as the target has computed, until
    /// the request is finished. At least one layer if the distributions after `beams` are known,
    /// none if logits have to be computed once more.
    virtual std::vector<Beams> select(ForestRunner& target, Beams beams,
                                      const std::vector<DraftLayer>& drafted,
                                      std::size_t depth) = 0;
    /// Return whether nothing is left to select after `num_layers` layers.
    virtual bool is_finished(const Beams& beams, std::size_t num_layers);
    /// Return the hypotheses one of which will begin the best sequence.
    virtual Ints live(const Beams& beams) { return beams.hypotheses; }
    /// Return the final hypotheses, best first.
    virtual Finished results(const Beams& beams) { return ranked(beams, beams.repeated()); }

    bool keeps_descendants = true;  // whether computed descendants of the beams may be kept
    // Whether it reads the draft's joint distributions, not only what was drawn from them.
    bool reads_draft_distributions = false;

protected:
    Finished ranked(const Beams& beams, IntSpan chosen) const;

    const DecodingConfig& config_;
    LayerBuilder& builder_;
};

}  // namespace dsbd
