// Distributions over more tokens than a top-k head returns, from its K logits if these suffice.
#include "beyond_top_k.hpp"

#include <cmath>

#include "exponentials.hpp"
#include "logits.hpp"
#include "numbers.hpp"

namespace dsbd {
namespace {

constexpr double PRECISION = 1e-5;  // of a head's log-normalizer, times the largest logit, as the
                                    // export demands
constexpr double NEAR = 1e-9;  // a cut this near to a token's mass, relatively, is settled by the
                               // whole row
constexpr std::size_t NUMBERS[] = {256, 4096};  // of largest logits, of a row that is read whole

/// A row at hand, and its arrays.
struct Row {
    Ints tokens;
    Floats scores, log_probs, raw_log_probs;
    double normalizer;

    void resize(std::size_t size) {
        tokens.resize(size);
        scores.resize(size);
        log_probs.resize(size);
    }
    /// Warp the scores less the largest.
    void warp_centred(const Warp& warp) {
        const double largest = *std::max_element(scores.begin(), scores.end());
        for (std::size_t i = 0; i < scores.size(); ++i) log_probs[i] = scores[i] - largest;
        warp.warp(log_probs);
    }
    void append_to(TokenDistributions& known) {
        raw_log_probs.resize(scores.size());
        for (std::size_t i = 0; i < scores.size(); ++i) raw_log_probs[i] = scores[i] - normalizer;
        known.add_listed(tokens, log_probs, raw_log_probs);
    }
    /// Append tokens of largest logits in the order of whole rows, which is that of the ids.
    void append_by_id_to(TokenDistributions& known) {
        Columns order;
        count_up(order, tokens.size());
        std::ranges::sort(order, {}, [&](std::uint32_t i) { return tokens[i]; });
        Row found;
        found.normalizer = normalizer;
        for (const auto i : order) {
            if (log_probs[i] == LOG_ZERO) continue;
            found.tokens.push_back(tokens[i]);
            found.scores.push_back(scores[i]);
            found.log_probs.push_back(log_probs[i]);
        }
        found.append_to(known);
    }
};

struct MassBounds {
    double least, most;
};

/// Return bounds of the mass of all tokens except the K, if the most probable one weighs 1.
///
/// At temperature 1 their mass M is what the log-normalizer leaves, and none of them weighs more
/// than w, the last of the K. With weights to the power 1 / T their mass is M * w ** (1 / T - 1) if
/// as few as can be have all of M, and n ** (1 - 1 / T) * M ** (1 / T) if all n have as much: in a
/// colder distribution the upper and the lower bound, in a hotter one the other way round.
MassBounds mass_of_others(double temperature, FloatSpan scores, double normalizer,
                          std::size_t vocab_size) {
    static thread_local Floats masses;
    masses.resize(scores.size());
    for (std::size_t i = 0; i < scores.size(); ++i) masses[i] = scores[i] - scores[0];
    double last = masses.back();
    exp_of(masses.data(), masses.size(), masses.data());
    const double whole = std::exp(normalizer - scores[0]), known = pairwise_sum(masses);
    const double error = whole * PRECISION * (1.0 + std::abs(scores[0]));
    double least = std::max(whole - known - error, 0.0);
    double most = std::max(whole - known + error, 0.0);
    if (last == LOG_ZERO) least = most = last = 0.0;  // the others are impossible too
    const double power = 1.0 / temperature;
    const auto num_others =
        vocab_size > scores.size() ? static_cast<double>(vocab_size - scores.size()) : 1.0;
    const double of_few = std::exp(last * (power - 1.0));
    const double of_all = std::pow(num_others, 1.0 - power);
    if (power >= 1.0) return {of_all * numpy_power(least, power), of_few * most};
    return {of_few * least,
            std::min(num_others * std::exp(last * power), of_all * numpy_power(most, power))};
}

/// Write warped log-probabilities of the K largest logits, -inf if one is cut; return whether they
/// are right. scores: (K,) by decreasing logit. normalizer: at temperature 1, of all V logits.
bool settled(const Warp& warp, FloatSpan scores, double normalizer, std::size_t vocab_size,
             std::span<double> log_probs) {
    if (!warp.cuts()) return false;
    const std::size_t size = scores.size();
    for (std::size_t i = 0; i < size; ++i)
        log_probs[i] = (scores[i] - scores[0]) / warp.temperature;
    bool is_settled;
    if (warp.top_p < 1.0) {
        static thread_local Floats masses;
        masses.resize(size);
        exp_of(log_probs.data(), size, masses.data());
        double whole = 0.0;
        for (const double mass : masses) whole += mass;
        auto others = mass_of_others(warp.temperature, scores, normalizer, vocab_size);
        if (warp.top_k) others.least = 0.0;  // of which but a few count
        const double least = warp.top_p * (whole + others.least) * (1.0 - NEAR);
        const double most = warp.top_p * (whole + others.most) * (1.0 + NEAR);
        is_settled = whole >= most;
        double sum = masses[0];
        for (std::size_t i = 1; i < size; ++i) {
            sum += masses[i];
            const double before = sum - masses[i];
            is_settled &= (before < least) == (before < most);
            if (!(before < least)) log_probs[i] = LOG_ZERO;
        }
    } else {
        is_settled = log_probs[size - 1] < std::log(warp.min_p) - NEAR;
    }
    Warp rest = warp;
    rest.temperature = rest.top_p = 1.0;
    rest.warp(log_probs);
    return is_settled;
}

/// Append the distribution of a whole row.
void append_whole(const Warp& warp, std::span<const float> logits, Row& row,
                  TokenDistributions& known) {
    const std::size_t vocab_size = logits.size();
    if (warp.top_k) {
        row.resize(std::min(warp.top_k, vocab_size));
        largest_logits(logits, row.tokens.size(), row.tokens.data(), row.scores.data());
        row.warp_centred(warp);
        return row.append_to(known);
    }
    for (const std::size_t number : NUMBERS) {
        if (number >= vocab_size) break;
        row.resize(number);
        largest_logits(logits, number, row.tokens.data(), row.scores.data());
        if (settled(warp, row.scores, row.normalizer, vocab_size, row.log_probs)) {
            return row.append_by_id_to(known);
        }
    }
    row.resize(vocab_size);
    std::iota(row.tokens.begin(), row.tokens.end(), std::int64_t{0});
    std::copy(logits.begin(), logits.end(), row.scores.begin());
    row.warp_centred(warp);
    row.append_to(known);
}

}  // namespace

void append_beyond_top_k(const Warp& warp, const Logits& logits, TokenDistributions& known) {
    static thread_local Row row;
    const bool is_dense = !warp.top_k && !warp.cuts();
    for (std::size_t index = 0; index < logits.num_rows; ++index) {
        row.normalizer = log_normalizer(logits, index);
        if (is_dense) {
            const float largest = logits.top_logits[index * logits.num_top];
            known.add_dense(full_row(logits, index), largest, row.normalizer);
            continue;
        }
        row.resize(logits.num_top);
        most_probable(logits, index, 0, row.tokens.data(), row.scores.data());
        if (!settled(warp, row.scores, row.normalizer, logits.vocab_size, row.log_probs)) {
            append_whole(warp, full_row(logits, index), row, known);
        } else if (warp.top_k) {
            row.append_to(known);
        } else {
            row.append_by_id_to(known);
        }
    }
}

}  // namespace dsbd
