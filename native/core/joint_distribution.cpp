// Joint distributions of (beam, token) candidates, and the best of them.
#include "joint_distribution.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
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

/// Return for every candidate of another layer of all tokens its index in this one, -1: none.
Ints aligned(const JointDistribution& ours, const JointDistribution& theirs) {
    Ints index(theirs.num_candidates());
    const WholeLayer &mine = *ours.whole, &other = *theirs.whole;
    for (std::size_t beam = 0; beam < other.num_beams(); ++beam) {
        const auto found = std::ranges::find(ours.nodes, theirs.nodes[beam]);
        const auto place = static_cast<std::size_t>(found - ours.nodes.begin());
        const bool is_here =
            found != ours.nodes.end() && mine.has_ended(place) == other.has_ended(beam);
        const auto first = index.begin() + static_cast<std::ptrdiff_t>(other.begin(beam));
        const auto last = index.begin() + static_cast<std::ptrdiff_t>(other.begin(beam + 1));
        if (is_here) std::iota(first, last, static_cast<std::int64_t>(mine.begin(place)));
        if (!is_here) std::fill(first, last, -1);
    }
    return index;
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
    if (!num_candidates() && beams.size() == nodes.size()) {
        JointDistribution all = others;
        all.log_unlisted = log_unlisted;
        return all;
    }
    JointDistribution found = *this;
    for (const auto parent : others.parents) found.parents.push_back(beams[at(parent)]);
    append(found.tokens.all(), others.tokens.all());
    append(found.log_weights.all(), others.log_weights.all());
    append(found.masses, others.masses);  // both have them, or neither
    append(found.raw_log_probs.all(), others.raw_log_probs.all());
    found.whole = nullptr;
    found.sort_by_beam();
    return found;
}

void JointDistribution::sort_by_beam() {
    std::vector<std::size_t> order(num_candidates());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, {}, [&](std::size_t i) { return parents[i]; });
    for (auto* each : {&parents.all(), &tokens.all()}) reorder(*each, order);
    for (auto* each : {&log_weights.all(), &masses, &raw_log_probs.all()}) reorder(*each, order);
    path_keys.clear();
}

Ints JointDistribution::best(std::size_t num_wanted) const {
    return whole ? whole->best(num_wanted) : best_candidates(log_masses(), num_wanted);
}

Ints JointDistribution::best_by_noise(std::span<const std::uint64_t> keys, std::size_t num_wanted,
                                      std::size_t depth) const {
    BestByNoise best(num_wanted, depth);
    for (std::size_t beam = 0; beam < nodes.size(); ++beam) {
        whole->consider(beam, keys[at(nodes[beam])], best);
    }
    BestByMass found(num_wanted);  // their order
    for (const auto& each : best.found()) {
        found.consider(whole->begin(at(each.beam)) + each.place, each.score);
    }
    return found.best();
}

JointDistribution JointDistribution::few_by_noise(std::span<const std::uint64_t> keys,
                                                  std::size_t number, std::size_t depth) const {
    double floor = std::numeric_limits<double>::infinity();
    for (std::size_t beam = 0; beam < nodes.size(); ++beam) {
        BestByNoise best(number, depth);
        whole->consider(beam, keys[at(nodes[beam])], best);
        for (const auto& each : best.found()) floor = std::min(floor, each.score);
    }
    BestByNoise above(num_candidates(), depth, floor);
    std::vector<std::size_t> chosen;
    for (std::size_t beam = 0; beam < nodes.size(); ++beam) {
        whole->consider(beam, keys[at(nodes[beam])], above);
        const std::size_t most = chosen.size() + number, end = whole->begin(beam + 1);
        for (std::size_t i = whole->begin(beam); i < end && chosen.size() < most; ++i) {
            if (log_weights[i] > LOG_ZERO) chosen.push_back(i);
        }
    }
    for (const auto& each : above.found()) {
        chosen.push_back(whole->begin(at(each.beam)) + each.place);
    }
    std::ranges::sort(chosen);
    const auto again = std::ranges::unique(chosen);
    chosen.erase(again.begin(), again.end());
    JointDistribution found;
    found.nodes = nodes;
    for (const auto i : chosen) {
        found.parents.push_back(parents[i]);
        found.tokens.push_back(tokens[i]);
        found.log_weights.push_back(log_weights[i]);
    }
    return found;
}

Ints JointDistribution::with_token(std::int64_t token) const {
    Ints found;
    if (!whole) {
        for (std::size_t i = 0; i < num_candidates(); ++i) {
            if (tokens[i] == token) found.push_back(static_cast<std::int64_t>(i));
        }
        return found;
    }
    for (std::size_t beam = 0; beam < whole->num_beams(); ++beam) {
        const std::size_t place = whole->has_ended(beam) ? 0 : at(token);
        if (whole->has_ended(beam) == (token == STAY)) {
            found.push_back(static_cast<std::int64_t>(whole->begin(beam) + place));
        }
    }
    return found;
}

Floats JointDistribution::probabilities() const {
    Floats found;
    write_probabilities(found);
    return found;
}

void JointDistribution::write_probabilities(Floats& found) const {
    found.resize(num_candidates());
    const double largest = whole ? whole->largest_mass() : *std::ranges::max_element(log_masses());
    const double sum = pairwise(0, found.size(), [&](std::size_t first, std::size_t size) {
        double* const terms = found.data() + first;
        if (whole) {
            whole->write_masses(first, size, terms);
        } else {
            std::copy_n(log_masses().data() + first, size, terms);
        }
        for (std::size_t i = 0; i < size; ++i) terms[i] -= largest;
        exp_of(terms, size, terms);
        return leaf_sum(terms, size);
    });
    for (double& mass : found) mass /= sum;
}

Ints JointDistribution::aligned_to(const JointDistribution& other) const {
    if (whole && other.whole) return aligned(*this, other);
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
    if (copies.empty() && distributions.are_whole()) {
        const auto layer = joint.whole =
            std::make_shared<const WholeLayer>(distributions, rows, log_weights);
        joint.parents = {layer, &WholeLayer::parent};
        joint.tokens = {layer, &WholeLayer::token};
        joint.log_weights = {layer, &WholeLayer::log_weight};
        joint.raw_log_probs = {layer, &WholeLayer::raw_log_prob};
        return joint;
    }
    std::size_t size = 0;
    for (const auto row : rows) size += row ? distributions.num_tokens(row) : 1;
    Ints parents(size), tokens(size);
    Floats weights(size), raw_log_probs(size);
    if (!copies.empty()) joint.masses.resize(size);
    std::size_t first = 0;
    for (std::size_t beam = 0; beam < rows.size(); ++beam) {
        const std::size_t count = rows[beam] ? distributions.num_tokens(rows[beam]) : 1;
        double* const of_beam = weights.data() + first;
        if (rows[beam]) {
            distributions.copy(rows[beam],
                               {tokens.data() + first, of_beam, raw_log_probs.data() + first});
        } else {
            tokens[first] = STAY;
            of_beam[0] = raw_log_probs[first] = 0.0;
        }
        std::fill_n(parents.data() + first, count, static_cast<std::int64_t>(beam));
        for (std::size_t i = 0; i < count; ++i) of_beam[i] += log_weights[beam];
        if (!copies.empty()) {
            const double log_copies = std::log(static_cast<double>(copies[beam]));
            for (std::size_t i = 0; i < count; ++i) {
                joint.masses[first + i] = of_beam[i] + log_copies;
            }
        }
        first += count;
    }
    joint.parents = std::move(parents);
    joint.tokens = std::move(tokens);
    joint.log_weights = std::move(weights);
    joint.raw_log_probs = std::move(raw_log_probs);
    return joint;
}

Ints best_candidates(std::span<const double> scores, std::size_t num_wanted) {
    constexpr std::size_t FEW = 16;  // times as many as are wanted: then a heap of these is faster
    if (scores.size() > FEW * num_wanted) {
        BestByMass found(num_wanted);
        double least = found.least();
        for (std::size_t i = 0; i < scores.size(); ++i) {
            if (!(scores[i] > least)) continue;
            found.consider(i, scores[i]);
            least = found.least();
        }
        return found.best();
    }
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
    if (middle != best.end()) std::nth_element(best.begin(), middle, best.end(), is_before);
    std::sort(best.begin(), middle, is_before);
    best.erase(middle, best.end());
    return best;
}

}  // namespace dsbd
