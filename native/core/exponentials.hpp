// Exponentials of many numbers, and their sums in numpy's order.
//
// float32: numpy's rational approximation, the same bits as its loops for AVX2 and AVX-512. double:
// the C library's, which numpy uses on machines without AVX-512; four at a time where the result is
// the same.
#pragma once

#include <cstddef>

namespace dsbd {

/// Terms that numpy adds without splitting them; a row of a table is added in blocks of so many.
inline constexpr std::size_t SUMMED_TOGETHER = 128;

/// Return the sum of e ** (x - largest) of at most SUMMED_TOGETHER numbers, exp in float32.
double leaf_sum_of_exp32(const float* numbers, std::size_t size, float largest);

/// Return the sum of at most SUMMED_TOGETHER terms.
double leaf_sum(const double* terms, std::size_t size);

/// Return the sum of terms in the order of numpy's `sum` of one contiguous axis; leaf(first, size)
/// returns that of at most SUMMED_TOGETHER.
template <class Leaf>
double pairwise(std::size_t first, std::size_t size, const Leaf& leaf) {
    if (size <= SUMMED_TOGETHER) return leaf(first, size);
    std::size_t half = size / 2;
    half -= half % 8;
    return pairwise(first, half, leaf) + pairwise(first + half, size - half, leaf);
}

/// The log-probability of a token by its logit.
struct LogProb {
    double largest, temperature, log_sum;

    double operator()(float logit) const {
        return (double{logit} - largest) / temperature - log_sum;
    }
};
void log_probs_of(const float* logits, std::size_t size, const LogProb& log_prob, double* found);

/// Write e ** x of every number.
void exp_of(const double* numbers, std::size_t size, double* found);

}  // namespace dsbd
