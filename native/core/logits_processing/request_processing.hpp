// Distributions of a request with processors or a constraint (docs/algorithm.md 3.8).
//
// In every position: raw scores, processors, constraint, then the warping. Only tokens that may be
// drawn are kept, so that a node under a tight constraint costs a few entries and not a vocabulary.
#pragma once

#include "config.hpp"
#include "distribution.hpp"
#include "logits_processing/allowed_after.hpp"
#include "logits_processing/candidates.hpp"
#include "logits_processing/path_states.hpp"
#include "logits_processing/processors.hpp"
#include "numbers.hpp"
#include "warp.hpp"

namespace dsbd {

/// The processors and the constraint of a request, as both engines apply them.
class RequestProcessing {
public:
    /// Begin a request that `processes_logits`. constraint: null: none. source: the tokens of its
    /// source; none: it has no source.
    RequestProcessing(const DecodingConfig& config, const Constraint* constraint,
                      IntSpan prompt_ids, std::size_t vocab_size,
                      std::optional<IntSpan> source = std::nullopt);

    std::vector<PathStates*> path_states();
    bool has_constraint() const { return constraint_.has_value(); }
    std::size_t vocab_size() const { return paths_.shared_counts.size(); }

    /// Append the distributions after nodes to `known`; `logits`: of these, one row each.
    ///
    /// is_draft: whether tokens that a top-k head left out, and that cannot be read, may stay out.
    void append(const Logits& logits, IntSpan nodes, bool is_draft, TokenDistributions& known);

    /// Return what the constraint allows after a node; Error: a token outside the vocabulary.
    AllowedAfter allowed_after(std::int64_t node) const;
    /// Return whether a path surely ends with its next token; `allowed`: of its node.
    bool ends_next(std::int64_t node, const AllowedAfter& allowed) const;
    /// Turn log-probabilities of a draft without a model, (n,), of distinct tokens after a node,
    /// into processed ones, -inf if a token is forbidden.
    void process(std::int64_t node, IntSpan tokens, std::span<double> log_probs);
    /// Error: nothing may follow one of `nodes`, or any beam.
    void check_continues(IntSpan nodes, std::size_t num_candidates) const;

private:
    /// A row at hand: the logits after a node, and what may follow it.
    struct Row {
        const Logits& logits;
        std::size_t index;
        std::int64_t node;
        const AllowedAfter& allowed;
        double normalizer;
        bool is_draft;
    };
    /// Append the distribution of the tokens that a top-k head returned; false: others may matter.
    bool append_top_row(const Row& row, TokenDistributions& known);
    void append_full_row(const Row& row, TokenDistributions& known);
    void read_top_row(const Row& row);
    Columns sort_by_token();
    void look_up(const Ints& listed);
    bool may_raise(const Candidates& candidates) const;
    void process_scores(const Candidates& candidates, double normalizer);
    void append_processed(IntSpan tokens, TokenDistributions& known);
    std::string new_tokens(std::int64_t node) const;

    Warp warp_;
    bool processes_log_probs_;
    std::vector<LogitsProcessor> processors_;
    PathTokens paths_;
    std::optional<ConstraintStates> constraint_;
    // Of the row at hand, by candidate; the scores are processed ones in the end.
    Ints tokens_;
    Floats scores_, raw_, before_;
};

}  // namespace dsbd
