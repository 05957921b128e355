// The tokens that a constraint allows after a node of a forest.
#pragma once

#include <bit>

#include "logits_processing/constraint.hpp"
#include "logits_processing/path_states.hpp"

namespace dsbd {

/// The tokens that a constraint allows after one node, end-of-sequence ids included.
struct AllowedAfter {
    bool is_listed = false, is_marked = false;  // neither: every token is allowed
    Ints tokens;                 // those listed, by id
    std::size_t num_listed = 0;  // those that the constraint lists, the end aside
    TokenBits bits;              // those marked

    /// states: null without a constraint.
    static AllowedAfter after(std::int64_t node, const ConstraintStates* states) {
        if (!states) return {};
        const std::int64_t state = states->of(node);
        AllowedAfter found;
        found.is_marked = states->constraint.allow(state, found.tokens, found.bits);
        if (found.is_marked) {
            if (!states->constraint.accepts(state)) return found;
            for (const auto end : states->eos) found.bits[at(end) / 32] |= 1u << at(end) % 32;
            return found;
        }
        found.is_listed = true;
        found.num_listed = found.tokens.size();
        if (states->constraint.accepts(state)) {
            found.tokens.insert(found.tokens.end(), states->eos.begin(), states->eos.end());
            std::ranges::sort(found.tokens);
        }
        return found;
    }

    /// How many are listed or marked.
    std::size_t count() const {
        std::size_t found = tokens.size();
        for (const auto word : bits) found += static_cast<std::size_t>(std::popcount(word));
        return found;
    }
    std::size_t num_of(std::size_t vocab_size) const {
        return is_listed || is_marked ? count() : vocab_size;
    }
    bool allows(std::int64_t token) const {
        if (is_marked) return bits[at(token) / 32] >> at(token) % 32 & 1;
        return !is_listed || std::ranges::binary_search(tokens, token);
    }
    /// Those that are listed or marked, by id.
    Ints all() const {
        Ints found = tokens;
        for (std::size_t word = 0; word < bits.size(); ++word) {
            for (auto left = bits[word]; left; left &= left - 1) {
                found.push_back(static_cast<std::int64_t>(32 * word) + std::countr_zero(left));
            }
        }
        return found;
    }
};

}  // namespace dsbd
