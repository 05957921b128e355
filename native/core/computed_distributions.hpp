// The distributions after the nodes that one engine has computed.
//
// A top-k head returns K tokens of a position, and a search without a draft reads a few of all. If
// a further one may be among the best candidates of a layer, all logits of the row are read, as
// long as they are there: until the engine's next forward. Those that are gone are computed once
// more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "distribution.hpp"
#include "engine_call.hpp"
#include "joint_distribution.hpp"
#include "warp.hpp"

namespace dsbd {

class Forest;
class RequestProcessing;
class TopTokens;

/// The left-out tokens that may matter for some beams, and what was read of them.
enum class LeftOut : std::uint8_t {
    nothing,  // no beam may have one
    read,     // they are known now
    gone,     // the logits of a beam have to be computed once more
};

/// The left-out tokens of the nodes that an engine has computed, by slot, until the next prune.
class LeftOutTokens {
public:
    /// spec: of an engine; one that keeps no other logits leaves them out.
    explicit LeftOutTokens(const EngineSpec& spec);

    /// Forget all of them: slots have other nodes from now on.
    void forget();
    /// Take the logits of the engine's latest call, of nodes from this slot on.
    void set_latest(std::int64_t first_slot, const Logits& logits);

    /// Read the `most` best tokens of beams that may have a continuation of that log-weight.
    ///
    /// known: the distributions, by slot. slots, log_weights: (num_beams,). threshold: least
    /// log-weight that matters. most: continuations of all beams together.
    LeftOut read(TokenDistributions& known, std::span<const std::int64_t> slots,
                 std::span<const double> log_weights, double threshold, std::size_t most);

    /// Whether any were read that matter.
    bool has_tokens() const { return !tokens_.empty(); }
    /// Add them to the joint distribution of the beams at `slots`.
    void add_to(JointDistribution& joint, std::span<const double> log_weights,
                std::span<const std::int64_t> slots) const;

    Ints gone;  // which of the beams that were asked about last have lost their logits

private:
    void read_row(std::int64_t slot, double log_weight, double threshold, std::size_t num_known,
                  std::size_t most);

    bool can_read_;
    std::size_t vocab_size_;
    std::int64_t first_slot_ = -1;  // of the latest call; -1: there was no call
    Logits logits_;
    Ints read_slots_;
    Ints slots_, tokens_;  // (num_tokens,), as the raw log-probabilities
    Floats raw_log_probs_;
};

/// The distributions after an engine's computed nodes, by slot (see ForestRunner).
///
/// Row 0 is no distribution: an ended beam has slot 0 and stays what it is.
class ComputedDistributions {
public:
    /// processing, tops: of the request; null: none.
    ComputedDistributions(Role role, const EngineSpec& spec, const Forest& forest, const Warp& warp,
                          RequestProcessing* processing, TopTokens* tops = nullptr);

    /// Add the distributions after nodes of the next slots; ModelError: invalid logits.
    void append(const Logits& logits, std::span<const std::int64_t> nodes, std::int64_t first_slot);
    /// Return the joint distribution after beams; Error: no token may follow. copies: empty: once.
    JointDistribution joint(std::span<const std::int64_t> nodes,
                            std::span<const double> log_weights,
                            std::span<const std::int64_t> copies);
    /// Return the candidates of that joint distribution that have the largest log mass plus noise
    /// at a depth, at most `number`. Their path keys are known.
    JointDistribution best_by_noise(std::span<const std::int64_t> nodes,
                                    std::span<const double> log_weights,
                                    std::span<const std::int64_t> copies, std::size_t number,
                                    std::size_t depth);
    /// Return the warped log-probability of one token after each computed node.
    Floats log_probs(std::span<const std::int64_t> nodes, std::span<const std::int64_t> tokens);
    /// Keep slot 0 and these, which become 1, 2, ...; without any, all stay as they are.
    void keep(std::span<const std::int64_t> slots);
    void forget();

    TokenDistributions known;
    LeftOutTokens left_out;
    TopTokens* tops;             // the most probable tokens after every node; null: not returned
    std::size_t bytes_peak = 0;  // most bytes that the distributions took

private:
    void append_warped(const Logits& logits);
    Ints slots_of(std::span<const std::int64_t> nodes) const;
    /// Error: processors or constraint leave no token to a beam, or to any.
    void check_continues(std::span<const std::int64_t> nodes,
                         std::span<const std::int64_t> slots) const;

    Role role_;
    const EngineSpec& spec_;
    const Forest& forest_;
    Warp warp_;
    RequestProcessing* processing_;
    bool looks_beyond_;
};

}  // namespace dsbd
