// Next-token candidates of a path.
#pragma once

#include "logits_processing/path_states.hpp"
#include "numbers.hpp"

namespace dsbd {

/// The next-token candidates of one path, whose scores processors change.
class Candidates {
public:
    /// tokens: (n,) increasing; none: all by id, n = vocab_size.
    Candidates(const PathTokens& paths, std::int64_t node, std::optional<IntSpan> tokens,
               std::size_t vocab_size)
        : paths(paths), node(node), tokens(tokens), vocab_size(vocab_size) {}

    std::size_t size() const { return tokens ? tokens->size() : vocab_size; }
    std::int64_t token(std::size_t place) const {
        return tokens ? (*tokens)[place] : static_cast<std::int64_t>(place);
    }
    /// Return the place of a token, none if it is not a candidate.
    std::optional<std::size_t> place(std::int64_t token) const {
        const std::size_t found = first_from(token);
        if (found == size() || this->token(found) != token) return std::nullopt;
        return found;
    }
    /// Return the place of the first candidate that is not below `token`.
    std::size_t first_from(std::int64_t token) const {
        if (!tokens) return std::min(at(token), vocab_size);
        return static_cast<std::size_t>(std::ranges::lower_bound(*tokens, token) - tokens->begin());
    }
    /// Set the score of a token to -inf, if it is a candidate.
    void ban(std::int64_t token, std::span<double> scores) const {
        if (const auto found = place(token)) scores[*found] = LOG_ZERO;
    }

    /// A candidate that is in the prompt or in the path, and how often it is among the new tokens.
    struct Seen {
        std::size_t place;
        std::size_t new_count;
    };
    const std::vector<Seen>& seen() const {
        if (seen_) return *seen_;
        std::vector<Seen>& found = seen_.emplace();
        Ints own = paths.own(node);
        std::ranges::sort(own);
        const auto add = [&](std::size_t place, std::int64_t token) {
            const auto index = at(token);
            const auto of_own = std::ranges::equal_range(own, token);
            const std::size_t count = paths.shared_counts[index] + of_own.size();
            if (count || paths.prompt_counts[index]) found.push_back({place, count});
        };
        if (tokens) {
            for (std::size_t i = 0; i < tokens->size(); ++i) add(i, (*tokens)[i]);
            return found;
        }
        for (const auto token : paths.distinct) add(at(token), token);
        for (std::size_t i = 0; i < own.size(); ++i) {
            const auto index = at(own[i]);
            const bool is_repeated = i > 0 && own[i] == own[i - 1];
            const bool is_distinct = paths.prompt_counts[index] || paths.shared_counts[index];
            if (!is_repeated && !is_distinct) add(index, own[i]);
        }
        return found;
    }

    const PathTokens& paths;
    const std::int64_t node;
    const std::optional<IntSpan> tokens;
    const std::size_t vocab_size;

private:
    mutable std::optional<std::vector<Seen>> seen_;
};

}  // namespace dsbd
