// The most probable tokens after every committed path, and the log-probabilities of a prompt.
#include "top_tokens.hpp"

#include "beams.hpp"
#include "error.hpp"
#include "forest.hpp"
#include "logits.hpp"
#include "numbers.hpp"

namespace dsbd {
namespace {

/// Return pairs in which token `own` has `logprob` to the last bit.
TokenLogprobs with_own(TokenLogprobs found, std::int64_t own, double logprob) {
    for (auto& [token, value] : found) {
        if (token == own) value = logprob;
    }
    return found;
}

/// Return all logits of a row; Error: they cannot be read.
std::span<const float> whole_row(const Logits& logits, std::size_t row) {
    if (has_full(logits)) return full_row(logits, row);
    throw Error("log-probabilities of " + std::to_string(logits.num_rows) +
                " rows are needed that the target's top-k head has left out, and it keeps no "
                "others; lower top_logprobs, or export the bundle again");
}

}  // namespace

void TopTokens::append(const Logits& logits) {
    for (std::size_t row = 0; row < logits.num_rows; ++row) {
        by_slot_.push_back(top_logprobs_of(logits, row, number));
    }
}

void TopTokens::keep(IntSpan slots) {
    std::vector<TokenLogprobs> kept = entries_at(by_slot_, slots);
    kept.emplace(kept.begin());
    by_slot_ = std::move(kept);
}

void TopTokens::observe(const Beams& beams) {
    for (std::size_t beam = 0; beam < beams.nodes.size(); ++beam) {
        const auto slot = forest_.slot(Role::target, beams.nodes[beam]);
        if (slot > 0) kept_.emplace(beams.hypotheses[beam], by_slot_[at(slot)]);
    }
}

std::vector<TokenLogprobs> TopTokens::of(IntSpan entries) const {
    std::vector<TokenLogprobs> found;
    for (const auto entry : entries) {
        const auto index = at(entry);
        found.push_back(with_own(kept_.at(hypotheses_.parents[index]), hypotheses_.tokens[index],
                                 hypotheses_.token_logprobs[index]));
    }
    return found;
}

void check_top_logprobs(const EngineSpec& target, const DecodingConfig& config) {
    const std::size_t most = target.num_top_logits;
    if (!most || target.keeps_full_logits) return;
    const std::string number = std::to_string(most);
    const std::string returns =
        "but the target's engine returns the " + number + " largest logits of a position";
    if (config.top_logprobs > most) {
        throw Error("top_logprobs is " + std::to_string(config.top_logprobs) + ", " + returns +
                    " and keeps no others; use at most " + number +
                    ", or export again, where --logits topk keeps them all");
    }
    if (config.prompt_logprobs) {
        throw Error("prompt_logprobs is True, " + returns +
                    ", which may lack the prompt's own tokens; leave it out, or export again, "
                    "where --logits topk keeps them all (or with --logits full)");
    }
}

TokenLogprobs top_logprobs_of(const Logits& logits, std::size_t row, std::size_t number) {
    const double normalizer = log_normalizer(logits, row);
    Ints tokens(number);
    Floats scores(number);
    if (num_most_probable(logits, number) < number) {  // a top-k head has returned fewer
        largest_logits(whole_row(logits, row), number, tokens.data(), scores.data());
    } else {
        most_probable(logits, row, number, tokens.data(), scores.data());
    }
    TokenLogprobs found;
    for (std::size_t i = 0; i < number; ++i) found.emplace_back(tokens[i], scores[i] - normalizer);
    return found;
}

PromptScorer::PromptScorer(IntSpan prompt_ids, std::size_t num_top)
    : prompt_ids_(prompt_ids.begin(), prompt_ids.end()), num_top_(num_top) {
    found_.token_logprobs.emplace_back();
    if (num_top_) found_.top_logprobs.emplace_back();
}

void PromptScorer::append(const Logits& logits) {
    check_largest(logits);
    for (std::size_t row = 0; row < logits.num_rows; ++row) {
        const std::int64_t token = prompt_ids_.at(found_.token_logprobs.size());
        const double logit = whole_row(logits, row)[at(token)];
        const double logprob = logit - log_normalizer(logits, row);
        found_.token_logprobs.emplace_back(logprob);
        if (!num_top_) continue;
        found_.top_logprobs.emplace_back(
            with_own(top_logprobs_of(logits, row, num_top_), token, logprob));
    }
}

}  // namespace dsbd
