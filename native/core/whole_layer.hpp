// Layers of beams that may be continued by all tokens: nothing of them is made before it is read.
//
// Python has no such file: it writes all candidates into arrays.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "best_by_noise.hpp"
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
    std::size_t size() const { return begins_.back(); }
    /// The first candidate of a beam.
    std::size_t begin(std::size_t beam) const { return begins_[beam]; }
    bool has_ended(std::size_t beam) const { return rows_[beam] == 0; }
    std::size_t beam_of(std::size_t candidate) const;
    double log_weight_of_beam(std::size_t beam) const { return log_weights_[beam]; }
    WholeRow whole(std::size_t beam) const { return distributions_.whole(rows_[beam]); }
    /// Let `best` consider the candidates of a beam.
    void consider(std::size_t beam, std::uint64_t path_key, BestByNoise& best) const;
    /// Return those of largest mass, equal ones by index.
    Ints best(std::size_t num_wanted) const;
    /// Return the largest mass, and write some in order.
    double largest_mass() const;
    void write_masses(std::size_t first, std::size_t size, double* found) const;

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
    using value_type = T;
    using Entry = T (WholeLayer::*)(std::size_t) const;

    Column() = default;
    Column(std::vector<T> entries) : entries_(std::move(entries)) {}
    Column(std::initializer_list<T> entries) : entries_(entries) {}
    Column(std::shared_ptr<const WholeLayer> layer, Entry entry)
        : layer_(std::move(layer)), entry_(entry) {}

    T operator[](std::size_t i) const { return layer_ ? ((*layer_).*entry_)(i) : entries_[i]; }
    std::size_t size() const { return layer_ ? layer_->size() : entries_.size(); }
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

}  // namespace dsbd
