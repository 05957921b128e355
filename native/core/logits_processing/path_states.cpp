// States of the path of every forest node, beyond its last token.
#include "logits_processing/path_states.hpp"

#include <algorithm>

#include "logits_processing/constraint.hpp"

namespace dsbd {
namespace {

template <class T>
void take(std::vector<T>& entries, std::span<const std::int64_t> kept) {
    for (std::size_t i = 0; i < kept.size(); ++i) {
        if (i != at(kept[i])) entries[i] = std::move(entries[at(kept[i])]);
    }
    entries.resize(kept.size());
}

}  // namespace

StopStates::StopStates(std::shared_ptr<const StopState> start, std::size_t num_exempt)
    : states_{std::move(start)}, exempt_{num_exempt} {}

void StopStates::add(std::span<const std::int64_t> parents, std::span<const std::int64_t> tokens,
                     std::span<std::uint8_t> ends) {
    for (std::size_t i = 0; i < parents.size(); ++i) {
        states_.push_back(extended(parents[i], tokens[i]));
        const std::size_t num_exempt = exempt_[at(parents[i])];
        exempt_.push_back(num_exempt ? num_exempt - 1 : 0);
        ends[i] |= states_.back()->has_ended();
    }
}

void StopStates::would_end(std::span<const std::int64_t> parents,
                           std::span<const std::int64_t> tokens,
                           std::span<std::uint8_t> ends) const {
    for (std::size_t i = 0; i < parents.size(); ++i) {
        ends[i] |= extended(parents[i], tokens[i])->has_ended();
    }
}

void StopStates::prune(std::span<const std::int64_t> kept, std::span<const std::uint8_t>) {
    take(states_, kept);
    take(exempt_, kept);
}

std::shared_ptr<const StopState> StopStates::extended(std::int64_t parent,
                                                      std::int64_t token) const {
    const auto& state = states_[at(parent)];
    return exempt_[at(parent)] ? state : state->extended(token);
}

ConstraintStates::ConstraintStates(const Constraint& of, std::span<const std::int64_t> prompt_ids,
                                   Ints eos_ids)
    : constraint(of), eos(std::move(eos_ids)), states{of.start(prompt_ids)} {}

void ConstraintStates::add(std::span<const std::int64_t> parents,
                           std::span<const std::int64_t> tokens, std::span<std::uint8_t> ends) {
    for (std::size_t i = 0; i < parents.size(); ++i) {
        states.push_back(advanced(parents[i], tokens[i]));
        ends[i] |= constraint.has_ended(states.back());
    }
}

void ConstraintStates::would_end(std::span<const std::int64_t> parents,
                                 std::span<const std::int64_t> tokens,
                                 std::span<std::uint8_t> ends) const {
    for (std::size_t i = 0; i < parents.size(); ++i) {
        ends[i] |= constraint.has_ended(advanced(parents[i], tokens[i]));
    }
}

void ConstraintStates::prune(std::span<const std::int64_t> kept, std::span<const std::uint8_t>) {
    take(states, kept);
}

std::int64_t ConstraintStates::advanced(std::int64_t parent, std::int64_t token) const {
    const std::int64_t state = states[at(parent)];
    return std::ranges::binary_search(eos, token) ? state : constraint.advance(state, token);
}

PathTokens::PathTokens(std::span<const std::int64_t> prompt_ids, std::size_t vocab_size)
    : num_prompt(prompt_ids.size()),
      shared(prompt_ids.begin(), prompt_ids.end()),
      prompt_counts(vocab_size),
      shared_counts(vocab_size),
      own_(room_),
      num_own_{0} {
    for (const auto token : shared) {
        if (!prompt_counts[at(token)]++) distinct.push_back(token);
    }
}

void PathTokens::add(std::span<const std::int64_t> parents, std::span<const std::int64_t> tokens,
                     std::span<std::uint8_t>) {
    for (std::size_t i = 0; i < parents.size(); ++i) {
        const std::size_t parent = at(parents[i]), node = num_own_.size();
        const std::size_t length = num_own_[parent];
        if (length == room_) widen();
        own_.resize((node + 1) * room_);
        std::copy_n(&own_[parent * room_], length, &own_[node * room_]);
        own_[node * room_ + length] = tokens[i];
        num_own_.push_back(length + 1);
    }
}

void PathTokens::widen() {
    Ints wider(own_.size() * 2);
    for (std::size_t node = 0; node < num_own_.size(); ++node) {
        std::copy_n(&own_[node * room_], num_own_[node], &wider[node * room_ * 2]);
    }
    own_.swap(wider);
    room_ *= 2;
}

void PathTokens::prune(std::span<const std::int64_t> kept,
                       std::span<const std::uint8_t> is_absorbing) {
    for (std::size_t i = 0; i < kept.size(); ++i) {
        const std::size_t old = at(kept[i]);
        num_own_[i] = num_own_[old];
        if (i != old) std::copy_n(&own_[old * room_], num_own_[i], &own_[i * room_]);
    }
    num_own_.resize(kept.size());
    own_.resize(kept.size() * room_);
    const std::size_t num_agreed = num_agreed_of(is_absorbing);
    if (!num_agreed) return;
    for (std::size_t node = 0; node < kept.size(); ++node) {
        const auto begin = own_.begin() + static_cast<std::ptrdiff_t>(node * room_);
        const std::size_t gone = std::min(num_agreed, num_own_[node]);
        std::copy(begin + static_cast<std::ptrdiff_t>(gone),
                  begin + static_cast<std::ptrdiff_t>(num_own_[node]), begin);
        num_own_[node] -= gone;
    }
}

/// Share the tokens on which the live paths now agree; return how many these are.
std::size_t PathTokens::num_agreed_of(std::span<const std::uint8_t> is_absorbing) {
    const std::int64_t* first = nullptr;
    std::size_t num_agreed = 0;
    for (std::size_t node = 0; node < num_own_.size(); ++node) {
        if (is_absorbing[node]) continue;
        const std::int64_t* const tokens = &own_[node * room_];
        if (!first) {
            first = tokens;
            num_agreed = num_own_[node];
        }
        num_agreed = std::min(num_agreed, num_own_[node]);
        num_agreed = static_cast<std::size_t>(
            std::mismatch(first, first + num_agreed, tokens).first - first);
    }
    for (std::size_t i = 0; i < num_agreed; ++i) {
        const std::size_t token = at(first[i]);
        shared.push_back(first[i]);
        if (!shared_counts[token]++ && !prompt_counts[token]) distinct.push_back(first[i]);
    }
    return num_agreed;
}

std::span<const std::int64_t> PathTokens::own(std::int64_t node) const {
    return {&own_[at(node) * room_], num_own_[at(node)]};
}

Ints PathTokens::path(std::int64_t node) const {
    Ints found = shared;
    const auto tokens = own(node);
    found.insert(found.end(), tokens.begin(), tokens.end());
    return found;
}

Ints PathTokens::tail(std::int64_t node, std::size_t length) const {
    const auto tokens = own(node);
    const std::size_t num_own = std::min(length, tokens.size());
    const std::size_t num_shared = std::min(length - num_own, shared.size());
    Ints found(shared.end() - static_cast<std::ptrdiff_t>(num_shared), shared.end());
    found.insert(found.end(), tokens.end() - static_cast<std::ptrdiff_t>(num_own), tokens.end());
    return found;
}

}  // namespace dsbd
