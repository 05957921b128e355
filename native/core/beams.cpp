// Beams and their hypotheses: what a request has committed to so far.
#include "beams.hpp"

#include "numbers.hpp"

namespace dsbd {
double length_score(double logprob, std::int64_t num_tokens, double length_penalty) {
    return logprob / numpy_power(static_cast<double>(num_tokens), length_penalty);
}

std::int64_t Hypotheses::extend(std::int64_t parent, std::int64_t token, double token_logprob) {
    const auto entry = static_cast<std::int64_t>(size());
    parents.push_back(parent);
    tokens.push_back(token);
    lengths.push_back(lengths[at(parent)] + 1);
    token_logprobs.push_back(token_logprob);
    logprobs.push_back(logprobs[at(parent)] + token_logprob);
    return entry;
}

double Hypotheses::score(std::int64_t entry, double length_penalty) const {
    const auto length = std::max<std::int64_t>(lengths[at(entry)], 1);
    return length_score(logprobs[at(entry)], length, length_penalty);
}

Ints Hypotheses::path(std::int64_t entry) const {
    Ints found(at(lengths[at(entry)]));
    for (auto place = found.rbegin(); place != found.rend(); ++place) {
        *place = entry;
        entry = parents[at(entry)];
    }
    return found;
}

Ints Hypotheses::tokens_of(std::int64_t entry) const { return entries_at(tokens, path(entry)); }

Ints Hypotheses::common(IntSpan entries) const {
    if (entries.empty()) return {};
    std::int64_t shared = entries[0];
    for (std::int64_t other : entries) {
        while (other != shared) {
            auto& longer = lengths[at(other)] > lengths[at(shared)] ? other : shared;
            if (lengths[at(other)] == lengths[at(shared)]) other = parents[at(other)];
            longer = parents[at(longer)];
        }
    }
    return path(shared);
}

void Agreement::update(IntSpan given) {
    Ints live(given.begin(), given.end());
    std::sort(live.begin(), live.end());
    live.erase(std::unique(live.begin(), live.end()), live.end());
    const auto is_among = [](const Ints& entries, std::int64_t entry) {
        return std::binary_search(entries.begin(), entries.end(), entry);
    };
    const std::size_t num_known = num_branches_.size();
    if (at(live.back()) >= num_known) {
        num_branches_.resize(at(live.back()) + 1);
        branches_.resize(at(live.back()) + 1);
    }
    for (auto entry : live) {
        bool is_new = at(entry) >= num_known;
        while (is_new) {
            const std::int64_t parent = hypotheses_.parents[at(entry)];
            is_new = num_branches_[at(parent)]++ == 0 && at(parent) >= num_known;
            branches_[at(parent)] ^= entry;
            entry = parent;
        }
    }
    for (auto entry : live_) {
        if (is_among(live, entry)) continue;
        while (num_branches_[at(entry)] == 0) {
            const std::int64_t parent = hypotheses_.parents[at(entry)];
            --num_branches_[at(parent)];
            branches_[at(parent)] ^= entry;
            entry = parent;
        }
    }
    live_ = std::move(live);
    std::int64_t entry = entries.empty() ? 0 : entries.back();
    while (num_branches_[at(entry)] == 1 && !is_among(live_, entry)) {
        entry = branches_[at(entry)];
        entries.push_back(entry);
        tokens.push_back(hypotheses_.tokens[at(entry)]);
    }
}

std::size_t Beams::width() const {
    return copies.empty() ? nodes.size()
                          : at(std::accumulate(copies.begin(), copies.end(), std::int64_t{0}));
}

Ints Beams::repeated() const {
    Ints found;
    for (std::size_t beam = 0; beam < nodes.size(); ++beam) {
        found.insert(found.end(), copies.empty() ? 1 : at(copies[beam]),
                     static_cast<std::int64_t>(beam));
    }
    return found;
}

}  // namespace dsbd
