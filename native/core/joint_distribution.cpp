// Joint distributions of (beam, token) candidates, and the best of them.
#include "joint_distribution.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "exponentials.hpp"

namespace dsbd {
namespace {

/// A number of each candidate, the same in every joint distribution: the node in the upper half,
/// token + 1 (STAY is -1) in the lower.
Ints candidate_ids(const JointDistribution& joint) {
    Ints ids(joint.num_candidates());
    for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = joint.nodes[at(joint.parents[i])] * (std::int64_t{1} << 32) + joint.tokens[i] + 1;
    }
    return ids;
}

template <class T>
void append(std::vector<T>& entries, const std::vector<T>& others) {
    entries.insert(entries.end(), others.begin(), others.end());
}

template <class T>
void reorder(std::vector<T>& entries, const std::vector<std::size_t>& order) {
    if (entries.empty()) return;
    std::vector<T> found;
    found.reserve(order.size());
    for (const auto index : order) found.push_back(entries[index]);
    entries.swap(found);
}

}  // namespace

JointDistribution JointDistribution::with_beams(std::span<const std::int64_t> beams,
                                                const JointDistribution& others) const {
    JointDistribution found = *this;
    for (const auto parent : others.parents) found.parents.push_back(beams[at(parent)]);
    append(found.tokens, others.tokens);
    append(found.log_weights, others.log_weights);
    append(found.masses, others.masses);  // both have them, or neither
    append(found.raw_log_probs, others.raw_log_probs);
    found.sort_by_beam();
    return found;
}

void JointDistribution::sort_by_beam() {
    std::vector<std::size_t> order(num_candidates());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, {}, [&](std::size_t i) { return parents[i]; });
    for (auto* each : {&parents, &tokens}) reorder(*each, order);
    for (auto* each : {&log_weights, &masses, &raw_log_probs}) reorder(*each, order);
    path_keys.clear();
}

Floats JointDistribution::probabilities() const {
    Floats found = log_masses();
    const double largest = *std::max_element(found.begin(), found.end());
    for (double& mass : found) mass -= largest;
    exp_of(found.data(), found.size(), found.data());
    const double sum = pairwise_sum(found);
    for (double& mass : found) mass /= sum;
    return found;
}

Ints JointDistribution::aligned_to(const JointDistribution& other) const {
    const Ints ours = candidate_ids(*this), theirs = candidate_ids(other);
    Ints order(ours.size());
    std::iota(order.begin(), order.end(), std::int64_t{0});
    const auto id_of = [&](std::int64_t index) { return ours[at(index)]; };
    std::ranges::sort(order, {}, id_of);
    Ints index(theirs.size());
    std::transform(theirs.begin(), theirs.end(), index.begin(), [&](std::int64_t id) {
        const auto place = std::ranges::lower_bound(order, id, {}, id_of);
        return place != order.end() && id_of(*place) == id ? *place : -1;
    });
    return index;
}

JointDistribution joint_distribution(std::span<const std::int64_t> nodes,
                                     std::span<const double> log_weights,
                                     std::span<const std::int64_t> copies,
                                     TokenDistributions& distributions,
                                     std::span<const std::int64_t> rows) {
    JointDistribution joint;
    joint.nodes.assign(nodes.begin(), nodes.end());
    std::size_t size = 0;
    for (const auto row : rows) size += row ? distributions.num_tokens(row) : 1;
    joint.parents.resize(size);
    joint.tokens.resize(size);
    joint.log_weights.resize(size);
    joint.raw_log_probs.resize(size);
    if (!copies.empty()) joint.masses.resize(size);
    std::size_t first = 0;
    for (std::size_t beam = 0; beam < rows.size(); ++beam) {
        const std::size_t count = rows[beam] ? distributions.num_tokens(rows[beam]) : 1;
        double* const weights = joint.log_weights.data() + first;
        if (rows[beam]) {
            distributions.copy(rows[beam], {joint.tokens.data() + first, weights,
                                            joint.raw_log_probs.data() + first});
        } else {
            joint.tokens[first] = STAY;
            weights[0] = joint.raw_log_probs[first] = 0.0;
        }
        std::fill_n(joint.parents.data() + first, count, static_cast<std::int64_t>(beam));
        for (std::size_t i = 0; i < count; ++i) weights[i] += log_weights[beam];
        if (!copies.empty()) {
            const double log_copies = std::log(static_cast<double>(copies[beam]));
            for (std::size_t i = 0; i < count; ++i) {
                joint.masses[first + i] = weights[i] + log_copies;
            }
        }
        first += count;
    }
    return joint;
}

Ints best_candidates(std::span<const double> scores, std::size_t num_wanted) {
    constexpr std::size_t FEW = 16;  // times as many as are wanted: then a heap of these is faster
    Ints best;
    best.reserve(scores.size());
    for (std::size_t i = 0; i < scores.size(); ++i) {
        if (scores[i] > LOG_ZERO) best.push_back(static_cast<std::int64_t>(i));
    }
    const auto is_before = [&](std::int64_t a, std::int64_t b) {
        const double first = scores[at(a)], second = scores[at(b)];
        return first > second || (first == second && a < b);
    };
    const auto middle =
        best.begin() + static_cast<std::ptrdiff_t>(std::min(num_wanted, best.size()));
    if (best.size() > FEW * num_wanted) {
        std::partial_sort(best.begin(), middle, best.end(), is_before);
    } else {
        if (middle != best.end()) std::nth_element(best.begin(), middle, best.end(), is_before);
        std::sort(best.begin(), middle, is_before);
    }
    best.erase(middle, best.end());
    return best;
}

}  // namespace dsbd
