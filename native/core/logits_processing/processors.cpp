// Logits processors: penalties, bans and biases, as functions of the path.
#include "logits_processing/processors.hpp"

#include <cmath>
#include <map>

#include "exponentials.hpp"
#include "numbers.hpp"

namespace dsbd {
namespace {

using Scores = std::span<double>;

/// Forbid tokens, if the number of new tokens of a path is in a range.
LogitsProcessor ban(Ints tokens, std::size_t begin = 0, std::size_t end = SIZE_MAX) {
    return {[=](Scores scores, const Candidates& candidates) {
        const std::size_t num_new = candidates.paths.num_new(candidates.node);
        if (num_new < begin || num_new >= end) return;
        for (const auto token : tokens) candidates.ban(token, scores);
    }};
}

/// Add a constant to some tokens.
LogitsProcessor bias(std::span<const std::pair<std::int64_t, double>> bias_by_token) {
    std::map<std::int64_t, double> sums;
    bool raises = false;
    for (const auto& [token, added] : bias_by_token) {
        sums[token] += added;
        raises |= added > 0.0;
    }
    const auto process = [=](Scores scores, const Candidates& candidates) {
        for (const auto& [token, added] : sums) {
            if (const auto place = candidates.place(token)) scores[*place] += added;
        }
    };
    return {process, [=](const Candidates&) { return raises; }};
}

/// Divide positive scores of tokens that prompt or path hold by the penalty, multiply negative
/// ones.
///
/// Keskar et al. 2019 (CTRL), section 4.1.
LogitsProcessor repetition_penalty(double penalty) {
    const auto process = [=](Scores scores, const Candidates& candidates) {
        for (const auto& seen : candidates.seen()) {
            double& score = scores[seen.place];
            score = score < 0.0 ? score * penalty : score / penalty;
        }
    };
    return {process, [=](const Candidates&) { return penalty < 1.0; }};
}

/// Subtract `presence` from tokens among the new ones, `frequency` for each time.
LogitsProcessor count_penalty(double presence, double frequency) {
    const auto process = [=](Scores scores, const Candidates& candidates) {
        for (const auto& seen : candidates.seen()) {
            if (!seen.new_count) continue;
            scores[seen.place] -= presence + frequency * static_cast<double>(seen.new_count);
        }
    };
    return {process, [=](const Candidates&) { return presence < 0.0 || frequency < 0.0; }};
}

/// The tokens that followed each (n-1)-gram of a text.
class NextTokens {
public:
    explicit NextTokens(std::size_t size) : size_(size) {}
    /// Learn a text that continues the one that was learned before.
    void learn(IntSpan tokens, std::size_t vocab_size) {
        for (std::size_t end = std::max(num_known_, size_ - 1); end < tokens.size(); ++end) {
            const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(end + 1 - size_);
            const std::int64_t token = tokens[end];
            if (at(token) >= vocab_size) continue;  // no target has it
            next_tokens_[Ints(begin, begin + static_cast<std::ptrdiff_t>(size_ - 1))].push_back(
                token);
        }
        num_known_ = std::max(num_known_, tokens.size());
    }
    void ban(const Ints& begun, Scores scores, const Candidates& candidates) const {
        const auto found = next_tokens_.find(begun);
        if (found == next_tokens_.end()) return;
        for (const auto token : found->second) candidates.ban(token, scores);
    }

private:
    std::size_t size_, num_known_ = 0;
    std::map<Ints, Ints> next_tokens_;
};

/// Forbid the token that would make an n-gram which prompt and path hold already.
///
/// The tokens after each (n-1)-gram of the shared ones are kept in a table; the own tokens of a
/// path are few, and searched.
LogitsProcessor no_repeat_ngram(std::size_t size) {
    return {[size, known = NextTokens(size)](Scores scores, const Candidates& candidates) mutable {
        const PathTokens& paths = candidates.paths;
        known.learn(paths.shared, candidates.vocab_size);
        const std::size_t num_own = paths.own(candidates.node).size();
        const Ints recent = paths.tail(candidates.node, num_own + size - 1);
        if (recent.size() < size - 1) return;
        const Ints begun(recent.end() - static_cast<std::ptrdiff_t>(size - 1), recent.end());
        known.ban(begun, scores, candidates);
        for (std::size_t first = 0; first + size <= recent.size(); ++first) {
            const auto begin = recent.begin() + static_cast<std::ptrdiff_t>(first);
            if (std::equal(begun.begin(), begun.end(), begin)) {
                candidates.ban(recent[first + size - 1], scores);
            }
        }
    }};
}

/// Forbid the token that would make an n-gram of the source, or of the prompt without one.
LogitsProcessor no_source_ngram(std::size_t size, IntSpan source, std::size_t vocab_size) {
    NextTokens known(size);
    known.learn(source, vocab_size);
    return {[size, known = std::move(known)](Scores scores, const Candidates& candidates) {
        known.ban(candidates.paths.tail(candidates.node, size - 1), scores, candidates);
    }};
}

/// Forbid the last token of a sequence of several if the path ends with those before it.
LogitsProcessor bad_words(std::vector<Ints> sequences) {
    return {[sequences = std::move(sequences)](Scores scores, const Candidates& candidates) {
        for (const Ints& sequence : sequences) {
            const Ints tail = candidates.paths.tail(candidates.node, sequence.size() - 1);
            const bool is_begun = tail.size() == sequence.size() - 1 &&
                                  std::equal(tail.begin(), tail.end(), sequence.begin());
            if (is_begun) candidates.ban(sequence.back(), scores);
        }
    }};
}

/// Allow one token alone, with score 0, if a path has a certain length, the prompt included.
LogitsProcessor forced_token(std::int64_t token, std::size_t num_tokens) {
    const auto is_due = [=](const Candidates& candidates) {
        const PathTokens& paths = candidates.paths;
        return paths.num_new(candidates.node) + paths.num_prompt == num_tokens;
    };
    const auto process = [=](Scores scores, const Candidates& candidates) {
        if (!is_due(candidates)) return;
        std::ranges::fill(scores, LOG_ZERO);
        if (const auto place = candidates.place(token)) scores[*place] = 0.0;
    };
    return {process, is_due};
}

/// Whisper's rules for times, which are the tokens after `<|notimestamps|>`.
///
/// They come in pairs, except the first of a path and one before its end, and never decrease; a
/// path begins with one. If all times together are more probable than the most probable other
/// token, one of them follows (Radford et al. 2022, section 3.8 and their code).
class Timestamps {
public:
    explicit Timestamps(const DecodingConfig& config)
        : first_(*config.no_timestamps_token_id + 1),
          max_initial_index_(config.max_initial_timestamp_index),
          end_(*config.no_timestamps_token_id) {
        if (config.last_timestamp_token_id) stop_ = *config.last_timestamp_token_id + 1;
        if (config.eos_token_id && !config.eos_token_id->empty()) {
            end_ = std::ranges::min(*config.eos_token_id);
        }
    }
    void operator()(Scores scores, const Candidates& candidates) const {
        forbid(candidates, scores);
        prefer_times(candidates, scores);
    }

private:
    /// The scores of tokens `begin` to `end - 1`; no end: of all from there.
    static Scores between(const Candidates& candidates, Scores scores, std::int64_t begin,
                          std::optional<std::int64_t> end) {
        const std::size_t first = candidates.first_from(begin);
        const std::size_t last = end ? candidates.first_from(*end) : candidates.size();
        return scores.subspan(first, last > first ? last - first : 0);
    }
    void forbid(const Candidates& candidates, Scores scores) const {
        const auto ban = [&](std::int64_t begin, std::optional<std::int64_t> end) {
            std::ranges::fill(between(candidates, scores, begin, end), LOG_ZERO);
        };
        ban(first_ - 1, first_);
        const Ints new_tokens =
            candidates.paths.tail(candidates.node, candidates.paths.num_new(candidates.node));
        if (new_tokens.empty()) {
            ban(0, first_);
            if (stop_) ban(*stop_, std::nullopt);
            if (max_initial_index_) ban(first_ + *max_initial_index_ + 1, std::nullopt);
            return;
        }
        const auto is_time = [&](std::int64_t token) {
            return token >= first_ && (!stop_ || token < *stop_);
        };
        const std::size_t size = new_tokens.size();
        const bool is_after_time = is_time(new_tokens.back());
        const bool is_after_pair = is_after_time && (size == 1 || is_time(new_tokens[size - 2]));
        if (is_after_pair) {
            ban(first_, stop_);
        } else if (is_after_time) {
            ban(0, end_);
            if (stop_) ban(*stop_, std::nullopt);
        }
        const auto last = std::find_if(new_tokens.rbegin(), new_tokens.rend(), is_time);
        if (last == new_tokens.rend()) return;  // the second of a pair may be as the first
        ban(first_, *last + (!is_after_time || is_after_pair));
    }
    /// Leave the times alone if they are more probable than every other token.
    void prefer_times(const Candidates& candidates, Scores scores) const {
        const Scores times = between(candidates, scores, first_, stop_);
        const double largest = largest_of(times);
        if (largest == LOG_ZERO) return;
        Floats terms(times.begin(), times.end());
        for (double& term : terms) term -= largest;
        exp_of(terms.data(), terms.size(), terms.data());
        const double together = largest + std::log(pairwise_sum(terms));
        const Scores before = between(candidates, scores, 0, first_);
        const Scores after = stop_ ? between(candidates, scores, *stop_, std::nullopt) : Scores();
        if (!(together > std::max(largest_of(before), largest_of(after)))) return;
        std::ranges::fill(before, LOG_ZERO);
        std::ranges::fill(after, LOG_ZERO);
    }
    static double largest_of(Scores scores) {
        return scores.empty() ? LOG_ZERO : std::ranges::max(scores);
    }

    std::int64_t first_;
    std::optional<std::int64_t> stop_;  // tokens from there on are those of texts
    std::optional<std::int64_t> max_initial_index_;
    std::int64_t end_;  // below it are tokens of texts
};

}  // namespace

std::vector<LogitsProcessor> processors_of(const DecodingConfig& config, std::size_t num_prompt,
                                           std::size_t vocab_size, IntSpan source) {
    std::vector<LogitsProcessor> found;
    const auto add = [&](LogitsProcessor each) { found.push_back(std::move(each)); };
    if (!config.logit_bias.empty()) add(bias(config.logit_bias));
    if (config.repetition_penalty != 1.0) add(repetition_penalty(config.repetition_penalty));
    if (config.presence_penalty != 0.0 || config.frequency_penalty != 0.0) {
        add(count_penalty(config.presence_penalty, config.frequency_penalty));
    }
    if (config.no_repeat_ngram_size) add(no_repeat_ngram(config.no_repeat_ngram_size));
    if (const std::size_t size = config.encoder_no_repeat_ngram_size) {
        add(no_source_ngram(size, source, vocab_size));
    }
    Ints words;
    std::vector<Ints> sequences;
    for (const Ints& word : config.bad_words_ids) {
        if (word.size() == 1) words.push_back(word[0]);
        if (word.size() > 1) sequences.push_back(word);
    }
    if (!words.empty()) add(ban(words));
    if (!sequences.empty()) add(bad_words(std::move(sequences)));
    if (config.min_new_tokens && config.eos_token_id && !config.eos_token_id->empty()) {
        add(ban(*config.eos_token_id, 0, config.min_new_tokens));
    }
    if (config.forced_bos_token_id) add(forced_token(*config.forced_bos_token_id, 1));
    if (config.forced_eos_token_id) {
        add(forced_token(*config.forced_eos_token_id, num_prompt + config.max_new_tokens - 1));
    }
    if (!config.suppress_tokens.empty()) add(ban(config.suppress_tokens));
    if (!config.begin_suppress_tokens.empty()) {
        const std::size_t first = config.forced_bos_token_id && num_prompt == 1;
        add(ban(config.begin_suppress_tokens, first, first + 1));
    }
    // Every time counts, also one that a top-k head has left out.
    const auto may_raise = [](const Candidates&) { return true; };
    if (config.no_timestamps_token_id) add({Timestamps(config), may_raise});
    return found;
}

}  // namespace dsbd
