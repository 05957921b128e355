// The forest: one trie of drafted and accepted nodes below the prompt, each node once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "joint_law.hpp"
#include "noise.hpp"

namespace dsbd {

constexpr std::size_t no_node = static_cast<std::size_t>(-1);

struct Node {
    std::int64_t token;
    std::size_t parent;         // no_node for an oldest node
    std::int64_t position;
    std::uint64_t path_key;     // chained from the root's, see noise.hpp
    bool is_end;                // a sequence ends with it: it never costs a row
};

/// The nodes by number, parents before children.
class Forest {
public:
    /// Start with one node, the last token of the prompt.
    Forest(std::int64_t last_prompt_token, std::int64_t position, std::uint64_t noise_key,
           std::set<std::int64_t> eos_ids)
        : nodes_{{last_prompt_token, no_node, position, root_key(noise_key), false}},
          eos_ids_(std::move(eos_ids)) {}

    std::size_t size() const { return nodes_.size(); }
    const Node& operator[](std::size_t node) const { return nodes_[node]; }

    /// Return the node of a candidate, made where it is not there yet; an ended beam stays.
    std::size_t descend(const JointLaw& law, std::size_t candidate) {
        const std::size_t parent = law.nodes[law.beams[candidate]];
        const std::int64_t token = law.tokens[candidate];
        if (token == stay_token) {
            return parent;
        }
        const auto [place, is_new] = children_.try_emplace({parent, token}, nodes_.size());
        if (is_new) {
            nodes_.push_back({token, parent, nodes_[parent].position + 1,
                              child_key(nodes_[parent].path_key, token),
                              eos_ids_.count(token) != 0});
        }
        return place->second;
    }

    /// Return `roots` and all their descendants.
    std::set<std::size_t> subtree(const std::vector<std::size_t>& roots) const {
        std::set<std::size_t> found(roots.begin(), roots.end());
        for (std::size_t node = 0; node < nodes_.size(); ++node) {  // parents before children
            if (found.count(nodes_[node].parent) != 0) {
                found.insert(node);
            }
        }
        return found;
    }

    /// Keep the nodes `kept`, renumbered from 0; return the new number of each by its old one.
    std::map<std::size_t, std::size_t> prune(const std::set<std::size_t>& kept) {
        std::map<std::size_t, std::size_t> renumbered;
        std::vector<Node> nodes;
        children_.clear();
        for (const std::size_t old : kept) {
            Node node = nodes_[old];
            const auto parent = renumbered.find(node.parent);
            node.parent = parent == renumbered.end() ? no_node : parent->second;
            renumbered[old] = nodes.size();
            if (node.parent != no_node) {
                children_[{node.parent, node.token}] = nodes.size();
            }
            nodes.push_back(node);
        }
        nodes_ = std::move(nodes);
        return renumbered;
    }

private:
    std::vector<Node> nodes_;
    std::set<std::int64_t> eos_ids_;
    std::map<std::pair<std::size_t, std::int64_t>, std::size_t> children_;
};

}  // namespace dsbd
