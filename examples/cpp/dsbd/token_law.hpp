// Logits to warped next-token laws: temperature, then top-k, then top-p, renormalised.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "error.hpp"
#include "step_model.hpp"

namespace dsbd {

/// The next-token law of one position.
struct TokenLaw {
    std::vector<std::int64_t> tokens;     // the top_k by decreasing logit, ties by id; or all by id
    std::vector<double> log_probs;        // warped; -inf where top-p has cut
    std::vector<double> raw_log_probs;    // unwarped, over the whole vocabulary
};

/// The warping of a request: `top_k` 0 and `top_p` 1 switch a stage off. With `is_raw` laws are the
/// raw ones: top-k then only bounds how many tokens are looked at.
struct Warp {
    double temperature = 1.0;
    std::size_t top_k = 0;
    double top_p = 1.0;
    bool is_raw = false;
};

/// The tokens of a law before its warping.
struct CentredLogits {
    std::vector<std::int64_t> tokens;
    std::vector<double> values;     // logits less the row's largest
    double log_normalizer = 0.0;    // log of the sum of exp of such differences over all tokens
};

inline CentredLogits centred_of_logits(const float* logits, std::size_t vocab_size,
                                       std::size_t top_k) {
    const float largest = *std::max_element(logits, logits + vocab_size);
    CentredLogits centred;
    centred.tokens.resize(vocab_size);
    std::iota(centred.tokens.begin(), centred.tokens.end(), std::int64_t{0});
    if (top_k != 0) {
        const std::size_t num_kept = std::min(top_k, vocab_size);
        const auto is_before = [logits](std::int64_t a, std::int64_t b) {
            return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
        };
        std::partial_sort(centred.tokens.begin(),
                          centred.tokens.begin() + static_cast<std::ptrdiff_t>(num_kept),
                          centred.tokens.end(), is_before);
        centred.tokens.resize(num_kept);
    }
    for (const std::int64_t token : centred.tokens) {
        centred.values.push_back(double{logits[token]} - double{largest});
    }
    double sum = 0.0;
    for (std::size_t token = 0; token < vocab_size; ++token) {
        sum += std::exp(logits[token] - largest);
    }
    centred.log_normalizer = std::log(sum);
    return centred;
}

/// The tokens of a constraint alone; the others still count in the normalizer.
inline CentredLogits centred_of_allowed(const float* logits, std::size_t vocab_size,
                                        std::size_t top_k,
                                        const std::vector<std::int64_t>& allowed) {
    CentredLogits all = centred_of_logits(logits, vocab_size, 1);
    const double largest = logits[all.tokens[0]];
    CentredLogits centred;
    centred.tokens = allowed;
    std::stable_sort(centred.tokens.begin(), centred.tokens.end(),
                     [logits](std::int64_t a, std::int64_t b) { return logits[a] > logits[b]; });
    if (top_k != 0) {
        centred.tokens.resize(std::min(top_k, centred.tokens.size()));
    }
    const double largest_allowed = logits[centred.tokens.at(0)];
    for (const std::int64_t token : centred.tokens) {
        centred.values.push_back(double{logits[token]} - largest_allowed);
    }
    centred.log_normalizer = all.log_normalizer + largest - largest_allowed;
    return centred;
}

/// top_k: at least 1, at most `num_candidates`.
inline CentredLogits centred_of_candidates(const float* logits, const std::int64_t* ids,
                                           float logsumexp, std::size_t top_k) {
    CentredLogits centred;
    centred.tokens.assign(ids, ids + top_k);
    for (std::size_t i = 0; i < top_k; ++i) {
        centred.values.push_back(double{logits[i]} - double{logits[0]});
    }
    centred.log_normalizer = double{logsumexp} - double{logits[0]};
    return centred;
}

/// Subtract the log of the sum of exponentials.
inline void log_normalise(std::vector<double>& scores) {
    double sum = 0.0;
    for (const double score : scores) {
        sum += std::exp(score);
    }
    const double log_sum = std::log(sum);
    for (double& score : scores) {
        score -= log_sum;
    }
}

/// Set all but the smallest set of most probable tokens that reaches `top_p` to -inf.
inline void cut_top_p(std::vector<double>& log_probs, double top_p) {
    std::vector<std::size_t> order(log_probs.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&log_probs](std::size_t a, std::size_t b) {
        return log_probs[a] > log_probs[b];
    });
    double cumulative = 0.0;
    for (std::size_t place = 0; place < order.size(); ++place) {
        const double probability = std::exp(log_probs[order[place]]);
        cumulative += probability;
        if (place > 0 && cumulative - probability >= top_p) {  // the mass before this token
            log_probs[order[place]] = -std::numeric_limits<double>::infinity();
        }
    }
}

/// Return the warped law of a row's logits.
inline std::vector<double> warped(std::vector<double> centred, const Warp& warp) {
    for (double& value : centred) {
        value /= warp.temperature;
    }
    log_normalise(centred);
    if (warp.top_p < 1.0) {
        cut_top_p(centred, warp.top_p);
        log_normalise(centred);
    }
    return centred;
}

/// Return the law of row `row` of what a model returned, over the `allowed` tokens if given.
inline TokenLaw token_law(const HeadOutput& head, std::size_t row, const Warp& warp,
                          const std::optional<std::vector<std::int64_t>>& allowed) {
    const std::size_t first = row * head.row_size;
    CentredLogits centred =
        allowed ? centred_of_allowed(&head.logits[first], head.row_size, warp.top_k, *allowed)
        : head.ids.empty()
            ? centred_of_logits(&head.logits[first], head.row_size, warp.top_k)
            : centred_of_candidates(&head.logits[first], &head.ids[first], head.logsumexp[row],
                                    warp.top_k);
    if (!std::isfinite(centred.log_normalizer)) {
        throw Error(
            "the model returned logits that are not finite; check the engine's precision and the "
            "export's parity report");
    }
    std::vector<double> raw_log_probs = centred.values;
    for (double& log_prob : raw_log_probs) {
        log_prob -= centred.log_normalizer;
    }
    std::vector<double> log_probs =
        warp.is_raw ? raw_log_probs : warped(std::move(centred.values), warp);
    return {std::move(centred.tokens), std::move(log_probs), std::move(raw_log_probs)};
}

}  // namespace dsbd
