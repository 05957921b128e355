// The forest: one trie of drafted and accepted nodes below the prompt, each node once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "joint_law.hpp"
#include "noise.hpp"
#include "trie.hpp"

namespace dsbd {

constexpr std::size_t no_node = static_cast<std::size_t>(-1);

struct Node {
    std::int64_t token;
    std::size_t parent;         // no_node for an oldest node
    std::int64_t position;
    std::uint64_t path_key;     // chained from the root's, see noise.hpp
    bool is_end;                // a sequence ends with it: it never costs a row
    Trie::State state;          // of its path, where a trie constrains the request
};

/// The nodes by number, parents before children.
class Forest {
public:
    /// Start with one node, the last token of the prompt. `trie` may be nullptr.
    Forest(std::int64_t last_prompt_token, std::int64_t position, std::uint64_t noise_key,
           std::set<std::int64_t> eos_ids, const Trie* trie)
        : nodes_{{last_prompt_token, no_node, position, root_key(noise_key), false, Trie::start}},
          eos_ids_(std::move(eos_ids)),
          trie_(trie) {}

    /// Return the tokens that may follow a node; without a value all may.
    std::optional<std::vector<std::int64_t>> allowed(std::size_t node) const {
        if (trie_ == nullptr) {
            return {};
        }
        return trie_->allowed(nodes_[node].state, eos_ids_);
    }

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
            const Node& before = nodes_[parent];
            bool is_end = eos_ids_.count(token) != 0;
            Trie::State state = Trie::start;
            if (trie_ != nullptr) {
                state = is_end ? Trie::ended : trie_->next(before.state, token);
                is_end = is_end || trie_->has_ended(state);
            }
            nodes_.push_back({token, parent, before.position + 1, child_key(before.path_key, token),
                              is_end, state});
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
    const Trie* trie_;
    std::map<std::pair<std::size_t, std::int64_t>, std::size_t> children_;
};

}  // namespace dsbd
