// States of the path of every forest node, beyond its last token.
#include "logits_processing/path_states.hpp"

#include "logits_processing/constraint.hpp"

namespace dsbd {

ConstraintStates::ConstraintStates(const Constraint& of, IntSpan prompt_ids, Ints eos_ids)
    : StateByNode(of.start(prompt_ids)), constraint(of), eos(std::move(eos_ids)) {}

void ConstraintStates::prune(IntSpan kept, std::span<const std::uint8_t> is_absorbing) {
    StateByNode::prune(kept, is_absorbing);
    constraint.keep_only(states_);
}

std::int64_t ConstraintStates::next(const std::int64_t& parent, std::int64_t token) const {
    return std::ranges::binary_search(eos, token) ? parent : constraint.advance(parent, token);
}

bool ConstraintStates::has_ended(const std::int64_t& state) const {
    return constraint.has_ended(state);
}

PathTokens::PathTokens(IntSpan prompt_ids, std::size_t vocab_size)
    : StateByNode(Ints{}),
      num_prompt(prompt_ids.size()),
      shared(prompt_ids.begin(), prompt_ids.end()),
      prompt_counts(vocab_size),
      shared_counts(vocab_size) {
    for (const auto token : shared) {
        if (!prompt_counts[at(token)]++) distinct.push_back(token);
    }
}

Ints PathTokens::next(const Ints& parent, std::int64_t token) const {
    Ints found;
    found.reserve(parent.size() + 1);
    found = parent;
    found.push_back(token);
    return found;
}

void PathTokens::prune(IntSpan kept, std::span<const std::uint8_t> is_absorbing) {
    StateByNode::prune(kept, is_absorbing);
    const std::size_t size = num_agreed(is_absorbing);
    if (!size) return;
    const auto live = std::ranges::find(is_absorbing, 0) - is_absorbing.begin();
    const Ints agreed(own(live).begin(), own(live).begin() + static_cast<std::ptrdiff_t>(size));
    for (const auto token : agreed) {
        shared.push_back(token);
        if (!shared_counts[at(token)]++ && !prompt_counts[at(token)]) distinct.push_back(token);
    }
    for (Ints& own : states_) {
        own.erase(own.begin(),
                  own.begin() + static_cast<std::ptrdiff_t>(std::min(size, own.size())));
    }
}

/// Return how many own tokens the live paths agree on.
std::size_t PathTokens::num_agreed(std::span<const std::uint8_t> is_absorbing) const {
    const Ints* first = nullptr;
    std::size_t found = 0;
    for (std::size_t node = 0; node < states_.size(); ++node) {
        if (is_absorbing[node]) continue;
        const Ints& own = states_[node];
        if (!first) found = own.size();
        if (!first) first = &own;
        const auto end = first->begin() + static_cast<std::ptrdiff_t>(found);
        found = static_cast<std::size_t>(
            std::mismatch(first->begin(), end, own.begin(), own.end()).first - first->begin());
    }
    return found;
}

Ints PathTokens::tail(std::int64_t node, std::size_t length) const {
    const Ints& tokens = own(node);
    const std::size_t num_own = std::min(length, tokens.size());
    const std::size_t num_shared = std::min(length - num_own, shared.size());
    Ints found(shared.end() - static_cast<std::ptrdiff_t>(num_shared), shared.end());
    found.insert(found.end(), tokens.end() - static_cast<std::ptrdiff_t>(num_own), tokens.end());
    return found;
}

}  // namespace dsbd
