// The n-gram drafter: what followed the last tokens of a path before (docs/algorithm.md 3.9).
//
// Contexts of several lengths are looked up, the longest first; each gives its share of the
// probability by how often it was seen, and leaves the rest to shorter ones. A text that the output
// may repeat as a whole comes first: there the place of a path decides (prediction.hpp).
#pragma once

#include <array>
#include <unordered_map>

#include "drafting/prediction.hpp"
#include "logits_processing/path_states.hpp"

namespace dsbd {

inline constexpr std::size_t LONGEST_CONTEXT = 8;

/// Tokens that followed the contexts of some text, by hash: a clash only misleads.
class NGramCounts {
public:
    /// The tokens seen after a context and how often, in the order first seen.
    struct Following {
        std::pair<std::int64_t, std::int64_t> first;
        std::vector<std::pair<std::int64_t, std::int64_t>> others;
    };

    /// Count a token after its context, of which only the last tokens matter.
    void add(IntSpan context, std::int64_t token);
    /// Count the tokens of a text, each after those before it.
    void add_text(IntSpan token_ids);
    /// Return what was seen after the context of this key; null: nothing.
    const Following* find(std::uint64_t key) const;
    std::size_t num_tokens() const { return num_tokens_; }

private:
    std::unordered_map<std::uint64_t, Following> following_;
    std::size_t num_tokens_ = 0;
};

/// The texts of earlier requests, at most `max_tokens`: the older half goes at once.
class NGramPool {
public:
    explicit NGramPool(std::size_t max_tokens) : most_of_half_(max_tokens / 2) {}

    std::size_t num_tokens() const { return older_.num_tokens() + latest_.num_tokens(); }
    /// Keep a text, or as much of its end as a half holds.
    void add_text(IntSpan token_ids);
    /// The tables to look up, latest first.
    std::array<const NGramCounts*, 2> counts() const { return {&latest_, &older_}; }

private:
    std::size_t most_of_half_;
    NGramCounts older_, latest_;
};

/// The last tokens of a path, and its place in the prediction.
struct NGramPath {
    std::array<std::int64_t, LONGEST_CONTEXT + 1> tokens{};
    std::size_t num_tokens = 0;
    Place place;

    IntSpan tail() const { return {tokens.data(), num_tokens}; }
};

/// An NGramPath of every node.
class NGramPaths final : public StateByNode<NGramPath> {
public:
    NGramPaths(IntSpan prompt_ids, const Prediction& prediction);
    void would_end(IntSpan, IntSpan, std::span<std::uint8_t>) const override {}

private:
    NGramPath next(const NGramPath& parent, std::int64_t token) const override;
    bool has_ended(const NGramPath&) const override { return false; }

    const Prediction& prediction_;
};

/// Tokens that may follow a path.
struct Proposals {
    Ints tokens;  // (n,)
    Floats log_probs;  // (n,)
    double unlisted = 1.0;  // probability of all other tokens together
};

/// Next-token distributions by what followed before: in the prompt, the output and a pool.
class NGramDrafter {
public:
    struct Settings {
        double temperature = 1.0;  // sharpens the distribution as it does a model's
        // Propose nothing after paths without a long match, which a model drafts.
        bool only_long_matches = false;
        std::size_t num_beams = 1;  // of the request
        // Tokens that the output may repeat from the beginning on, as a source or a prediction: if
        // a model drafts too, these alone.
        Ints copied_ids;
        // The same, none until they are known: they then follow the prompt.
        std::function<Ints()> late_ids;
    };

    /// Count the prompt. pool: null: none; lives as long as the drafter.
    NGramDrafter(const Ints& prompt_ids, const NGramPool* pool, Settings settings);
    NGramDrafter(const NGramDrafter&) = delete;

    /// Count the last token of these paths, each a committed one and for the first time.
    void learn(IntSpan nodes);
    /// Return what may follow the path of a node.
    Proposals proposals(std::int64_t node);

private:
    struct Shares;
    Shares shares(IntSpan tail, const Place& place) const;
    void count_shares(IntSpan tail, Shares& found) const;

    Settings settings_;
    Prediction prediction_;

public:
    NGramPaths paths;

private:
    NGramCounts own_;
    Ints prompt_end_;
    const NGramPool* pool_;
};

}  // namespace dsbd
