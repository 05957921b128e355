// The tokens that a constraint allows after a node of a forest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "forward.hpp"

namespace dsbd {

class ConstraintStates;

/// The tokens that a constraint allows after one node, end-of-sequence ids included.
struct AllowedAfter {
    bool is_listed = false;      // false: there is no constraint, and every token is allowed
    Ints tokens;                 // by id
    std::size_t num_listed = 0;  // those that the constraint lists, the end aside

    /// states: null without a constraint.
    static AllowedAfter after(std::int64_t node, const ConstraintStates* states);

    std::size_t num_of(std::size_t vocab_size) const {
        return is_listed ? tokens.size() : vocab_size;
    }
    bool allows(std::int64_t token) const;
};

}  // namespace dsbd
