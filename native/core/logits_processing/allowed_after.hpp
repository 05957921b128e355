// The tokens that a constraint allows after a node of a forest.
#pragma once

#include "logits_processing/constraint.hpp"
#include "logits_processing/path_states.hpp"

namespace dsbd {

/// The tokens that a constraint allows after one node, end-of-sequence ids included.
struct AllowedAfter {
    bool is_listed = false;      // false: there is no constraint, and every token is allowed
    Ints tokens;                 // by id
    std::size_t num_listed = 0;  // those that the constraint lists, the end aside

    /// states: null without a constraint.
    static AllowedAfter after(std::int64_t node, const ConstraintStates* states) {
        if (!states) return {};
        const std::int64_t state = states->of(node);
        AllowedAfter found;
        found.is_listed = true;
        states->constraint.list_allowed(state, found.tokens);
        found.num_listed = found.tokens.size();
        if (states->constraint.accepts(state)) {
            found.tokens.insert(found.tokens.end(), states->eos.begin(), states->eos.end());
            std::ranges::sort(found.tokens);
        }
        return found;
    }

    std::size_t num_of(std::size_t vocab_size) const {
        return is_listed ? tokens.size() : vocab_size;
    }
    bool allows(std::int64_t token) const {
        return !is_listed || std::ranges::binary_search(tokens, token);
    }
};

}  // namespace dsbd
