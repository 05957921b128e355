// Rows of numbers: the largest of a row, and the log of its sum of exponentials.
//
// Mirrors runtime/dsbd_forward/rows.py to the last bit: sums are added in numpy's order, and the
// exponential of float32 is numpy's for AVX2 and AVX-512. Compile without contraction of products
// and sums (-ffp-contract=off).
#pragma once

#include <cmath>
#include <limits>

#include "forward.hpp"

namespace dsbd {

inline constexpr double LOG_ZERO = -std::numeric_limits<double>::infinity();

using Columns = std::vector<std::uint32_t>;

/// ModelError: the largest logit of a row is NaN or infinite.
void check_finite(double largest);

/// Return the largest logit of a row; ModelError: it is NaN or infinite.
float largest_logit(std::span<const float> logits);

/// Return log(sum(exp(logit))) of a whole row; ModelError as `largest_logit`.
double log_normalizer(std::span<const float> logits);

/// Turn scores into log-probabilities. Their largest is 0, or the log of what was the largest
/// probability: no exp can overflow, nor all underflow.
void log_normalise(std::span<double> scores);
/// The same if only these columns, increasing, are above -inf.
void log_normalise(std::span<double> scores, const Columns& columns);

/// Return log(sum(exp((logit - largest) / temperature))), in double, as `log_normalise` computes
/// it.
double log_sum_of_exp(std::span<const float> logits, double largest, double temperature);

/// Return a sum in numpy's order, that of a row of a table of any width in which the terms stand in
/// these columns, increasing, and zeros elsewhere.
double row_sum(FloatSpan terms, const Columns& columns);
/// Return a sum in the order of numpy's `sum` of one contiguous axis.
double pairwise_sum(FloatSpan terms);

/// Return base ** exponent as numpy computes it for arrays.
inline double numpy_power(double base, double exponent) {
    if (exponent == 1.0) return base;
    if (exponent == 2.0) return base * base;
    if (exponent == 0.5) return std::sqrt(base);
    return exponent == -1.0 ? 1.0 / base : std::pow(base, exponent);
}

/// Find the columns of the `number` largest scores, increasing; ties by first. Fewer scores: all.
void largest_columns(FloatSpan scores, std::size_t number, Columns& columns);

/// Write the min(number, vocab_size) most probable tokens of a whole row by decreasing logit, ties
/// by increasing id, and their logits. Return how many.
std::size_t largest_logits(std::span<const float> logits, std::size_t number, std::int64_t* tokens,
                           double* scores);

}  // namespace dsbd
