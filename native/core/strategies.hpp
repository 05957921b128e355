// Table of strategies: every decoder is the same loop with another row (docs/algorithm.md 3).
#pragma once

#include "forward.hpp"

namespace dsbd {

enum class Rule : std::uint8_t { sample, search, joint, joint_greedy };

/// The row of one strategy.
struct Strategy {
    std::string_view name;
    Rule rule;                 // how layers are selected
    bool has_draft = false;    // whether a draft model proposes a forest
    bool has_beams = false;    // whether num_beams may exceed 1
    bool has_draft_tree = false;  // whether draft_beams may exceed 1
    std::string_view at_zero = {};  // its counterpart at temperature 0; empty: itself
};

inline constexpr Strategy STRATEGIES[] = {
#include "strategies.inc"
};

/// Return the strategy of this name, null if there is none.
constexpr const Strategy* find_strategy(std::string_view name) {
    for (const Strategy& strategy : STRATEGIES) {
        if (strategy.name == name) return &strategy;
    }
    return nullptr;
}

/// Return the strategy of a request that names none; is_cold: its temperature is 0.
constexpr std::string_view named_strategy(std::string_view usual, bool is_cold) {
    const Strategy* strategy = find_strategy(usual);
    return is_cold && strategy && !strategy->at_zero.empty() ? strategy->at_zero : usual;
}

}  // namespace dsbd
