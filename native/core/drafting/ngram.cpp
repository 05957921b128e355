// The n-gram drafter: what followed the last tokens of a path before.
#include "drafting/ngram.hpp"

#include <cmath>
#include <iterator>

#include "noise.hpp"

namespace dsbd {
namespace {

/// Of c tokens seen after a context of this length, d of them distinct, the share
/// c / (c + doubt * d) of the probability is theirs.
struct Doubt {
    std::size_t length;
    double doubt;
};
constexpr Doubt DOUBTS[] = {{8, 0.05}, {5, 0.15}, {3, 0.5}, {2, 1.0}, {1, 3.0}};  // longest first
constexpr std::size_t LONG_MATCH = 5;  // tokens of a context that is used before a draft model
constexpr std::size_t MOST_LISTED = 8;
constexpr double LEAST_LEFT = 1.0 - 0.95;

using Keys = std::array<std::uint64_t, LONGEST_CONTEXT + 1>;

IntSpan last(IntSpan tokens, std::size_t number) {
    return tokens.last(std::min(number, tokens.size()));
}

/// Return the keys of the last tokens, by their number.
Keys keys_of(IntSpan context) {
    Keys keys{};
    for (std::size_t n = 1; n <= std::min(context.size(), LONGEST_CONTEXT); ++n) {
        keys[n] = child_key(keys[n - 1], context[context.size() - n]);
    }
    return keys;
}

/// Tokens with their shares, found by token.
class ShareList {
public:
    explicit ShareList(std::vector<Share> begin) : list(std::move(begin)) {
        for (std::size_t i = 0; i < list.size(); ++i) index_[list[i].first] = i;
    }
    void add(std::int64_t token, double share) {
        const auto [place, is_new] = index_.emplace(token, list.size());
        if (is_new) list.emplace_back(token, 0.0);
        list[place->second].second += share;
    }

    std::vector<Share> list;

private:
    std::unordered_map<std::int64_t, std::size_t> index_;
};

NGramPath path_at_end(IntSpan prompt_ids) {
    const IntSpan end = last(prompt_ids, LONGEST_CONTEXT + 1);
    NGramPath path;
    path.num_tokens = end.size();
    std::copy(end.begin(), end.end(), path.tokens.begin());
    return path;
}

double sum_of(std::span<const Share> shares) {
    double sum = 0.0;
    for (const Share& share : shares) sum += share.second;
    return sum;
}

}  // namespace

void NGramCounts::add(IntSpan context, std::int64_t token) {
    ++num_tokens_;
    const Keys keys = keys_of(context);
    for (const Doubt& each : DOUBTS) {
        if (each.length > context.size()) continue;
        const auto [place, is_new] = following_.try_emplace(keys[each.length]);
        Following& found = place->second;
        if (is_new) found.first = {token, 0};
        if (found.first.first == token) {
            ++found.first.second;
            continue;
        }
        const auto other = std::find_if(found.others.begin(), found.others.end(),
                                        [&](const auto& count) { return count.first == token; });
        if (other == found.others.end()) {
            found.others.emplace_back(token, 1);
        } else {
            ++other->second;
        }
    }
}

void NGramCounts::add_text(IntSpan token_ids) {
    for (std::size_t end = 1; end < token_ids.size(); ++end) {
        add(last(token_ids.first(end), LONGEST_CONTEXT), token_ids[end]);
    }
}

const NGramCounts::Following* NGramCounts::find(std::uint64_t key) const {
    const auto found = following_.find(key);
    return found == following_.end() ? nullptr : &found->second;
}

void NGramPool::add_text(IntSpan token_ids) {
    if (latest_.num_tokens() + token_ids.size() > most_of_half_) {
        older_ = std::move(latest_);
        latest_ = NGramCounts();
    }
    latest_.add_text(last(token_ids, most_of_half_));
}

NGramPaths::NGramPaths(IntSpan prompt_ids, const Prediction& prediction)
    : StateByNode(path_at_end(prompt_ids)), prediction_(prediction) {}

NGramPath NGramPaths::next(const NGramPath& parent, std::int64_t token) const {
    NGramPath path = parent;
    if (path.num_tokens == path.tokens.size()) {
        std::copy(path.tokens.begin() + 1, path.tokens.end(), path.tokens.begin());
        --path.num_tokens;
    }
    path.tokens[path.num_tokens++] = token;
    path.place = prediction_.after(path.place, path.tail());
    return path;
}

/// Probabilities of the tokens that may follow a path, and that of the others.
struct NGramDrafter::Shares {
    ShareList listed;
    double left;
};

NGramDrafter::NGramDrafter(const Ints& prompt_ids, const NGramPool* pool, Settings settings)
    : settings_(std::move(settings)),
      prediction_(settings_.copied_ids),
      paths(prompt_ids, prediction_),
      pool_(pool) {
    const IntSpan end = last(prompt_ids, LONGEST_CONTEXT);
    prompt_end_.assign(end.begin(), end.end());
    if (!settings_.copied_ids.empty()) {
        Ints copied(prompt_ids.begin(), prompt_ids.begin() + 1);
        copied.insert(copied.end(), settings_.copied_ids.begin(), settings_.copied_ids.end());
        own_.add_text(copied);
    }
    own_.add_text(prompt_ids);
}

void NGramDrafter::learn(IntSpan nodes) {
    for (const std::int64_t node : nodes) {
        const IntSpan tail = paths.of(node).tail();
        own_.add(tail.first(tail.size() - 1), tail.back());
    }
    for (const std::int64_t node : nodes) prediction_.learn(paths.of(node).place);
}

Proposals NGramDrafter::proposals(std::int64_t node) {
    if (settings_.late_ids) {
        if (Ints copied = settings_.late_ids(); !copied.empty()) {
            copied.insert(copied.begin(), prompt_end_.begin(), prompt_end_.end());
            own_.add_text(copied);
            settings_.late_ids = nullptr;
        }
    }
    Shares found = shares(last(paths.of(node).tail(), LONGEST_CONTEXT), paths.of(node).place);
    std::vector<Share>& listed = found.listed.list;
    if (listed.size() > MOST_LISTED) {
        std::stable_sort(listed.begin(), listed.end(),
                         [](const Share& a, const Share& b) { return a.second > b.second; });
        found.left += sum_of(std::span(listed).subspan(MOST_LISTED));
        listed.resize(MOST_LISTED);
    }
    const double exponent = 1.0 / std::max(settings_.temperature, 0.1);
    for (Share& share : listed) share.second = std::pow(share.second, exponent);
    const double rest = std::pow(found.left, exponent), total = sum_of(listed) + rest;
    Proposals proposed;
    for (const auto& [token, power] : listed) {
        proposed.tokens.push_back(token);
        proposed.log_probs.push_back(std::log(power / total));
    }
    proposed.unlisted = rest / total;
    return proposed;
}

NGramDrafter::Shares NGramDrafter::shares(IntSpan tail, const Place& place) const {
    std::vector<Share> predicted = prediction_.shares(place);
    const bool is_predicted = settings_.only_long_matches && !prediction_.is_empty();
    if (is_predicted && !prediction_.replaces_model(place, settings_.num_beams)) predicted.clear();
    const double left = 1.0 - sum_of(predicted);
    Shares found{ShareList(std::move(predicted)), left};
    if (!is_predicted) count_shares(tail, found);
    return found;
}

void NGramDrafter::count_shares(IntSpan tail, Shares& found) const {
    const auto of_pool = pool_ ? pool_->counts() : std::array<const NGramCounts*, 2>{};
    const Keys keys = keys_of(tail);
    for (const auto& [length, doubt] : DOUBTS) {
        if (found.left < LEAST_LEFT) break;
        if (length > tail.size()) continue;
        if (settings_.only_long_matches && length < LONG_MATCH && found.listed.list.empty()) break;
        for (const NGramCounts* table : {&own_, of_pool[0], of_pool[1]}) {
            const auto* following = table ? table->find(keys[length]) : nullptr;
            if (!following) continue;
            std::int64_t count = following->first.second;
            for (const auto& other : following->others) count += other.second;
            const auto total = static_cast<double>(count);
            const auto num_distinct = static_cast<double>(following->others.size() + 1);
            const double share = found.left * total / (total + doubt * num_distinct);
            found.left -= share;
            const auto add = [&](const auto& seen) {
                found.listed.add(seen.first, share * static_cast<double>(seen.second) / total);
            };
            add(following->first);
            std::for_each(following->others.begin(), following->others.end(), add);
        }
    }
}

}  // namespace dsbd
