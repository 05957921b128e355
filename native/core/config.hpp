// The options of one request, all of them, checked and resolved.
#pragma once

#include "seed.hpp"
#include "strategies.hpp"

namespace dsbd {

class Constraint;

enum class Coupling : std::uint8_t { gumbel, rejection };
enum class WidthPolicy : std::uint8_t { fixed, threshold };
enum class DrafterKind : std::uint8_t { model, ngram, model_and_ngram, none };
enum class PolicyKind : std::uint8_t { fixed, throughput };
enum class Memory : std::uint8_t { forest, single };
enum class EarlyStopping : std::uint8_t { no, yes, never };

/// Sizes of the draft's context: the whole path, and the one that is expected to save most time.
inline constexpr std::size_t WHOLE_CONTEXT = std::size_t{1} << 31, AUTO_CONTEXT = 0;

/// What is known when options are resolved.
struct Surroundings {
    bool costs_are_known = true;  // of engine calls: draft policy "throughput" is the default
    bool has_draft = true;        // whether there is a draft model
};

/// The options of one request; docs/run.md explains each. Nothing about drafting is left open.
struct DecodingConfig {
    const Strategy* row = &STRATEGIES[0];  // the strategy; never null
    std::size_t num_beams = 4;
    std::optional<Coupling> coupling;  // none if nothing is sampled
    WidthPolicy width_policy = WidthPolicy::fixed;
    std::optional<std::size_t> min_beams;  // none if the width is fixed
    double accept_threshold = 0.7;
    DrafterKind drafter = DrafterKind::none;
    std::string predicted_text;  // whoever has a tokenizer makes it predicted_token_ids
    Ints predicted_token_ids;
    PolicyKind draft_policy = PolicyKind::fixed;
    std::size_t draft_length = 0;
    std::vector<std::size_t> draft_beams;  // (draft_length,) candidates W_S of every layer
    std::size_t draft_context = AUTO_CONTEXT;  // tokens at the end of a path that the draft reads
    Memory memory = Memory::forest;
    bool replacement = false;
    double temperature = 1.0;
    std::size_t top_k = 0;  // 0: all tokens
    double top_p = 1.0;
    double min_p = 0.0;
    double typical_p = 1.0;
    double repetition_penalty = 1.0;
    double presence_penalty = 0.0;
    double frequency_penalty = 0.0;
    std::size_t no_repeat_ngram_size = 0;
    std::size_t encoder_no_repeat_ngram_size = 0;
    std::vector<Ints> bad_words_ids;
    std::vector<std::pair<std::int64_t, double>> logit_bias;  // by token id
    Ints suppress_tokens;
    Ints begin_suppress_tokens;
    std::optional<std::int64_t> no_timestamps_token_id;
    std::optional<std::int64_t> max_initial_timestamp_index;
    std::optional<std::int64_t> last_timestamp_token_id;
    std::size_t min_new_tokens = 0;
    std::optional<std::int64_t> forced_bos_token_id;
    std::optional<std::int64_t> forced_eos_token_id;
    std::string trie_file;  // of the option constraint, {"trie": FILE}; empty: none
    std::string trie_end;   // "leaf" or "eos"; empty: as the file says
    std::shared_ptr<const Constraint> constraint;  // set by whoever opens the file; then
                                                   // `end_after` its longest path
    std::size_t max_new_tokens = 64;
    std::optional<Uint128> seed;  // none: a random one
    std::size_t num_return_sequences = 1;
    double length_penalty = 1.0;
    EarlyStopping early_stopping = EarlyStopping::no;
    double joint_threshold = 0.1;
    std::size_t joint_tokens = 4;
    std::size_t joint_beams = 4;
    std::vector<std::string> stop_strings;
    std::optional<Ints> eos_token_id;  // none: the model's own, which whoever knows them sets
    std::size_t top_logprobs = 0;
    bool prompt_logprobs = false;
    bool skip_special_tokens = true;

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
