// The candidates of largest log mass plus noise, without the noise of all.
//
// With u the uniform number of a candidate, its noise -log(-log u) is below -log(1 - u). If even
// that does not lift its mass to the best ones so far, no logarithm is computed. Python has no such
// file: it computes the noise of all candidates, and takes the best.
#pragma once

#include "forward.hpp"

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
    IntSpan tokens;                        // (n,); empty: by id, from `first` on
    FloatSpan log_probs;                   // (n,)
    std::size_t first = 0;                 // how many of the beam come before them
};

/// Finds the best of several beams.
class BestByNoise {
public:
    BestByNoise(std::size_t num_wanted, std::size_t depth)
        : num_wanted_(num_wanted), depth_(depth) {}

    /// Consider continuations of a beam, which come after the earlier ones.
    void consider(const NoisyBeam& beam, const Continuations& some);

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
    std::size_t num_wanted_, depth_;
    std::vector<Candidate> best_;  // a heap, the worst first, once there are `num_wanted_`
};

}  // namespace dsbd
