// Next-token candidates of a path, and what a logits processor is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "forward.hpp"
#include "logits_processing/path_states.hpp"

namespace dsbd {

/// The next-token candidates of one path, whose scores processors change.
class Candidates {
public:
    /// tokens: (n,) increasing; none: all by id, n = vocab_size.
    Candidates(const PathTokens& paths, std::int64_t node,
               std::optional<std::span<const std::int64_t>> tokens, std::size_t vocab_size)
        : paths(paths), node(node), tokens(tokens), vocab_size(vocab_size) {}

    std::size_t size() const { return tokens ? tokens->size() : vocab_size; }
    std::int64_t token(std::size_t place) const {
        return tokens ? (*tokens)[place] : static_cast<std::int64_t>(place);
    }
    /// Return the place of a token, none if it is not a candidate.
    std::optional<std::size_t> place(std::int64_t token) const;
    /// Return the place of the first candidate that is not below `token`.
    std::size_t first_from(std::int64_t token) const;
    /// Set the score of a token to -inf, if it is a candidate.
    void ban(std::int64_t token, std::span<double> scores) const;

    /// A candidate that is in the prompt or in the path, and how often it is among the new tokens.
    struct Seen {
        std::size_t place;
        std::size_t new_count;
    };
    const std::vector<Seen>& seen() const;

    const PathTokens& paths;
    const std::int64_t node;
    const std::optional<std::span<const std::int64_t>> tokens;
    const std::size_t vocab_size;

private:
    mutable std::optional<std::vector<Seen>> seen_;
};

/// A deterministic function of the path that changes the scores of the next token.
class LogitsProcessor {
public:
    virtual ~LogitsProcessor() = default;
    /// Change the scores, (n,).
    virtual void process(std::span<double> scores, const Candidates& candidates) = 0;
    /// Whether a score may rise: candidates that a top-k head left out may then overtake others.
    virtual bool may_raise(const Candidates&) const { return false; }
};

}  // namespace dsbd
