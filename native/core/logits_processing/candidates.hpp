// Next-token candidates of a path.
#pragma once

#include "logits_processing/path_states.hpp"

namespace dsbd {

/// The next-token candidates of one path, whose scores processors change.
class Candidates {
public:
    /// tokens: (n,) increasing; none: all by id, n = vocab_size.
    Candidates(const PathTokens& paths, std::int64_t node, std::optional<IntSpan> tokens,
               std::size_t vocab_size)
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
    const std::optional<IntSpan> tokens;
    const std::size_t vocab_size;

private:
    mutable std::optional<std::vector<Seen>> seen_;
};

}  // namespace dsbd
