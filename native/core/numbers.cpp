// Rows of numbers: the largest of a row, and the log of its sum of exponentials.
#include "numbers.hpp"

#include <bit>
#include <cmath>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "error.hpp"
#include "exponentials.hpp"

namespace dsbd {
namespace {

constexpr std::size_t CAST_TOGETHER = 8192;  // float32 that numpy casts and adds at a time
constexpr std::size_t NUM_LANES = 32;        // of a row: a few of what one instruction compares

/// Replace 8 numbers by larger ones; NaN is not larger.
template <class T>
void raise(T* numbers, const T* others) {
    for (std::size_t k = 0; k < 8; ++k) numbers[k] = std::max(numbers[k], others[k]);
}
/// Return bit k if number k of 8 is not below the bound.
template <class T>
unsigned not_below(const T* numbers, T bound) {
    unsigned found = 0;
    for (std::size_t k = 0; k < 8; ++k) found |= unsigned{numbers[k] >= bound} << k;
    return found;
}
#if defined(__SSE2__)
template <>
inline void raise(float* numbers, const float* others) {
    for (std::size_t k = 0; k < 8; k += 4) {
        _mm_storeu_ps(numbers + k, _mm_max_ps(_mm_loadu_ps(others + k), _mm_loadu_ps(numbers + k)));
    }
}
template <>
inline void raise(double* numbers, const double* others) {
    for (std::size_t k = 0; k < 8; k += 2) {
        _mm_storeu_pd(numbers + k, _mm_max_pd(_mm_loadu_pd(others + k), _mm_loadu_pd(numbers + k)));
    }
}
template <>
inline unsigned not_below(const float* numbers, float bound) {
    const __m128 least = _mm_set1_ps(bound);
    const int low = _mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(numbers), least));
    const int high = _mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(numbers + 4), least));
    return static_cast<unsigned>(low | high << 4);
}
template <>
inline unsigned not_below(const double* numbers, double bound) {
    const __m128d least = _mm_set1_pd(bound);
    unsigned found = 0;
    for (unsigned k = 0; k < 8; k += 2) {
        const __m128d is_above = _mm_cmpge_pd(_mm_loadu_pd(numbers + k), least);
        found |= static_cast<unsigned>(_mm_movemask_pd(is_above)) << k;
    }
    return found;
}
#endif

/// Write the maxima of the interleaved parts of a row, a multiple of 8, NaN left out.
template <class T>
void part_maxima(std::span<const T> row, std::span<T> maxima) {
    std::fill(maxima.begin(), maxima.end(), -std::numeric_limits<T>::infinity());
    const std::size_t num_parts = maxima.size();
    std::size_t first = 0;
    for (; first + num_parts <= row.size(); first += num_parts) {
        for (std::size_t k = 0; k < num_parts; k += 8) raise(&maxima[k], &row[first + k]);
    }
    for (std::size_t k = 0; first + k < row.size(); ++k) {
        maxima[k] = std::max(maxima[k], row[first + k]);
    }
}

float largest_number(std::span<const float> row) {
    float lanes[NUM_LANES];
    part_maxima<float>(row, lanes);
    return *std::max_element(lanes, lanes + NUM_LANES);
}

/// Return the sum of a row of n terms, written block by block: terms(first, size, block).
template <class Terms>
double sum_of_blocks(std::size_t num_terms, const Terms& terms) {
    double sum = 0.0, block[SUMMED_TOGETHER];
    for (std::size_t first = 0; first < num_terms; first += SUMMED_TOGETHER) {
        const std::size_t size = std::min(SUMMED_TOGETHER, num_terms - first);
        terms(first, size, block);
        const std::size_t padded = (size + 7) / 8 * 8;  // further zeros change nothing
        std::fill(block + size, block + padded, 0.0);
        sum += leaf_sum(block, padded);
    }
    return sum;
}

}  // namespace

void check_finite(double largest) {
    if (std::isfinite(largest)) return;
    throw ModelError(
        "the model returned logits without a finite largest value (NaN or infinite); check the "
        "engine's precision and the export's parity report");
}

float largest_logit(std::span<const float> logits) {
    std::uint32_t is_nan[NUM_LANES] = {};
    std::size_t i = 0;
    for (; i + NUM_LANES <= logits.size(); i += NUM_LANES) {
        const float* const block = logits.data() + i;
        for (std::size_t k = 0; k < NUM_LANES; ++k) is_nan[k] |= block[k] != block[k];
    }
    for (; i < logits.size(); ++i) is_nan[0] |= std::isnan(logits[i]);
    const float largest = largest_number(logits);
    const bool has_nan = std::any_of(is_nan, is_nan + NUM_LANES, [](auto lane) { return lane; });
    check_finite(has_nan ? std::numeric_limits<double>::quiet_NaN() : double{largest});
    return largest;
}

double log_normalizer(std::span<const float> logits) {
    const float largest = largest_number(logits);
    check_finite(largest);
    const auto leaf = [&](std::size_t first, std::size_t size) {
        return leaf_sum_of_exp32(logits.data() + first, size, largest);
    };
    double sum = 0.0;
    for (std::size_t first = 0; first < logits.size(); first += CAST_TOGETHER) {
        sum += pairwise(first, std::min(CAST_TOGETHER, logits.size() - first), leaf);
    }
    check_finite(sum);  // NaN of any logit is there
    return std::log(sum) + double{largest};
}

void log_normalise(std::span<double> scores) {
    const double sum =
        sum_of_blocks(scores.size(), [&](std::size_t first, std::size_t size, double* block) {
            exp_of(scores.data() + first, size, block);
        });
    const double log_sum = std::log(sum);
    for (double& score : scores) score -= log_sum;
}

void log_normalise(std::span<double> scores, const Columns& columns) {
    static thread_local std::vector<double> terms;
    terms.resize(columns.size());
    for (std::size_t i = 0; i < columns.size(); ++i) terms[i] = scores[columns[i]];
    exp_of(terms.data(), terms.size(), terms.data());
    const double log_sum = std::log(row_sum(terms, columns));
    for (const auto column : columns) scores[column] -= log_sum;
}

double log_sum_of_exp(std::span<const float> logits, double largest, double temperature) {
    return std::log(
        sum_of_blocks(logits.size(), [&](std::size_t first, std::size_t size, double* block) {
            log_probs_of(logits.data() + first, size, {largest, temperature, 0.0}, block);
            exp_of(block, size, block);
        }));
}

double row_sum(FloatSpan terms, const Columns& columns) {
    double sum = 0.0;
    for (std::size_t i = 0; i < columns.size();) {
        double lanes[8] = {};
        const auto block = columns[i] / SUMMED_TOGETHER;
        for (; i < columns.size() && columns[i] / SUMMED_TOGETHER == block; ++i) {
            lanes[columns[i] % 8] += terms[i];
        }
        sum += leaf_sum(lanes, 8);
    }
    return sum;
}

double pairwise_sum(FloatSpan terms) {
    return pairwise(0, terms.size(), [&](std::size_t first, std::size_t size) {
        return leaf_sum(terms.data() + first, size);
    });
}

namespace {

constexpr std::size_t PARTS_PER_NUMBER = 2, MOST_PARTS = 1 << 13;

/// Append the columns that are not below a bound.
template <class T>
void collect(std::span<const T> row, T bound, Columns& columns) {
    std::size_t first = 0;
    for (; first + 8 <= row.size(); first += 8) {
        for (unsigned bits = not_below(&row[first], bound); bits != 0; bits &= bits - 1) {
            const auto place = static_cast<std::size_t>(std::countr_zero(bits));
            columns.push_back(static_cast<std::uint32_t>(first + place));
        }
    }
    for (; first < row.size(); ++first) {
        if (row[first] >= bound) columns.push_back(static_cast<std::uint32_t>(first));
    }
}

/// Find columns that include the `number` largest, increasing.
///
/// Of wide rows those that are not below the `number`-th of the maxima of interleaved parts: to
/// partition a whole row takes several times as long.
template <class T>
void find_large(std::span<const T> row, std::size_t number, Columns& columns) {
    static thread_local std::vector<T> maxima;
    columns.clear();
    const std::size_t num_parts = std::bit_ceil(std::max(PARTS_PER_NUMBER * number, NUM_LANES));
    if (num_parts > MOST_PARTS || row.size() < 4 * num_parts) {
        return count_up(columns, row.size());
    }
    maxima.resize(num_parts);
    part_maxima(row, std::span(maxima));
    const auto last = maxima.begin() + static_cast<std::ptrdiff_t>(number) - 1;
    std::nth_element(maxima.begin(), last, maxima.end(), std::greater<>());
    if (*last > -std::numeric_limits<T>::infinity()) return collect(row, *last, columns);
    collect(row, std::numeric_limits<T>::lowest(), columns);
    for (std::size_t i = 0; columns.size() < number; ++i) {  // the first of those that are -inf
        if (!(row[i] >= std::numeric_limits<T>::lowest())) {
            columns.push_back(static_cast<std::uint32_t>(i));
        }
    }
    std::sort(columns.begin(), columns.end());
}

template <class T>
void find_largest(std::span<const T> row, std::size_t number, Columns& columns) {
    static thread_local std::vector<T> values;
    number = std::min(number, row.size());
    find_large(row, number, columns);
    if (columns.size() == number) return;
    values.resize(columns.size());
    std::transform(columns.begin(), columns.end(), values.begin(),
                   [&](std::uint32_t column) { return row[column]; });
    const auto last = values.begin() + static_cast<std::ptrdiff_t>(number) - 1;
    std::nth_element(values.begin(), last, values.end(), std::greater<>());
    const T threshold = *last;
    auto num_ties = number - static_cast<std::size_t>(std::count_if(
                                 values.begin(), last, [&](T v) { return v > threshold; }));
    std::erase_if(columns, [&](std::uint32_t column) {
        if (row[column] > threshold) return false;
        if (row[column] < threshold || num_ties == 0) return true;
        --num_ties;
        return false;
    });
}

}  // namespace

void largest_columns(FloatSpan scores, std::size_t number, Columns& columns) {
    find_largest(scores, number, columns);
}

std::size_t largest_logits(std::span<const float> logits, std::size_t number, std::int64_t* tokens,
                           double* scores) {
    static thread_local Columns columns;
    find_largest(logits, number, columns);
    std::sort(columns.begin(), columns.end(), [&](std::uint32_t a, std::uint32_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    });
    for (std::size_t i = 0; i < columns.size(); ++i) {
        tokens[i] = columns[i];
        scores[i] = double{logits[columns[i]]};
    }
    return columns.size();
}

}  // namespace dsbd
