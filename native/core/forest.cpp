// The forest: one trie of the drafted and accepted nodes below the prompt, each node once.
#include "forest.hpp"

#include "joint_distribution.hpp"
#include "logits_processing/path_states.hpp"
#include "noise.hpp"

namespace dsbd {
namespace {

/// Move the entries of the kept nodes to the front; drop all others.
template <class T>
void keep_entries(std::vector<T>& column, const Nodes& kept) {
    for (std::size_t node = 0; node < kept.size(); ++node) column[node] = column[at(kept[node])];
    column.resize(kept.size());
}

}  // namespace

Forest::Forest(std::int64_t last_prompt_token, std::int64_t position, std::uint64_t seed,
               std::vector<std::int64_t> eos_ids, std::vector<PathStates*> path_states)
    : eos_ids_(std::move(eos_ids)), path_states_(std::move(path_states)) {
    append(NO_NODE, last_prompt_token, root_key(seed));
    positions[0] = position;
}

void Forest::append(std::int64_t parent, std::int64_t token, std::uint64_t key) {
    const auto node = static_cast<std::int64_t>(size());
    tokens.push_back(token);
    parents.push_back(parent);
    positions.push_back(parent < 0 ? 0 : positions[at(parent)] + 1);
    path_keys.push_back(key);
    is_absorbing.push_back(0);
    for (auto& of_engine : slots) of_engine.push_back(NOT_COMPUTED);
    first_child_.push_back(NO_NODE);
    next_sibling_.push_back(NO_NODE);
    if (parent >= 0) next_sibling_[at(node)] = std::exchange(first_child_[at(parent)], node);
}

std::int64_t Forest::child(std::int64_t parent, std::int64_t token) const {
    std::int64_t node = first_child_[at(parent)];
    while (node >= 0 && tokens[at(node)] != token) node = next_sibling_[at(node)];
    return node;
}

const std::vector<std::uint64_t>& Forest::candidate_keys(const JointDistribution& joint) const {
    if (joint.path_keys.empty()) {
        joint.path_keys.resize(joint.tokens.size());
        for (std::size_t i = 0; i < joint.tokens.size(); ++i) {
            const std::uint64_t key = path_keys[at(joint.nodes[at(joint.parents[i])])];
            joint.path_keys[i] = child_key(key, joint.tokens[i]);
        }
    }
    return joint.path_keys;
}

Nodes Forest::descend(const JointDistribution& joint, IntSpan chosen) {
    Nodes nodes(chosen.size());
    const std::size_t first = size();
    for (std::size_t i = 0; i < chosen.size(); ++i) {
        const std::size_t candidate = at(chosen[i]);
        const std::int64_t parent = joint.nodes[at(joint.parents[candidate])];
        const std::int64_t token = joint.tokens[candidate];
        if (token < 0) {
            nodes[i] = parent;
            continue;
        }
        nodes[i] = child(parent, token);
        if (nodes[i] >= 0) {
            ++num_met;
            continue;
        }
        nodes[i] = static_cast<std::int64_t>(size());
        append(parent, token, child_key(path_keys[at(parent)], token));
    }
    if (size() > first) end_some(first);
    return nodes;
}

/// Mark which new nodes end their paths.
void Forest::end_some(std::size_t first) {
    num_added += static_cast<std::int64_t>(size() - first);
    Flags ends(size() - first);
    for (std::size_t i = 0; i < ends.size(); ++i) {
        ends[i] = is_among(eos_ids_, tokens[first + i]);
    }
    const auto new_parents = IntSpan(parents).subspan(first);
    const auto new_tokens = IntSpan(tokens).subspan(first);
    for (PathStates* states : path_states_) states->add(new_parents, new_tokens, ends);
    for (std::size_t i = 0; i < ends.size(); ++i) {
        if (!ends[i]) continue;
        has_ends = true;
        is_absorbing[first + i] = 1;
        for (auto& of_engine : slots) of_engine[first + i] = 0;
    }
}

Flags Forest::stopped(const JointDistribution& joint, IntSpan chosen) const {
    Flags ends(chosen.size());
    if (path_states_.empty()) return ends;
    Nodes above(chosen.size()), next(chosen.size());
    for (std::size_t i = 0; i < chosen.size(); ++i) {
        above[i] = joint.nodes[at(joint.parents[at(chosen[i])])];
        next[i] = joint.tokens[at(chosen[i])];
    }
    for (const PathStates* states : path_states_) states->would_end(above, next, ends);
    return ends;
}

bool Forest::are_absorbing(IntSpan nodes) const {
    return has_ends && std::all_of(nodes.begin(), nodes.end(),
                                   [&](auto node) { return is_absorbing[at(node)] != 0; });
}

Nodes Forest::pending(IntSpan nodes, const Nodes& of_engine) const {
    const auto is_missing = [&](auto node) { return node >= 0 && of_engine[at(node)] < 0; };
    Nodes found;
    std::copy_if(nodes.begin(), nodes.end(), std::back_inserter(found), is_missing);
    if (std::none_of(found.begin(), found.end(),
                     [&](auto node) { return is_missing(parents[at(node)]); })) {
        return found;  // usually
    }
    Flags is_pending(size());
    for (auto node : found) {
        for (; is_missing(node) && !is_pending[at(node)]; node = parents[at(node)]) {
            is_pending[at(node)] = 1;
        }
    }
    return places_of(is_pending);
}

Flags Forest::below(IntSpan roots) const {
    Flags is_below(size());
    for (auto root : roots) is_below[at(root)] = 1;
    for (std::size_t node = 0; node < size(); ++node) {
        if (parents[node] >= 0 && is_below[at(parents[node])]) is_below[node] = 1;
    }
    for (auto root : roots) is_below[at(root)] = 0;
    return is_below;
}

Nodes Forest::prune(const Flags& is_kept) {
    Nodes kept, renumbered(size(), NO_NODE);
    for (std::size_t node = 0; node < size(); ++node) {
        if (!is_kept[node]) continue;
        renumbered[node] = static_cast<std::int64_t>(kept.size());
        kept.push_back(static_cast<std::int64_t>(node));
    }
    for (auto* column : {&tokens, &parents, &positions, &slots[0], &slots[1]}) {
        keep_entries(*column, kept);
    }
    keep_entries(path_keys, kept);
    keep_entries(is_absorbing, kept);
    for (PathStates* states : path_states_) states->prune(kept, is_absorbing);
    first_child_.assign(kept.size(), NO_NODE);
    next_sibling_.assign(kept.size(), NO_NODE);
    for (std::size_t node = 0; node < kept.size(); ++node) {
        auto& parent = parents[node];
        if (parent >= 0) parent = renumbered[at(parent)];
        if (parent < 0) continue;
        next_sibling_[node] =
            std::exchange(first_child_[at(parent)], static_cast<std::int64_t>(node));
    }
    return renumbered;
}

}  // namespace dsbd
