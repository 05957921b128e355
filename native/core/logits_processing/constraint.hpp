// Constraints: which tokens may follow a path (docs/algorithm.md 3.8).
//
// Tries implement this seam. A constraint is immutable and may serve many requests at once. Each
// node of the forest has a state, made from its parent's.
#pragma once

#include "forward.hpp"

namespace dsbd {

/// A bit for every token of the vocabulary: bit t % 32 of word t / 32.
using TokenBits = std::vector<std::uint32_t>;

/// Says which tokens may follow a path, and where a path may end.
///
/// A path that accepts may be followed by an end-of-sequence token: the decoder allows these
/// itself, exactly there, so a constraint never lists them. A path that has ended accepts, and
/// nothing may follow, not even such a token.
class Constraint {
public:
    using State = std::int64_t;
    virtual ~Constraint() = default;

    /// A short description for messages, such as "the token trie 'items.trie'".
    virtual std::string name() const = 0;
    /// Return the state of the empty continuation of a prompt.
    virtual State start(IntSpan prompt_ids) const = 0;
    /// Return the state of a path with one more allowed token, never an end-of-sequence token that
    /// is not listed; Error: the token is not allowed.
    virtual State advance(State state, std::int64_t token) const = 0;
    /// Append the tokens that may follow a path, increasing; or mark them, if they may be most of
    /// the vocabulary, and return true.
    virtual bool allow(State state, Ints& tokens, TokenBits& bits) const = 0;
    /// Only these states are in use from now on.
    virtual void keep_only(IntSpan) const {}
    /// Whether the path is complete, so that the sequence may end there.
    virtual bool accepts(State state) const = 0;
    /// Whether the path ends as it is, without an end-of-sequence token.
    virtual bool has_ended(State state) const = 0;
    /// Whether every listed token ends the path: below it nothing is drafted.
    virtual bool ends_next(State) const { return false; }
    /// Tokens of the longest path, with the end-of-sequence token that has to follow; none:
    /// unknown.
    virtual std::optional<std::size_t> most_tokens() const { return std::nullopt; }
};

}  // namespace dsbd
