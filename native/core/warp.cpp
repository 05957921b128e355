// From logits to distributions: temperature, top-k, top-p, renormalised per position.
#include "warp.hpp"

#include <cmath>
#include <limits>

#include "error.hpp"
#include "exponentials.hpp"
#include "numbers.hpp"

namespace dsbd {
namespace {

constexpr double NEAR = 1e-9;  // sums of the same probabilities that are this near may round to
                               // either side
constexpr std::size_t FIRST_TOKENS = 128;  // of a position that a search looks at before it knows
                                           // the best
constexpr std::size_t FEW = 256, MORE = 4096;  // tokens, tried before all are sorted

/// Sort columns by decreasing score, ties by column.
void sort_by(FloatSpan scores, Columns& columns) {
    std::sort(columns.begin(), columns.end(), [&](std::uint32_t a, std::uint32_t b) {
        return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
}

/// Leave the first columns, by decreasing probability, that reach `top_p`, increasing. Return
/// whether the others are known to be cut.
bool keep_first(FloatSpan log_probs, double top_p, Columns& columns) {
    static thread_local Floats probs;
    sort_by(log_probs, columns);
    probs.resize(columns.size());
    for (std::size_t i = 0; i < columns.size(); ++i) probs[i] = log_probs[columns[i]];
    exp_of(probs.data(), probs.size(), probs.data());
    double sum = 0.0;
    std::size_t num_kept = 0;
    for (std::size_t i = 0; i < columns.size() && sum < top_p + NEAR; ++i) {
        sum += probs[i];
        if (i == 0 || sum - probs[i] < top_p) columns[num_kept++] = columns[i];
    }
    columns.resize(num_kept);
    std::sort(columns.begin(), columns.end());
    return sum >= top_p + NEAR;
}

/// Find the smallest set of most probable tokens that reaches `top_p`.
void cut_top_p(FloatSpan log_probs, double top_p, Columns& kept) {
    for (const std::size_t number : {FEW, MORE}) {
        if (log_probs.size() < 4 * number) break;
        largest_columns(log_probs, number, kept);
        if (keep_first(log_probs, top_p, kept)) return;
    }
    count_up(kept, log_probs.size());
    keep_first(log_probs, top_p, kept);
}

/// Leave the tokens of at least a share of the most probable one's probability.
void cut_min_p(FloatSpan log_probs, double min_p, Columns& kept) {
    double largest = LOG_ZERO;
    for (const auto column : kept) largest = std::max(largest, log_probs[column]);
    const double least = largest + std::log(min_p);
    std::erase_if(kept, [&](std::uint32_t column) { return log_probs[column] < least; });
}

/// Leave the fewest tokens nearest to the entropy that reach `mass`, and those as near as the last.
void cut_typical(FloatSpan log_probs, double mass, Columns& kept) {
    static thread_local Floats probs, terms, distances;
    static thread_local Columns order;
    const std::size_t size = kept.size();
    for (auto* each : {&probs, &terms, &distances}) each->resize(size);
    for (std::size_t i = 0; i < size; ++i) probs[i] = log_probs[kept[i]];
    exp_of(probs.data(), size, probs.data());
    for (std::size_t i = 0; i < size; ++i) {
        terms[i] = probs[i] == 0.0 ? 0.0 : log_probs[kept[i]] * probs[i];
    }
    const double entropy = -row_sum(terms, kept);
    for (std::size_t i = 0; i < size; ++i) {
        distances[i] = std::abs(-log_probs[kept[i]] - entropy);
    }
    count_up(order, size);
    std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
        return distances[a] < distances[b] || (distances[a] == distances[b] && a < b);
    });
    double reached = 0.0;
    std::size_t last = 0;
    while (last < size && (reached += probs[order[last]]) < mass) ++last;
    if (last >= size) return;
    const double farthest = distances[order[last]];
    std::size_t num_kept = 0;
    for (std::size_t i = 0; i < size; ++i) {
        if (!(distances[i] > farthest)) kept[num_kept++] = kept[i];
    }
    kept.resize(num_kept);
}

/// Set all scores to -inf except those of some columns, increasing.
void leave(const Columns& kept, std::span<double> scores) {
    std::size_t next = 0;
    for (const auto column : kept) {
        std::fill(scores.begin() + static_cast<std::ptrdiff_t>(next), scores.begin() + column,
                  LOG_ZERO);
        next = column + 1;
    }
    std::fill(scores.begin() + static_cast<std::ptrdiff_t>(next), scores.end(), LOG_ZERO);
}

std::size_t num_eos(const DecodingConfig& config) {
    if (!config.eos_token_id) return 0;
    Ints ids = *config.eos_token_id;
    std::sort(ids.begin(), ids.end());
    return static_cast<std::size_t>(std::unique(ids.begin(), ids.end()) - ids.begin());
}

}  // namespace

Warp Warp::of(const DecodingConfig& config) {
    Warp warp;
    if (config.row->rule == Rule::search) {
        warp.top_k = std::max(num_searched(config), config.most_draft_beams() + num_eos(config));
        warp.is_raw = true;
        return warp;
    }
    warp.temperature = config.temperature == 0.0 ? 1.0 : config.temperature;
    warp.top_k = config.top_k;
    warp.top_p = config.top_p;
    warp.min_p = config.min_p;
    warp.typical_p = config.typical_p;
    return warp;
}

Warp Warp::narrowed() const {
    Warp found = *this;
    if (is_raw) found.top_k = std::min(top_k, FIRST_TOKENS);
    return found;
}

Warp Warp::within(std::size_t num_top_logits) const {
    Warp found = *this;
    const bool is_served = 1 <= top_k && top_k <= num_top_logits;
    if (!is_raw && num_top_logits && !is_served) found.top_k = num_top_logits;
    return found;
}

void Warp::warp(std::span<double> centred) const {
    static thread_local Columns kept;
    if (temperature != 1.0) {
        for (double& score : centred) score /= temperature;
    }
    log_normalise(centred);
    if (top_p == 1.0 && min_p == 0.0 && typical_p == 1.0) return;
    if (top_p < 1.0) {
        cut_top_p(centred, top_p, kept);
        log_normalise(centred, kept);
    } else {
        count_up(kept, centred.size());
    }
    if (min_p > 0.0) {
        cut_min_p(centred, min_p, kept);
        log_normalise(centred, kept);
    }
    if (typical_p < 1.0) {
        cut_typical(centred, typical_p, kept);
        log_normalise(centred, kept);
    }
    leave(kept, centred);
}

std::size_t num_searched(const DecodingConfig& config) {
    return config.num_beams * std::max<std::size_t>(2, 1 + num_eos(config));
}

bool looks_beyond(const Warp& warp, const EngineSpec& spec) {
    const std::size_t most = spec.num_top_logits;
    return most > 0 && !warp.is_raw && !(1 <= warp.top_k && warp.top_k <= most);
}

void check_top_k(const EngineSpec& target, const DecodingConfig& config) {
    const std::size_t most = target.num_top_logits, top_k = Warp::of(config).top_k;
    if (!most || target.keeps_full_logits) return;  // the others are read if they matter
    const std::string number = std::to_string(most);
    const std::string returns =
        "but the target's engine returns the " + number + " largest logits of a position";
    if (config.processes_logits()) {
        throw Error(config.logits_options() + " may raise tokens that are not among the " + number +
                    " logits which the target's engine returns of a position, and it keeps no "
                    "others; leave it out, or export again, where --logits topk keeps them all "
                    "(or with --logits full)");
    }
    if (1 <= top_k && top_k <= most) return;
    const std::string read = std::to_string(top_k);
    if (config.row->rule == Rule::search) {
        throw Error("num_beams is " + std::to_string(config.num_beams) + ", for which strategy " +
                    std::string(config.row->name) + " looks at the " + read +
                    " best tokens of a position (top_k " + read + "), " + returns +
                    " and keeps no others; lower num_beams, or export again, where --logits topk "
                    "keeps them all (or with --logits full or --logits topk:" +
                    read + ")");
    }
    throw Error("top_k is " + read + (top_k ? "" : " (all tokens)") + ", " + returns +
                " and keeps no others; use top_k 1 to " + number +
                ", or export again, where --logits topk keeps them all (or with --logits full)");
}

}  // namespace dsbd
