// Joint distributions of (beam, token) candidates, and the best of them (docs/algorithm.md 1).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "distribution.hpp"
#include "forward.hpp"
#include "numbers.hpp"

namespace dsbd {

/// The "token" by which an absorbing beam continues: it stays what it is, with probability 1.
inline constexpr std::int64_t STAY = -1;
inline constexpr std::int64_t STAY_ONLY[] = {STAY};
inline constexpr double CERTAIN[] = {0.0};
inline constexpr Continuations STAYS{STAY_ONLY, CERTAIN};

/// The candidates of beams, each of which has all tokens: none is made before it is read.
///
/// Until the distributions forget their rows.
class WholeLayer {
public:
    WholeLayer(TokenDistributions& distributions, std::span<const std::int64_t> rows,
               std::span<const double> log_weights);

    std::size_t num_beams() const { return rows_.size(); }
    /// The first candidate of a beam, or the number of all.
    std::size_t begin(std::size_t beam) const { return begins_[beam]; }
    bool has_ended(std::size_t beam) const { return rows_[beam] == 0; }
    std::size_t beam_of(std::size_t candidate) const;
    /// Let `best` consider the candidates of a beam.
    void consider(std::size_t beam, std::uint64_t path_key, BestByNoise& best) const;
    double log_weight_of_beam(std::size_t beam) const { return log_weights_[beam]; }
    WholeRow whole(std::size_t beam) const { return distributions_.whole(rows_[beam]); }

    // Of a candidate.
    std::int64_t parent(std::size_t candidate) const;
    std::int64_t token(std::size_t candidate) const;
    double log_weight(std::size_t candidate) const;
    double raw_log_prob(std::size_t candidate) const;

private:
    TokenDistributions& distributions_;
    Ints rows_;
    Floats log_weights_;
    std::vector<std::size_t> begins_;  // (num_beams + 1,)
    mutable std::size_t beam_ = 0;     // which was asked for last
};

/// An array of the candidates, or one whose entries are made when they are read.
template <class T>
class Column {
public:
    using Entry = T (WholeLayer::*)(std::size_t) const;

    Column() = default;
    Column(std::vector<T> entries) : entries_(std::move(entries)) {}
    Column(std::initializer_list<T> entries) : entries_(entries) {}
    Column(std::shared_ptr<const WholeLayer> layer, Entry entry)
        : layer_(std::move(layer)), entry_(entry) {}

    T operator[](std::size_t i) const { return layer_ ? ((*layer_).*entry_)(i) : entries_[i]; }
    std::size_t size() const { return layer_ ? layer_->begin(layer_->num_beams()) : entries_.size(); }
    bool empty() const { return size() == 0; }
    /// Return all entries.
    std::vector<T>& all() const {
        if (!layer_) return entries_;
        entries_.resize(size());
        for (std::size_t i = 0; i < entries_.size(); ++i) entries_[i] = ((*layer_).*entry_)(i);
        layer_ = nullptr;
        return entries_;
    }
    operator const std::vector<T>&() const { return all(); }
    T back() const { return (*this)[size() - 1]; }
    const T* begin() const { return all().data(); }
    const T* end() const { return begin() + size(); }
    const T* data() const { return begin(); }
    void push_back(T entry) { all().push_back(entry); }

private:
    mutable std::vector<T> entries_;
    mutable std::shared_ptr<const WholeLayer> layer_;  // null: the entries are made
    Entry entry_ = nullptr;
};

/// P(i, v) = w_i * p~(v | x_i) of draft or target, unnormalised, in logs.
///
/// Candidates are numbered by beam, then by token.
struct JointDistribution {
    Ints nodes;                       // (num_beams,) the nodes that `parents` counts
    Column<std::int64_t> parents;     // (num_candidates,) index of the candidate's beam
    Column<std::int64_t> tokens;      // (num_candidates,) STAY for an absorbing beam
    Column<double> log_weights;       // (num_candidates,) log w_i + log p~(v | x_i): the child's weight
    Floats masses;  // (num_candidates,) the same times the copies of the beam, in logs, for draws;
                    // empty: the weights, because no beam has copies
    Column<double> raw_log_probs;     // (num_candidates,) unwarped log-probability of the token
    // (num_candidates,) see Forest::candidate_keys; empty: not computed yet.
    mutable std::vector<std::uint64_t> path_keys;
    double log_unlisted = LOG_ZERO;  // of all other continuations, of a draft that lists some

    std::shared_ptr<const WholeLayer> whole;  // null: the beams do not have all tokens

    std::size_t num_candidates() const { return tokens.size(); }
    const Floats& log_masses() const {
        return masses.empty() ? static_cast<const Floats&>(log_weights) : masses;
    }

    /// Return this one with the candidates of `others`, whose beams are these of ours.
    JointDistribution with_beams(std::span<const std::int64_t> beams,
                                 const JointDistribution& others) const;
    /// Put the candidates of a beam together, after some were added at the end.
    void sort_by_beam();
    /// Return the candidates of largest mass, as `best_candidates` does.
    Ints best(std::size_t num_wanted) const;
    /// Return those of largest mass plus noise at a depth, of a whole layer. keys: of all nodes.
    Ints best_by_noise(std::span<const std::uint64_t> keys, std::size_t num_wanted,
                       std::size_t depth) const;
    /// Return the masses plus noise of a whole layer, (num_candidates,), except that those are any
    /// lower number which are not among the `num_exact` best of a beam and below those of all beams.
    Floats scores_by_noise(std::span<const std::uint64_t> keys, std::size_t num_exact,
                           std::size_t depth) const;
    /// Return the candidates that continue a beam by a token, increasing.
    Ints with_token(std::int64_t token) const;
    /// Return the normalised probabilities, (num_candidates,).
    Floats probabilities() const;
    /// Return for every candidate of `other` its index in this one, -1: it has none.
    Ints aligned_to(const JointDistribution& other) const;

private:
    double largest_mass() const;
    void write_masses(std::size_t first, std::size_t size, double* found) const;
};

/// Combine beam weights and next-token distributions, of which row 0 is an absorbing beam's.
///
/// nodes, log_weights, rows: (num_beams,). copies: how often each was drawn; empty: once.
JointDistribution joint_distribution(std::span<const std::int64_t> nodes,
                                     std::span<const double> log_weights,
                                     std::span<const std::int64_t> copies,
                                     TokenDistributions& distributions,
                                     std::span<const std::int64_t> rows);

/// Finds the candidates of largest mass, equal ones by index, which increases.
class BestByMass {
public:
    explicit BestByMass(std::size_t num_wanted) : num_wanted_(num_wanted) {}

    /// The mass that a further one must exceed.
    double least() const {
        if (num_wanted_ == 0) return std::numeric_limits<double>::infinity();
        return best_.size() < num_wanted_ ? LOG_ZERO : best_.front().first;
    }
    void consider(std::size_t index, double mass) {
        if (!(mass > least())) return;
        if (best_.size() == num_wanted_) {
            std::ranges::pop_heap(best_, is_better);
            best_.pop_back();
        }
        best_.emplace_back(mass, static_cast<std::int64_t>(index));
        std::ranges::push_heap(best_, is_better);
    }
    Ints best() {
        std::ranges::sort_heap(best_, is_better);
        Ints found;
        for (const auto& each : best_) found.push_back(each.second);
        return found;
    }

private:
    using Candidate = std::pair<double, std::int64_t>;
    static bool is_better(const Candidate& a, const Candidate& b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    }

    std::size_t num_wanted_;
    std::vector<Candidate> best_;  // a heap, the worst first
};

/// Return the best candidates of finite score, (<= num_wanted,), equal ones by index.
Ints best_candidates(std::span<const double> scores, std::size_t num_wanted);

}  // namespace dsbd
