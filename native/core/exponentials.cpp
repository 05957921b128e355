// Exponentials of many numbers, and their sums in numpy's order.
#include "exponentials.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#define DSBD_AVX2 __attribute__((target("avx2,fma")))
#endif

namespace dsbd {
namespace {

// exp of float32 is P(y) / Q(y) * 2 ** k with x = y + k * log(2) (numpy, loops_exponent_log).
constexpr float MOST = 88.72283935546875f, LEAST = -103.97208404541015625f;
constexpr float LOG2_E = 1.442695040888963407359924681001892137f, TO_WHOLE = 0x1.8p23f;
constexpr float MINUS_LOG_2_HIGH = -6.93145752e-1f, MINUS_LOG_2_LOW = -1.42860677e-6f;
constexpr std::array P{9.999999999980870924916e-01f, 7.257664613233124478488e-01f,
                       2.473615434895520810817e-01f, 5.114512081637298353406e-02f,
                       6.757896990527504603057e-03f, 5.082762527590693718096e-04f};
constexpr std::array Q{1.0f, -2.742335390411667452936e-01f, 2.159509375685829852307e-02f};
constexpr float LEAST_EXPONENT = -125.0f;  // a smaller power of two is applied in two steps

float power_of_two(float exponent) {
    return std::bit_cast<float>((static_cast<std::int32_t>(exponent) + 127) << 23);
}

/// numpy's order of eight accumulators.
double joined(const double* sums) {
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

float exp32(float x) {
    if (x != x) return x;
    if (x >= MOST) return std::numeric_limits<float>::infinity();
    if (x <= LEAST) return 0.0f;
    const float scaled = x * LOG2_E;
    const float k = (scaled + TO_WHOLE) - TO_WHOLE;
    const float y = std::fma(k, MINUS_LOG_2_LOW, std::fma(k, MINUS_LOG_2_HIGH, x));
    float numerator = P[5];
    for (std::size_t i = 5; i-- > 0;) numerator = std::fma(numerator, y, P[i]);
    const float denominator = std::fma(std::fma(Q[2], y, Q[1]), y, Q[0]);
    const float exponent = std::fmax(k, LEAST_EXPONENT);
    const float half = power_of_two(std::fmin(exponent, 127.0f));
    const float found = numerator / denominator * half * power_of_two(k - exponent);
    return k > 127.0f ? 2.0f * found : found;
}

}  // namespace

double leaf_sum(const double* terms, std::size_t size) {
    double sum = 0.0;
    std::size_t i = 0;
    if (size >= 8) {
        double sums[8];
        for (std::size_t lane = 0; lane < 8; ++lane) sums[lane] = terms[lane];
        for (i = 8; i + 8 <= size; i += 8) {
            for (std::size_t lane = 0; lane < 8; ++lane) sums[lane] += terms[i + lane];
        }
        sum = joined(sums);
    }
    for (; i < size; ++i) sum += terms[i];
    return sum;
}

namespace {

double plain_sum_of_exp32(const float* numbers, std::size_t size, float largest) {
    double terms[SUMMED_TOGETHER];
    for (std::size_t i = 0; i < size; ++i) terms[i] = double{exp32(numbers[i] - largest)};
    return leaf_sum(terms, size);
}

void plain_exp_of(const double* numbers, std::size_t size, double* found) {
    for (std::size_t i = 0; i < size; ++i) found[i] = std::exp(numbers[i]);
}

#if defined(__x86_64__)

DSBD_AVX2 inline __m256 all(float value) { return _mm256_set1_ps(value); }
DSBD_AVX2 inline __m256d all(double value) { return _mm256_set1_pd(value); }

/// exp32 of eight numbers of which none is above 0.
DSBD_AVX2 inline __m256 exp_of_8(__m256 x) {
    const __m256 is_zero = _mm256_cmp_ps(x, all(LEAST), _CMP_LE_OQ);
    x = _mm256_max_ps(all(LEAST), x);  // x if it is NaN
    const __m256 scaled = _mm256_mul_ps(x, all(LOG2_E));
    const __m256 k = _mm256_sub_ps(_mm256_add_ps(scaled, all(TO_WHOLE)), all(TO_WHOLE));
    __m256 y = _mm256_fmadd_ps(k, all(MINUS_LOG_2_HIGH), x);
    y = _mm256_fmadd_ps(k, all(MINUS_LOG_2_LOW), y);
    __m256 numerator = _mm256_fmadd_ps(all(P[5]), y, all(P[4]));
    numerator = _mm256_fmadd_ps(numerator, y, all(P[3]));
    numerator = _mm256_fmadd_ps(numerator, y, all(P[2]));
    numerator = _mm256_fmadd_ps(numerator, y, all(P[1]));
    numerator = _mm256_fmadd_ps(numerator, y, all(P[0]));
    __m256 denominator = _mm256_fmadd_ps(all(Q[2]), y, all(Q[1]));
    denominator = _mm256_fmadd_ps(denominator, y, all(Q[0]));
    __m256 found = _mm256_div_ps(numerator, denominator);
    const __m256 exponent = _mm256_max_ps(k, all(LEAST_EXPONENT));
    for (const __m256 part : {exponent, _mm256_sub_ps(k, exponent)}) {
        const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(part), _mm256_set1_epi32(127));
        found = _mm256_mul_ps(found, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
    }
    return _mm256_andnot_ps(is_zero, found);
}

DSBD_AVX2 double fast_sum_of_exp32(const float* numbers, std::size_t size, float largest) {
    const __m256 shift = _mm256_set1_ps(largest);
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    std::size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        const __m256 terms = exp_of_8(_mm256_sub_ps(_mm256_loadu_ps(numbers + i), shift));
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(terms)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(terms, 1)));
    }
    alignas(32) double sums[8];
    _mm256_store_pd(sums, low);
    _mm256_store_pd(sums + 4, high);
    double sum = joined(sums);
    for (; i < size; ++i) sum += double{exp32(numbers[i] - largest)};
    return sum;
}

// exp of double is 2 ** (k / 128) * (1 + e(r)) with x = r + k * log(2) / 128, as in glibc (and the
// libraries that share its origin: Szabolcs Nagy, ARM optimized routines), with fused operations.
constexpr std::size_t STEPS = 128;
constexpr double INVERSE_STEP = 0x1.71547652b82fep+7, TO_WHOLE_64 = 0x1.8p52;
constexpr double MINUS_STEP_HIGH = -0x1.62e42fefa0000p-8, MINUS_STEP_LOW = -0x1.cf79abc9e3b3ap-47;
constexpr std::array C{0x1.ffffffffffdbdp-2, 0x1.555555555543cp-3, 0x1.55555cf172b91p-5,
                       0x1.1111167a4d017p-7};
constexpr double MOST_64 = 511.0;  // of magnitude: beyond, the library rounds in other steps

/// 2 ** (i / 128) as a double without the exponent's share of i / 128, and what it lacks.
struct Step {
    double lack;
    std::uint64_t bits;
};

std::array<Step, STEPS> steps() {
    __extension__ using Wide = __float128;
    std::array<Step, STEPS> found;
    for (std::size_t i = 0; i < STEPS; ++i) {
        Wide power = 1, root = 2;  // root: 2 ** (1/2), 2 ** (1/4), ...
        for (std::size_t bit = STEPS / 2; bit != 0; bit /= 2) {
            const Wide square = root;
            root = static_cast<Wide>(std::sqrt(static_cast<double>(square)));
            for (int step = 0; step < 2; ++step) root = (root + square / root) / 2;
            if (i & bit) power *= root;
        }
        const auto rounded = static_cast<double>(power);
        found[i] = {static_cast<double>(power / static_cast<Wide>(rounded) - 1),
                    std::bit_cast<std::uint64_t>(rounded) - (std::uint64_t{i} << 45)};
    }
    return found;
}
const std::array<Step, STEPS> STEP = steps();

DSBD_AVX2 inline __m256d exp_of_4(__m256d x) {
    const __m256d shifted = _mm256_fmadd_pd(all(INVERSE_STEP), x, all(TO_WHOLE_64));
    const __m256d k = _mm256_sub_pd(shifted, all(TO_WHOLE_64));
    const __m256d r =
        _mm256_fmadd_pd(k, all(MINUS_STEP_LOW), _mm256_fmadd_pd(k, all(MINUS_STEP_HIGH), x));
    const __m256i bits = _mm256_castpd_si256(shifted);
    const __m256i place = _mm256_slli_epi64(_mm256_and_si256(bits, _mm256_set1_epi64x(127)), 1);
    const auto* table = reinterpret_cast<const double*>(STEP.data());
    const __m256d lack = _mm256_i64gather_pd(table, place, 8);
    const __m256i step = _mm256_castpd_si256(_mm256_i64gather_pd(table + 1, place, 8));
    const __m256d scale =
        _mm256_castsi256_pd(_mm256_add_epi64(step, _mm256_slli_epi64(bits, 52 - 7)));
    const __m256d r2 = _mm256_mul_pd(r, r);
    __m256d e = _mm256_add_pd(lack, r);
    e = _mm256_fmadd_pd(r2, _mm256_fmadd_pd(r, all(C[1]), all(C[0])), e);
    e = _mm256_fmadd_pd(_mm256_mul_pd(r2, r2), _mm256_fmadd_pd(r, all(C[3]), all(C[2])), e);
    return _mm256_fmadd_pd(scale, e, scale);
}

DSBD_AVX2 void fast_exp_of(const double* numbers, std::size_t size, double* found) {
    const __m256d sign = _mm256_set1_pd(-0.0), most = _mm256_set1_pd(MOST_64);
    std::size_t i = 0;
    for (; i + 4 <= size; i += 4) {
        const __m256d x = _mm256_loadu_pd(numbers + i);
        const __m256d is_usual = _mm256_cmp_pd(_mm256_andnot_pd(sign, x), most, _CMP_LE_OQ);
        if (_mm256_movemask_pd(is_usual) == 15) {
            _mm256_storeu_pd(found + i, exp_of_4(x));
        } else {
            plain_exp_of(numbers + i, 4, found + i);
        }
    }
    plain_exp_of(numbers + i, size - i, found + i);
}

DSBD_AVX2 std::size_t log_probs_by_4(const float* logits, std::size_t size, const LogProb& log_prob,
                                     double* found) {
    const __m256d largest = all(log_prob.largest), log_sum = all(log_prob.log_sum);
    const __m256d temperature = all(log_prob.temperature);
    const bool is_scaled = log_prob.temperature != 1.0;
    std::size_t i = 0;
    for (; i + 4 <= size; i += 4) {
        __m256d x = _mm256_sub_pd(_mm256_cvtps_pd(_mm_loadu_ps(logits + i)), largest);
        if (is_scaled) x = _mm256_div_pd(x, temperature);
        _mm256_storeu_pd(found + i, _mm256_sub_pd(x, log_sum));
    }
    return i;
}

bool has_avx2() {
    static const bool found = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return found;
}

/// Whether this machine's C library computes the same as `fast_exp_of`.
bool is_fast_exp_exact() {
    if (!has_avx2()) return false;
    std::array<double, 1024> numbers, fast, plain;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = -0.0371093 * static_cast<double>(i) * (1.0 + 0x1.2345p-9);
    }
    fast_exp_of(numbers.data(), numbers.size(), fast.data());
    plain_exp_of(numbers.data(), numbers.size(), plain.data());
    return fast == plain;
}

#endif

}  // namespace

double leaf_sum_of_exp32(const float* numbers, std::size_t size, float largest) {
#if defined(__x86_64__)
    if (has_avx2()) return fast_sum_of_exp32(numbers, size, largest);
#endif
    return plain_sum_of_exp32(numbers, size, largest);
}

void log_probs_of(const float* logits, std::size_t size, const LogProb& log_prob, double* found) {
    std::size_t i = 0;
#if defined(__x86_64__)
    if (has_avx2()) i = log_probs_by_4(logits, size, log_prob, found);
#endif
    for (; i < size; ++i) found[i] = log_prob(logits[i]);
}

void exp_of(const double* numbers, std::size_t size, double* found) {
#if defined(__x86_64__)
    static const bool is_fast = is_fast_exp_exact();
    if (is_fast) return fast_exp_of(numbers, size, found);
#endif
    plain_exp_of(numbers, size, found);
}

}  // namespace dsbd
