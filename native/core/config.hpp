// The options of one request, all of them, checked and resolved.
#pragma once

#include "seed.hpp"
#include "strategies.hpp"

namespace dsbd {

class Constraint;

/// Sizes of the draft's context: the whole path, and the one that is expected to save most time.
inline constexpr std::size_t WHOLE_CONTEXT = std::size_t{1} << 31, AUTO_CONTEXT = 0;

#include "option_fields.inc"

/// What is known when options are resolved.
struct Surroundings {
    bool costs_are_known = true;  // of engine calls: draft policy "throughput" is the default
    bool has_draft = true;        // whether there is a draft model
};

/// The options of one request; nothing about drafting is left open.
struct DecodingConfig : DecodingOptions {
    const Strategy* row = &STRATEGIES[0];  // the strategy; never null
    std::string trie_file;  // of the option constraint, {"trie": FILE}; empty: none
    std::string trie_end;   // "leaf" or "eos"; empty: as the file says
    std::shared_ptr<const Constraint> constraint;  // set by whoever opens the file; then
                                                   // `end_after` its longest path

    /// Whether anything proposes layers.
    bool drafts() const { return row->has_draft && drafter != DrafterKind::none; }
    /// Whether n-grams propose layers, alone or before the model.
    bool has_ngram_drafter() const {
        return drafter == DrafterKind::ngram || drafter == DrafterKind::model_and_ngram;
    }
    /// Whether a draft model proposes layers, alone or with others.
    bool has_draft_model() const {
        return row->has_draft &&
               (drafter == DrafterKind::model || drafter == DrafterKind::model_and_ngram);
    }
    /// Whether the output depends on what is drafted.
    bool depends_on_draft() const;
    /// Most candidates of any drafted layer, 0 without a draft.
    std::size_t most_draft_beams() const;
    /// Fewest beams that the width policy ever keeps.
    std::size_t smallest_width() const { return min_beams.value_or(num_beams); }
    /// Most beams that are live at any time: num_beams, or joint_beams of mjgd.
    std::size_t widest_search() const {
        return row->rule == Rule::joint_greedy ? joint_beams : num_beams;
    }
    bool has_constraint() const { return constraint || !trie_file.empty(); }
    /// Whether a processor or a constraint changes what may be drawn.
    bool processes_logits() const { return !logits_options().empty(); }
    /// The names of the processors that are given, and of the constraint: "logit_bias, constraint".
    std::string logits_options() const;
    bool is_eos(std::int64_t token) const;
    /// Limit the length by a constraint whose sequences have ended after so many tokens.
    void end_after(std::size_t most_tokens);
};

/// Return the config of options, a JSON object as Python's `DecodingConfig(**options)` takes it,
/// resolved as `.settled(...)` does. Error: an option is unknown, invalid, means nothing among the
/// others, or is one that this library does not support.
DecodingConfig decoding_config(std::string_view options, const Surroundings& surroundings = {});

}  // namespace dsbd
