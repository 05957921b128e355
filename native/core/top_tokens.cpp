// The most probable tokens after every committed path, and the log-probabilities of a prompt.
#include "top_tokens.hpp"

#include <algorithm>
#include <string>

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

TopTokens::TopTokens(std::size_t num_tokens, const Forest& forest, const Hypotheses& hypotheses)
    : number(num_tokens),
      forest_(forest),
      hypotheses_(hypotheses),
      tokens_(num_tokens),
      logprobs_(num_tokens) {}

void TopTokens::append(const Logits& logits) {
    for (std::size_t row = 0; row < logits.num_rows; ++row) {
        const std::size_t first = tokens_.size();
        tokens_.resize(first + number);
        logprobs_.resize(first + number);
        top_logprobs_of(logits, row, number, &tokens_[first], &logprobs_[first]);
    }
}

void TopTokens::keep(std::span<const std::int64_t> slots) {
    Ints tokens(number);
    Floats logprobs(number);
    const auto size = static_cast<std::ptrdiff_t>(number);
    for (const auto slot : slots) {
        const auto begin = slot * size;
        tokens.insert(tokens.end(), tokens_.begin() + begin, tokens_.begin() + begin + size);
        logprobs.insert(logprobs.end(), logprobs_.begin() + begin, logprobs_.begin() + begin + size);
    }
    tokens_.swap(tokens);
    logprobs_.swap(logprobs);
}

void TopTokens::observe(const Beams& beams) {
    for (std::size_t beam = 0; beam < beams.nodes.size(); ++beam) {
        const auto slot = forest_.slot(Role::target, beams.nodes[beam]);
        const auto entry = beams.hypotheses[beam];
        if (slot <= 0 || kept_.contains(entry)) continue;
        TokenLogprobs& found = kept_[entry];
        const std::size_t first = static_cast<std::size_t>(slot) * number;
        for (std::size_t i = first; i < first + number; ++i) {
            found.emplace_back(tokens_[i], logprobs_[i]);
        }
    }
}

std::vector<TokenLogprobs> TopTokens::of(std::span<const std::int64_t> entries) const {
    std::vector<TokenLogprobs> found;
    for (const auto entry : entries) {
        const auto index = static_cast<std::size_t>(entry);
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

void top_logprobs_of(const Logits& logits, std::size_t row, std::size_t number,
                     std::int64_t* tokens, double* logprobs) {
    const double normalizer = log_normalizer(logits, row);
    if (num_most_probable(logits, number) < number) {  // a top-k head has returned fewer
        largest_logits(whole_row(logits, row), number, tokens, logprobs);
    } else {
        most_probable(logits, row, number, tokens, logprobs);
    }
    for (std::size_t i = 0; i < number; ++i) logprobs[i] -= normalizer;
}

PromptScorer::PromptScorer(std::span<const std::int64_t> prompt_ids, std::size_t num_top)
    : prompt_ids_(prompt_ids.begin(), prompt_ids.end()), num_top_(num_top) {
    found_.token_logprobs.emplace_back();
    if (num_top_) found_.top_logprobs.emplace_back();
}

void PromptScorer::append(const Logits& logits) {
    check_largest(logits);
    Ints tokens(num_top_);
    Floats logprobs(num_top_);
    for (std::size_t row = 0; row < logits.num_rows; ++row) {
        const std::int64_t token = prompt_ids_.at(found_.token_logprobs.size());
        const double logit = whole_row(logits, row)[static_cast<std::size_t>(token)];
        const double logprob = logit - log_normalizer(logits, row);
        found_.token_logprobs.emplace_back(logprob);
        if (!num_top_) continue;
        top_logprobs_of(logits, row, num_top_, tokens.data(), logprobs.data());
        TokenLogprobs top;
        for (std::size_t i = 0; i < num_top_; ++i) top.emplace_back(tokens[i], logprobs[i]);
        found_.top_logprobs.emplace_back(with_own(std::move(top), token, logprob));
    }
}

}  // namespace dsbd
