// Distributions of a request with processors or a constraint.
#include "logits_processing/request_processing.hpp"

#include <cmath>

#include "error.hpp"
#include "logits.hpp"

namespace dsbd {
namespace {

constexpr std::size_t MOST_SHOWN = 80;  // characters of a value in a message

Ints sorted_eos(const DecodingConfig& config) {
    Ints ids = config.eos_token_id.value_or(Ints{});
    std::ranges::sort(ids);
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
}

template <class T>
void reorder(std::vector<T>& entries, const Columns& order) {
    static thread_local std::vector<T> found;
    found.clear();
    for (const auto place : order) found.push_back(entries[place]);
    entries.swap(found);
}

}  // namespace

RequestProcessing::RequestProcessing(const DecodingConfig& config, const Constraint* constraint,
                                     IntSpan prompt_ids, std::size_t vocab_size,
                                     std::optional<IntSpan> source)
    : warp_(Warp::of(config)),
      processes_log_probs_(warp_.is_raw && config.num_beams > 1),
      processors_(
          processors_of(config, prompt_ids.size(), vocab_size, source.value_or(prompt_ids))),
      paths_(prompt_ids, vocab_size) {
    if (constraint) constraint_.emplace(*constraint, prompt_ids, sorted_eos(config));
}

std::vector<PathStates*> RequestProcessing::path_states() {
    std::vector<PathStates*> found{&paths_};
    if (constraint_) found.push_back(&*constraint_);
    return found;
}

void RequestProcessing::append(const Logits& logits, IntSpan nodes, bool is_draft,
                               TokenDistributions& known) {
    std::vector<AllowedAfter> allowed;
    for (const auto node : nodes) allowed.push_back(allowed_after(node));
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        const Row row{logits, i, nodes[i], allowed[i], log_normalizer(logits, i), is_draft};
        const bool reads_all = logits.values || (allowed[i].is_listed && has_full(logits));
        if (reads_all || !append_top_row(row, known)) append_full_row(row, known);
    }
}

void RequestProcessing::append_full_row(const Row& row, TokenDistributions& known) {
    std::optional<IntSpan> listed;
    if (row.allowed.is_listed) {
        listed = row.allowed.tokens;
        scores_.resize(listed->size());
        read_logits(row.logits, row.index, *listed, scores_);
    } else {
        const auto logits = full_row(row.logits, row.index);
        scores_.assign(logits.begin(), logits.end());
        count_up(tokens_, logits.size());
    }
    process_scores({paths_, row.node, listed, vocab_size()}, row.normalizer);
    for (std::size_t i = 0; row.allowed.is_marked && i < scores_.size(); ++i) {
        if (!row.allowed.allows(tokens_[i])) scores_[i] = LOG_ZERO;
    }
    append_processed(listed.value_or(tokens_), known);
}

/// Read the tokens of a top-k head, by id, and their logits.
void RequestProcessing::read_top_row(const Row& row) {
    tokens_.resize(row.logits.num_top);
    scores_.resize(tokens_.size());
    most_probable(row.logits, row.index, 0, tokens_.data(), scores_.data());
    sort_by_token();
}

/// Sort the tokens, and the scores with them, by id; return where each was before.
Columns RequestProcessing::sort_by_token() {
    Columns order;
    count_up(order, tokens_.size());
    std::ranges::sort(order, {}, [&](std::uint32_t place) { return tokens_[place]; });
    reorder(tokens_, order);
    reorder(scores_, order);
    return order;
}

/// Replace the tokens by listed ones; a token that was left out has the least of the scores.
void RequestProcessing::look_up(const Ints& listed) {
    const double least = std::ranges::min(scores_);
    before_.clear();
    for (const auto token : listed) {
        const auto found = std::ranges::lower_bound(tokens_, token);
        const bool is_there = found != tokens_.end() && *found == token;
        before_.push_back(is_there ? scores_[static_cast<std::size_t>(found - tokens_.begin())]
                                   : least);
    }
    tokens_ = listed;
    scores_.swap(before_);
}

bool RequestProcessing::append_top_row(const Row& row, TokenDistributions& known) {
    const AllowedAfter& allowed = row.allowed;
    read_top_row(row);
    if (row.is_draft && allowed.is_listed) look_up(allowed.tokens);
    const Candidates candidates(paths_, row.node, tokens_, vocab_size());
    before_ = scores_;
    process_scores(candidates, row.normalizer);
    if (warp_.is_raw) before_ = raw_;
    const double least = before_.empty() ? LOG_ZERO : std::ranges::min(before_);
    std::size_t num_allowed = 0, num_sure = 0;
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
        if (allowed.allows(tokens_[i])) {
            ++num_allowed;
            num_sure += scores_[i] > least || (scores_[i] == least && before_[i] == least);
        } else {
            scores_[i] = LOG_ZERO;
        }
    }
    const std::size_t num_needed = warp_.top_k ? warp_.top_k : vocab_size();
    const bool is_complete = row.is_draft || num_allowed == allowed.num_of(vocab_size()) ||
                             (num_sure >= num_needed && !may_raise(candidates));
    if (!is_complete) {
        if (has_full(row.logits)) return false;
        std::ranges::fill(scores_, LOG_ZERO);
    }
    append_processed(tokens_, known);
    return true;
}

bool RequestProcessing::may_raise(const Candidates& candidates) const {
    return std::ranges::any_of(processors_,
                               [&](const auto& each) { return each.may_raise(candidates); });
}

/// Process scores, log-probabilities in a beam search; write raw log-probabilities.
void RequestProcessing::process_scores(const Candidates& candidates, double normalizer) {
    raw_.resize(scores_.size());
    std::ranges::transform(scores_, raw_.begin(), [&](double score) { return score - normalizer; });
    if (processes_log_probs_) scores_ = raw_;
    for (auto& processor : processors_) processor.process(scores_, candidates);
    if (warp_.is_raw && !processes_log_probs_) {
        for (double& score : scores_) score -= normalizer;
    }
}

/// Append the warped distribution over the candidates that can be drawn.
void RequestProcessing::append_processed(IntSpan tokens, TokenDistributions& known) {
    if (warp_.top_k) {
        static thread_local Columns best;
        largest_columns(FloatSpan(scores_), warp_.top_k, best);
        std::ranges::stable_sort(best, std::greater<>(),
                                 [&](std::uint32_t i) { return scores_[i]; });
        reorder(scores_, best);
        reorder(raw_, best);
        Ints chosen;
        for (const auto place : best) chosen.push_back(tokens[place]);
        tokens_ = std::move(chosen);
        tokens = tokens_;
    }
    if (!warp_.is_raw && !scores_.empty()) {
        const double largest = std::ranges::max(scores_);
        if (std::isfinite(largest)) {
            for (double& score : scores_) score -= largest;
            warp_.warp(scores_);
        }
    }
    known.add_listed(tokens, scores_, raw_);
}

AllowedAfter RequestProcessing::allowed_after(std::int64_t node) const {
    auto found = AllowedAfter::after(node, constraint_ ? &*constraint_ : nullptr);
    if (found.tokens.empty()) return found;
    const auto [lowest, highest] = std::ranges::minmax(found.tokens);
    if (lowest < 0 || at(highest) >= vocab_size()) {
        throw ConstraintError(constraint_->constraint.name() + " allows token ids from " +
                              std::to_string(lowest) + " to " + std::to_string(highest) +
                              "; expected 0 to " + std::to_string(vocab_size() - 1) +
                              ", the target's vocabulary");
    }
    return found;
}

bool RequestProcessing::ends_next(std::int64_t node, const AllowedAfter& allowed) const {
    if (!constraint_) return false;
    const auto state = constraint_->of(node);
    return (allowed.is_listed && allowed.num_listed == 0) ||
           constraint_->constraint.ends_next(state);
}

void RequestProcessing::process(std::int64_t node, IntSpan tokens, std::span<double> log_probs) {
    tokens_.assign(tokens.begin(), tokens.end());
    scores_.assign(log_probs.begin(), log_probs.end());
    const Columns order = sort_by_token();
    const Candidates candidates(paths_, node, tokens_, vocab_size());
    for (auto& processor : processors_) processor.process(scores_, candidates);
    const AllowedAfter allowed = allowed_after(node);
    for (std::size_t i = 0; i < order.size(); ++i) {
        log_probs[order[i]] = allowed.allows(tokens_[i]) ? scores_[i] : LOG_ZERO;
    }
}

void RequestProcessing::check_continues(IntSpan nodes, std::size_t num_candidates) const {
    for (const auto node : nodes) {
        if (!constraint_ || AllowedAfter::after(node, &*constraint_).count()) continue;
        throw ConstraintError(
            constraint_->constraint.name() + " neither accepts nor continues the new tokens " +
            new_tokens(node) +
            "; expected a token that may follow, or an end-of-sequence id where it "
            "accepts: change one of them");
    }
    if (num_candidates) return;
    throw ConstraintError(
        "processors and constraint leave no token to any beam, such as the one of the new tokens " +
        new_tokens(nodes[0]) + "; expected at least one: relax them");
}

std::string RequestProcessing::new_tokens(std::int64_t node) const {
    std::string text = "[";
    for (const auto token : paths_.tail(node, paths_.num_new(node))) {
        text += (text.size() > 1 ? ", " : "") + std::to_string(token);
    }
    text += "]";
    return text.size() <= MOST_SHOWN ? text : text.substr(0, MOST_SHOWN - 3) + "...";
}

}  // namespace dsbd
