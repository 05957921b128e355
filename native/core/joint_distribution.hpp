// Joint distributions of (beam, token) candidates, and the best of them (docs/algorithm.md 1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "distribution.hpp"
#include "forward.hpp"
#include "numbers.hpp"
#include "whole_layer.hpp"

namespace dsbd {

/// P(i, v) = w_i * p~(v | x_i) of draft or target, unnormalised, in logs.
///
/// Candidates are numbered by beam, then by token.
struct JointDistribution {
    Ints nodes;                    // (num_beams,) the nodes that `parents` counts
    Column<std::int64_t> parents;  // (num_candidates,) index of the candidate's beam
    Column<std::int64_t> tokens;   // (num_candidates,) STAY for an absorbing beam
    Column<double> log_weights;  // (num_candidates,) log w_i + log p~(v | x_i): the child's weight
    Floats masses;  // (num_candidates,) the same times the copies of the beam, in
                    // logs, for draws; empty: the weights, no beam has copies
    Column<double> raw_log_probs;  // (num_candidates,) unwarped log-probability of the token
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
    /// Return the candidates of a whole layer that a draft may read: of every beam the `number`
    /// best by mass plus noise and the `number` first ones, and all as good as these. Without raw
    /// ones.
    JointDistribution few_by_noise(std::span<const std::uint64_t> keys, std::size_t number,
                                   std::size_t depth) const;
    /// Return the candidates that continue a beam by a token, increasing.
    Ints with_token(std::int64_t token) const;
    /// Return the normalised probabilities, (num_candidates,), or write them.
    Floats probabilities() const;
    void write_probabilities(Floats& found) const;
    /// Return for every candidate of `other` its index in this one, -1: it has none.
    Ints aligned_to(const JointDistribution& other) const;
};

/// Combine beam weights and next-token distributions, of which row 0 is an absorbing beam's.
///
/// nodes, log_weights, rows: (num_beams,). copies: how often each was drawn; empty: once.
JointDistribution joint_distribution(std::span<const std::int64_t> nodes,
                                     std::span<const double> log_weights,
                                     std::span<const std::int64_t> copies,
                                     TokenDistributions& distributions,
                                     std::span<const std::int64_t> rows);

/// Return the best candidates of finite score, (<= num_wanted,), equal ones by index.
Ints best_candidates(std::span<const double> scores, std::size_t num_wanted);

}  // namespace dsbd
