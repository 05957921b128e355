// Next-token candidates of a path.
#include "logits_processing/candidates.hpp"

#include "numbers.hpp"

namespace dsbd {

std::optional<std::size_t> Candidates::place(std::int64_t token) const {
    const std::size_t found = first_from(token);
    if (found == size() || this->token(found) != token) return std::nullopt;
    return found;
}

std::size_t Candidates::first_from(std::int64_t token) const {
    if (!tokens) return std::min(at(token), vocab_size);
    return static_cast<std::size_t>(std::ranges::lower_bound(*tokens, token) - tokens->begin());
}

void Candidates::ban(std::int64_t token, std::span<double> scores) const {
    if (const auto found = place(token)) scores[*found] = LOG_ZERO;
}

const std::vector<Candidates::Seen>& Candidates::seen() const {
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

}  // namespace dsbd
