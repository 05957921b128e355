// The estimates of draft policy "throughput", and its budget.
#include "drafting/acceptance.hpp"

#include <cmath>

#include "drafting/cost_curve.hpp"
#include "numbers.hpp"

namespace dsbd {
namespace {

constexpr std::size_t NUM_BINS = AcceptanceEstimator::NUM_BINS;
using Bins = AcceptanceEstimator::Bins;

constexpr double MOST = 3.0;  // iterations: what was earned long ago is no reason to lose more
constexpr double LEAST_SHARE = DraftBudget::SHARE / 8;
constexpr double ADVANCED = 0.04;  // of the time that a request is expected to take
constexpr double ADVANCED_IF_EARNED = 0.1;
constexpr double LOST = -2.0, EARNED = 1.0;  // iterations
constexpr double MOST_LOST_AT_ONCE = -0.5;  // a prompt to be read says nothing of later drafts
constexpr std::array<double, NUM_BINS - 1> GAP_EDGES = {0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0,
                                                        1.3,  1.6, 2.0, 2.5, 3.0,  4.0, 6.0};
constexpr double GUESS_WEIGHT = 2.0;  // observations of each gap that the guess counts for
constexpr double MEASURED_WEIGHT = 8.0;  // of the level of a pair whose agreement was measured
constexpr double USUAL_GUESS = 0.97;      // mean of the guess where nine of ten tokens agree
constexpr double MEMORY = 0.985;      // weight that a layer's observations keep after another
constexpr std::int64_t MANY_CHOSEN = 8;  // layers; a running mean then takes a tenth of the next
constexpr int MANY = 32, LATER = 4;  // layers; rates are then taken anew only after so many more
// How often drafts with a context agree, over how often with the whole path.
constexpr std::array<double, CONTEXT_SIZES.size()> AGREEMENT = {0.74, 0.87, 0.97, 0.97, 1.0};
constexpr double AGREEMENT_WEIGHT = 100.0;  // layers that the table counts for, for each size
constexpr double AGREEMENT_MEMORY = 0.999;  // weight that the layers of a size keep after another
constexpr double RATE_MEMORY = 0.9;  // weight that a rate of tokens keeps after another
constexpr double GUESSED_LAYER = 0.6;  // of an iteration
constexpr double LEAST_DISTURBANCE = 2e-5;  // seconds

/// Half without a gap, more the wider the gap.
const Bins FIRST_GUESS = [] {
    Bins guess{};
    for (std::size_t i = 0; i < NUM_BINS; ++i) {
        const double below = i == 0 ? 0.0 : GAP_EDGES[i - 1];
        const double centre = i + 1 == NUM_BINS ? 8.0 : GAP_EDGES[i] - 0.5 * (GAP_EDGES[i] - below);
        guess[i] = 1.0 - 0.5 * std::exp(-centre);
    }
    return guess;
}();

std::size_t bin_of(double gap) {
    const auto edge = std::lower_bound(GAP_EDGES.begin(), GAP_EDGES.end(), gap);
    return static_cast<std::size_t>(edge - GAP_EDGES.begin());
}

/// Return the number of the largest of `CONTEXT_SIZES` that is at most `size`, 0 below all.
std::size_t context_of(std::size_t size) {
    const auto above = std::ranges::upper_bound(CONTEXT_SIZES, size) - CONTEXT_SIZES.begin();
    return at(std::max<std::ptrdiff_t>(above - 1, 0));
}

/// Return the weight of the latest of so many observations in a running mean.
double step(std::int64_t num_seen) {
    return num_seen >= 20 ? 0.05 : 1.0 / (static_cast<double>(num_seen) + 0.2);
}

/// Return a product of vectors, added as BLAS does with AVX-512: four sums of every fourth term.
double dot(const Bins& a, const Bins& b) {
    std::array<double, 4> sums{};
    for (std::size_t i = 0; i < NUM_BINS; ++i) sums[i % 4] += a[i] * b[i];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

}  // namespace

bool DraftBudget::believes_estimates() const { return gained >= LOST; }

bool DraftBudget::has_earned() const { return gained >= EARNED; }

void DraftBudget::begin_request(double prompt, double draft_prompt) {
    most = MOST + draft_prompt;
    add(share * prompt);
}

void DraftBudget::advance(double expected) {
    const double amount = (gained >= EARNED ? ADVANCED_IF_EARNED : ADVANCED) * expected;
    if (amount <= balance || gained < LOST) return;
    balance = amount;
    num_prepaid = std::max(num_prepaid, static_cast<int>(std::ceil(amount / share)));
}

void DraftBudget::pass_iteration() {
    saved += share;
    if (num_prepaid) {
        --num_prepaid;
    } else {
        add(share);
    }
}

void DraftBudget::add(double earned) {
    const double sum = balance + earned;
    // A balance beyond the limit stays.
    balance = earned > 0.0 && sum > most ? std::max(balance, most) : sum;
}

void DraftBudget::settle(double cost, double earned, bool is_try) {
    add(earned - cost);
    gained = 0.99 * gained + std::max(earned - cost, MOST_LOST_AT_ONCE);
    gained = std::min(std::max(gained, 2.0 * LOST), MOST);
    saved = 0.0;
    if (earned > cost) {
        share = std::min(4.0 * share, SHARE);
    } else if (is_try || !believes_estimates()) {
        share = std::max(0.5 * share, LEAST_SHARE);
    }
}

double DraftBudget::iterations_until(double cost, bool is_try) const {
    double num_iterations = 0.0;
    if (cost > balance) num_iterations = num_prepaid + (cost - balance) / share;
    if (is_try) num_iterations = std::max(num_iterations, (cost - saved) / share);
    return std::ceil(num_iterations);
}

void LoopCost::learn(std::size_t num_layers, double seconds) {
    const auto layers = static_cast<double>(num_layers);
    const double expected = iteration + layers * layer;
    const double most = 4.0 * expected + LEAST_DISTURBANCE;
    const double error = std::min(std::max(seconds, 0.0), most) - expected;
    if (num_layers) {
        layer = std::max(layer + error * step(++num_drafted) / layers, 0.0);
    } else {
        iteration += error * step(++num_plain);
        if (!num_drafted) layer = GUESSED_LAYER * iteration;
    }
}

AcceptanceEstimator::AcceptanceEstimator(std::optional<double> agreement) {
    if (!agreement) return;
    is_measured = true;
    acceptance = *agreement;
    level = std::min(*agreement / USUAL_GUESS, 1.0);
    level_weight = MEASURED_WEIGHT;
}

Floats AcceptanceEstimator::accepted(FloatSpan gaps, std::size_t depth) const {
    const Bins& of_kind = rates[depth ? 1 : 0];
    Floats found;
    for (const double gap : gaps) found.push_back(of_kind[bin_of(gap)]);
    return found;
}

void AcceptanceEstimator::learn(FloatSpan gaps, std::size_t num_short, std::size_t depth) {
    const std::size_t kind = depth ? 1 : 0;
    Bins new_seen{}, new_enough{};
    for (std::size_t i = 0; i < gaps.size(); ++i) {
        ++new_seen[bin_of(gaps[i])];
        new_enough[bin_of(gaps[i])] += i >= num_short ? 1.0 : 0.0;
    }
    for (std::size_t i = 0; i < NUM_BINS; ++i) {
        seen[kind][i] = seen[kind][i] * MEMORY + new_seen[i];
        enough[kind][i] = enough[kind][i] * MEMORY + new_enough[i];
    }
    ++num_learned;
    ++num_new[kind];
}

void AcceptanceEstimator::learn_rate(double new_tokens, double new_calls) {
    tokens = RATE_MEMORY * tokens + new_tokens;
    calls = RATE_MEMORY * calls + new_calls;
}

void AcceptanceEstimator::choose(double chosen_acceptance, std::size_t width) {
    ++num_chosen;
    const double weight =
        num_chosen >= MANY_CHOSEN ? 0.1 : 1.0 / static_cast<double>(num_chosen + 2);
    acceptance += weight * (chosen_acceptance - acceptance);
    const auto chosen_rows = static_cast<double>(width);
    rows += rows != 0.0 ? weight * (chosen_rows - rows) : chosen_rows;
}

double AcceptanceEstimator::agreement(std::size_t size) const {
    const std::size_t known = context_of(size);
    if (first_layers[known] == 0.0) return AGREEMENT[known];
    double usual = 0.0, accepted = 0.0;
    for (std::size_t i = 0; i < AGREEMENT.size(); ++i) {
        usual += AGREEMENT[i] * first_layers[i];
        accepted += agreed[i];
    }
    const double overall = std::max(accepted / usual, 1e-3);
    const double expected = agreed[known] / overall + AGREEMENT_WEIGHT * AGREEMENT[known];
    return std::min(expected / (first_layers[known] + AGREEMENT_WEIGHT), 1.0);
}

void AcceptanceEstimator::learn_agreement(std::size_t size, bool agrees) {
    const std::size_t known = context_of(size);
    first_layers[known] = AGREEMENT_MEMORY * first_layers[known] + 1.0;
    agreed[known] = AGREEMENT_MEMORY * agreed[known] + (agrees ? 1.0 : 0.0);
}

void AcceptanceEstimator::learn_length(std::size_t num_tokens) {
    const double weight = answer_length != 0.0 ? 0.2 : 1.0;
    answer_length += weight * (static_cast<double>(num_tokens) - answer_length);
}

void AcceptanceEstimator::refresh() {
    const int least = num_learned <= MANY ? 1 : LATER;
    for (std::size_t kind = 0; kind < 2; ++kind) {
        if (num_new[kind] < least) continue;
        num_new[kind] = 0;
        const double guessed = dot(seen[kind], FIRST_GUESS) + level_weight;
        const double found_level = (pairwise_sum(enough[kind]) + level_weight * level) / guessed;
        Bins sums{}, weights{};  // weighed, else the best of many noisy rates would be believed
        for (std::size_t i = 0; i < NUM_BINS; ++i) {
            const double guess = std::min(found_level * FIRST_GUESS[i], 1.0);
            sums[i] = enough[kind][i] + GUESS_WEIGHT * guess;
            weights[i] = seen[kind][i] + GUESS_WEIGHT;
        }
        const Floats found = never_falling(sums, weights);
        std::copy(found.begin(), found.end(), rates[kind].begin());
    }
}

}  // namespace dsbd
