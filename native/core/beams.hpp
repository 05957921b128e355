// Beams and their hypotheses: what a request has committed to so far.
#pragma once

#include "forward.hpp"

namespace dsbd {

/// Return logprob / num_tokens ** length_penalty, rounded as Python's.
double length_score(double logprob, std::int64_t num_tokens, double length_penalty);

/// All hypotheses of a request as back-pointers: each is its parent and one more token. Entry 0 is
/// the empty one: its parent and token are -1.
class Hypotheses {
public:
    Hypotheses() : parents{-1}, tokens{-1}, lengths{0}, token_logprobs{0.0}, logprobs{0.0} {}

    std::size_t size() const { return parents.size(); }
    /// Add the hypothesis `parent` with one more token; return its entry.
    std::int64_t extend(std::int64_t parent, std::int64_t token, double token_logprob);
    /// Its `length_score`, by which sequences are ranked.
    double score(std::int64_t entry, double length_penalty) const;
    /// The non-empty entries from the first token to this one, (num_tokens,).
    Ints path(std::int64_t entry) const;
    /// The tokens of that path, (num_tokens,).
    Ints tokens_of(std::int64_t entry) const;
    /// The entries that the paths of all begin with, (num_tokens,).
    Ints common(IntSpan entries) const;

    // By entry. Raw log-probability of the last token under the target, and the sum from the first
    // token on.
    Ints parents, tokens, lengths;
    Floats token_logprobs, logprobs;
};

/// `entries` and `tokens` that all live hypotheses share, from iteration to iteration.
///
/// Of every entry of the hypotheses' tree it keeps the number of branches that still live, and
/// their exclusive or, which is the branch itself if there is only one. Every entry is added and
/// removed once, however long the hypotheses are.
class Agreement {
public:
    explicit Agreement(const Hypotheses& hypotheses) : hypotheses_(hypotheses) {}

    /// Take the live hypotheses; all of them extend earlier live ones or are among them.
    void update(IntSpan live);

    Ints entries, tokens;

private:
    const Hypotheses& hypotheses_;
    Ints num_branches_{0}, branches_{0};  // by entry
    Ints live_{0};                        // increasing
};

/// The beam set between two layers. Draws with replacement make it a multiset.
struct Beams {
    Ints nodes;          // (num_distinct,) node of the forest of every distinct beam
    Floats log_weights;  // (num_distinct,) log-probability under the warped target distributions
    Ints hypotheses;     // (num_distinct,) entry of Hypotheses of every beam
    Ints copies;         // (num_distinct,) how often the beam was drawn; empty: once each

    /// The set of one beam of weight 1.
    static Beams single(std::int64_t node, std::int64_t hypothesis) {
        return {{node}, {0.0}, {hypothesis}, {}};
    }
    /// The beams of a new request: one, at the last token of the prompt, node 0.
    static Beams initial() { return single(0, 0); }

    /// Beams, copies counted.
    std::size_t width() const;
    /// Index of the beam of every copy, (width,).
    Ints repeated() const;
    Beams only(std::size_t index) const { return single(nodes[index], hypotheses[index]); }
};

}  // namespace dsbd
