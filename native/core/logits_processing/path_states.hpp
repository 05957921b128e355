// States of the path of every forest node, beyond its last token.
//
// The forest keeps these in step with its nodes. Only those that a request needs are made.
#pragma once

#include "forward.hpp"

namespace dsbd {

class Constraint;

/// One kind of state, of every node of the forest.
class PathStates {
public:
    virtual ~PathStates() = default;
    /// Add the states of new nodes. Set `ends` of those whose paths end there, (num_new,).
    virtual void add(IntSpan parents, IntSpan tokens, std::span<std::uint8_t> ends) = 0;
    /// Set `ends` for nodes that are not added.
    virtual void would_end(IntSpan parents, IntSpan tokens, std::span<std::uint8_t> ends) const = 0;
    /// Keep the states of these nodes, increasing, which become 0, 1, ... is_absorbing: theirs.
    virtual void prune(IntSpan kept, std::span<const std::uint8_t> is_absorbing) = 0;
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

/// A state of every node, made from its parent's.
template <class State>
class StateByNode : public PathStates {
public:
    explicit StateByNode(State start) : states_{std::move(start)} {}

    const State& of(std::int64_t node) const { return states_[at(node)]; }
    void add(IntSpan parents, IntSpan tokens, std::span<std::uint8_t> ends) override {
        for (std::size_t i = 0; i < parents.size(); ++i) {
            states_.push_back(next(of(parents[i]), tokens[i]));
            ends[i] |= has_ended(states_.back());
        }
    }
    void would_end(IntSpan parents, IntSpan tokens, std::span<std::uint8_t> ends) const override {
        for (std::size_t i = 0; i < parents.size(); ++i) {
            ends[i] |= has_ended(next(of(parents[i]), tokens[i]));
        }
    }
    void prune(IntSpan kept, std::span<const std::uint8_t>) override {
        for (std::size_t i = 0; i < kept.size(); ++i) {
            if (i != at(kept[i])) states_[i] = std::move(states_[at(kept[i])]);
        }
        states_.erase(states_.begin() + static_cast<std::ptrdiff_t>(kept.size()), states_.end());
    }

protected:
    /// Return the state of a path with one more token.
    virtual State next(const State& parent, std::int64_t token) const = 0;
    virtual bool has_ended(const State& state) const = 0;

    std::vector<State> states_;
};

/// The StopState of a path, and the new tokens that are still exempt after it.
struct ExemptStop {
    std::shared_ptr<const StopState> state;
    std::size_t num_exempt;
};

/// A StopState of every node; it sees tokens after the first `num_exempt`.
class StopStates final : public StateByNode<ExemptStop> {
public:
    using StateByNode::StateByNode;

private:
    ExemptStop next(const ExemptStop& parent, std::int64_t token) const override {
        if (parent.num_exempt) return {parent.state, parent.num_exempt - 1};
        return {parent.state->extended(token), 0};
    }
    bool has_ended(const ExemptStop& stop) const override { return stop.state->has_ended(); }
};

/// The state of a constraint at every node; after an end-of-sequence token its parent's.
class ConstraintStates final : public StateByNode<std::int64_t> {
public:
    ConstraintStates(const Constraint& constraint, IntSpan prompt_ids, Ints eos);

    void prune(IntSpan kept, std::span<const std::uint8_t> is_absorbing) override;

    const Constraint& constraint;
    const Ints eos;  // (num_eos,) increasing

private:
    std::int64_t next(const std::int64_t& parent, std::int64_t token) const override;
    bool has_ended(const std::int64_t& state) const override;
};

/// The tokens of every path, for processors: shared ones once, the rest by node.
///
/// The live paths share the prompt and the new tokens on which they agree; a path's *own* tokens
/// are the few after them. With the prompt [7, 3] and the paths [7, 3, 5, 8] and [7, 3, 5, 9] of
/// two nodes: shared [7, 3, 5], own [[8], [9]].
class PathTokens final : public StateByNode<Ints> {
public:
    PathTokens(IntSpan prompt_ids, std::size_t vocab_size);
    void would_end(IntSpan, IntSpan, std::span<std::uint8_t>) const override {}
    void prune(IntSpan kept, std::span<const std::uint8_t> is_absorbing) override;

    /// The own tokens of a path.
    const Ints& own(std::int64_t node) const { return of(node); }
    /// How many tokens of a path are new.
    std::size_t num_new(std::int64_t node) const {
        return shared.size() - num_prompt + own(node).size();
    }
    /// The last `length` tokens of a path, all if it has fewer.
    Ints tail(std::int64_t node, std::size_t length) const;

    const std::size_t num_prompt;
    Ints shared;  // the prompt and the new tokens that all live paths begin with
    // (vocab_size,): how often each token is in the prompt, and among the shared new tokens.
    std::vector<std::uint32_t> prompt_counts, shared_counts;
    Ints distinct;  // tokens of the prompt and of the shared new ones, each once

private:
    Ints next(const Ints& parent, std::int64_t token) const override;
    bool has_ended(const Ints&) const override { return false; }
    std::size_t num_agreed(std::span<const std::uint8_t> is_absorbing) const;
};

}  // namespace dsbd
