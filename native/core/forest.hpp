// The forest: one trie of the drafted and accepted nodes below the prompt, each node once.
//
// Equal (path, token) pairs are one node. The forest holds only what can still matter: the current
// beams, their descendants, and ancestors that an engine has yet to compute. What lies above is
// committed; it lives on as rows in the caches and as the beams' hypotheses.
#pragma once

#include <array>

#include "engine_call.hpp"

namespace dsbd {

struct JointDistribution;
class PathStates;

inline constexpr std::int64_t NO_NODE = -1;
inline constexpr std::int64_t NOT_COMPUTED = -1;

using Nodes = Ints;

/// The nodes by number, parents before children.
class Forest {
public:
    /// Start with one node, the last token of the prompt. path_states: kept in step with the nodes.
    Forest(std::int64_t last_prompt_token, std::int64_t position, std::uint64_t seed,
           std::vector<std::int64_t> eos_ids, std::vector<PathStates*> path_states = {});

    std::size_t size() const { return tokens.size(); }
    /// The slot of a node in an engine; 0, the prompt's, of NO_NODE.
    std::int64_t slot(Role role, std::int64_t node) const {
        return node < 0 ? 0 : slots[at(role)][at(node)];
    }
    Nodes& slots_of(Role role) { return slots[at(role)]; }
    const Nodes& slots_of(Role role) const { return slots[at(role)]; }

    /// Return the path keys of all candidates, (num_candidates,); stored in `joint`.
    const std::vector<std::uint64_t>& candidate_keys(const JointDistribution& joint) const;
    /// Return the node of every distinct chosen candidate; an absorbing beam's is its own.
    Nodes descend(const JointDistribution& joint, IntSpan chosen);
    /// Return which chosen candidates would end by the state of a path, (num_chosen,).
    Flags stopped(const JointDistribution& joint, IntSpan chosen) const;
    bool are_absorbing(IntSpan nodes) const;
    /// Return what must be computed before the distributions after `nodes`, parents first.
    /// slots: (num_nodes,), of one engine.
    Nodes pending(IntSpan nodes, const Nodes& slots) const;
    /// Return which nodes are descendants of `roots`, these not included: (num_nodes,).
    Flags below(IntSpan roots) const;
    /// Drop the nodes that are not kept, (num_nodes,); return new number by old, or NO_NODE.
    Nodes prune(const Flags& is_kept);

    // By node. An oldest node's parent is NO_NODE. Path keys are chained from the root's, see
    // noise.hpp. A sequence ends with an absorbing node: it costs no row.
    Ints tokens, parents, positions;
    std::vector<std::uint64_t> path_keys;
    Flags is_absorbing;
    // By engine, by node: its place in the CacheView and the distributions; NOT_COMPUTED, or 0 for
    // an absorbing node, which needs none.
    std::array<Nodes, 2> slots;

    bool has_ends = false;                    // whether there was an absorbing node
    std::int64_t num_added = 0, num_met = 0;  // nodes that `descend` has made, and found, so far

private:
    void append(std::int64_t parent, std::int64_t token, std::uint64_t key);
    std::int64_t child(std::int64_t parent, std::int64_t token) const;
    void end_some(std::size_t first);

    std::vector<std::int64_t> eos_ids_;
    std::vector<PathStates*> path_states_;
    Nodes first_child_, next_sibling_;  // by node, NO_NODE: none; newest first
};

}  // namespace dsbd
