// The candidates of largest log mass plus noise, without the noise of all.
//
// With u the uniform number of a candidate, its noise -log(-log u) is below -log(1 - u). If even
// that does not lift its mass to the best ones so far, no logarithm is computed. Of a row of all
// logits the largest one of a block bounds the masses in it: if no number of the block is high
// enough, nothing else is computed there. Python has no such file: it computes the noise of all
// candidates, and takes the best.
#pragma once

#include "exponentials.hpp"
#include "forward.hpp"
#include "numbers.hpp"

namespace dsbd {

/// A beam whose continuations are candidates.
struct NoisyBeam {
    std::int64_t index;      // of the joint distribution
    std::uint64_t path_key;  // of its node
    double log_weight;
    double log_copies;
};

/// Some of the continuations of a beam.
struct Continuations {
    IntSpan tokens;       // (n,); empty: by id
    FloatSpan log_probs;  // (n,)
};

/// A distribution over all tokens of which none is cut.
struct WholeRow {
    static constexpr std::size_t BLOCK = 128;  // tokens that one bound is for

    std::span<const float> logits;  // (vocab_size,)
    LogProb log_prob;

    double log_prob_of(std::size_t token) const { return log_prob(logits[token]); }
    std::span<const float> block(std::size_t first) const {
        return logits.subspan(first, std::min(BLOCK, logits.size() - first));
    }
};

/// Return the largest of some logits, none of them NaN.
float largest_of(std::span<const float> logits);

/// Finds the best of several beams.
class BestByNoise {
public:
    /// floor: candidates of lower scores may be left out.
    BestByNoise(std::size_t num_wanted, std::size_t depth, double floor = LOG_ZERO)
        : num_wanted_(num_wanted), depth_(depth), floor_(floor) {}

    /// Consider all continuations of a beam, which come after those of earlier beams.
    void consider(const NoisyBeam& beam, const Continuations& all);
    void consider(const NoisyBeam& beam, const WholeRow& row);

    struct Candidate {
        double score;
        std::size_t place;  // among the beam's
        std::int64_t beam, token;
        double log_prob;
        std::uint64_t path_key;
    };
    /// Return the best ones by beam, then by place; no more can be considered.
    std::vector<Candidate> found();

private:
    /// Return the log-probability plus noise of a continuation that matters.
    double least(const NoisyBeam& beam) const;
    void consider(const NoisyBeam& beam, std::size_t place, std::int64_t token, double log_prob);

    std::size_t num_wanted_, depth_;
    double floor_;
    std::vector<Candidate> best_;  // a heap, the worst first, once there are `num_wanted_`
};

}  // namespace dsbd
