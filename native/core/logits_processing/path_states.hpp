// States of the path of every forest node, beyond its last token.
//
// The forest keeps these in step with its nodes. Only those that a request needs are made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "forward.hpp"

namespace dsbd {

class Constraint;

/// One kind of state, of every node of the forest.
class PathStates {
public:
    virtual ~PathStates() = default;
    /// Add the states of new nodes. Set `ends` of those whose paths end there, (num_new,).
    virtual void add(std::span<const std::int64_t> parents, std::span<const std::int64_t> tokens,
                     std::span<std::uint8_t> ends) = 0;
    /// Set `ends` for nodes that are not added.
    virtual void would_end(std::span<const std::int64_t> parents,
                           std::span<const std::int64_t> tokens,
                           std::span<std::uint8_t> ends) const = 0;
    /// Keep the states of these nodes, increasing, which become 0, 1, ... is_absorbing: theirs.
    virtual void prune(std::span<const std::int64_t> kept,
                       std::span<const std::uint8_t> is_absorbing) = 0;
};

/// Whether the new tokens of one path end it: the seam for stop strings.
///
/// Immutable: every node has its own, made from its parent's. A path that has ended is absorbing.
class StopState {
public:
    virtual ~StopState() = default;
    /// Whether the path has ended, with its last token or before.
    virtual bool has_ended() const = 0;
    /// Return the state of the path with one more token.
    virtual std::shared_ptr<const StopState> extended(std::int64_t token) const = 0;
};

/// A StopState of every node; it sees tokens after the first `num_exempt`.
class StopStates final : public PathStates {
public:
    StopStates(std::shared_ptr<const StopState> start, std::size_t num_exempt);
    void add(std::span<const std::int64_t> parents, std::span<const std::int64_t> tokens,
             std::span<std::uint8_t> ends) override;
    void would_end(std::span<const std::int64_t> parents, std::span<const std::int64_t> tokens,
                   std::span<std::uint8_t> ends) const override;
    void prune(std::span<const std::int64_t> kept,
               std::span<const std::uint8_t> is_absorbing) override;

private:
    std::shared_ptr<const StopState> extended(std::int64_t parent, std::int64_t token) const;

    std::vector<std::shared_ptr<const StopState>> states_;  // by node
    std::vector<std::size_t> exempt_;  // new tokens that are still exempt after each node
};

/// The state of a constraint at every node.
class ConstraintStates final : public PathStates {
public:
    ConstraintStates(const Constraint& constraint, std::span<const std::int64_t> prompt_ids,
                     Ints eos);
    void add(std::span<const std::int64_t> parents, std::span<const std::int64_t> tokens,
             std::span<std::uint8_t> ends) override;
    void would_end(std::span<const std::int64_t> parents, std::span<const std::int64_t> tokens,
                   std::span<std::uint8_t> ends) const override;
    void prune(std::span<const std::int64_t> kept,
               std::span<const std::uint8_t> is_absorbing) override;

    const Constraint& constraint;
    const Ints eos;  // (num_eos,) increasing
    Ints states;     // (num_nodes,); after an end-of-sequence token: its parent's

private:
    std::int64_t advanced(std::int64_t parent, std::int64_t token) const;
};

/// The tokens of every path, for processors: shared ones once, the rest by node.
///
/// The live paths share the prompt and the new tokens on which they agree; a path's *own* tokens
/// are the few after them. With the prompt [7, 3] and the paths [7, 3, 5, 8] and [7, 3, 5, 9] of
/// two nodes: shared [7, 3, 5], own [[8], [9]].
class PathTokens final : public PathStates {
public:
    PathTokens(std::span<const std::int64_t> prompt_ids, std::size_t vocab_size);
    void add(std::span<const std::int64_t> parents, std::span<const std::int64_t> tokens,
             std::span<std::uint8_t> ends) override;
    void would_end(std::span<const std::int64_t>, std::span<const std::int64_t>,
                   std::span<std::uint8_t>) const override {}
    void prune(std::span<const std::int64_t> kept,
               std::span<const std::uint8_t> is_absorbing) override;

    /// The own tokens of a path.
    std::span<const std::int64_t> own(std::int64_t node) const;
    /// How many tokens of a path are new.
    std::size_t num_new(std::int64_t node) const {
        return shared.size() - num_prompt + own(node).size();
    }
    /// The prompt and the new tokens of a path.
    Ints path(std::int64_t node) const;
    /// The last `length` tokens of a path, all if it has fewer.
    Ints tail(std::int64_t node, std::size_t length) const;

    const std::size_t num_prompt;
    Ints shared;  // the prompt and the new tokens that all live paths begin with
    // (vocab_size,): how often each token is in the prompt, and among the shared new tokens.
    std::vector<std::uint32_t> prompt_counts, shared_counts;
    Ints distinct;  // tokens of the prompt and of the shared new ones, each once

private:
    void widen();
    std::size_t num_agreed_of(std::span<const std::uint8_t> is_absorbing);

    std::size_t room_ = 8;
    Ints own_;                          // (num_nodes, room)
    std::vector<std::size_t> num_own_;  // by node
};

}  // namespace dsbd
