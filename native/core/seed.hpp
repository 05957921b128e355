// Random numbers of a seed, as numpy.random.default_rng(seed) gives them.
//
// numpy spreads the seed over 256 bits (SeedSequence) and starts a PCG64 generator with them
// (O'Neill: PCG, 2014; the variant XSL-RR 128/64). The constants are those of both publications.
#pragma once

#include "forward.hpp"

namespace dsbd {

__extension__ using Uint128 = unsigned __int128;  // of GCC and Clang

/// numpy's Generator(PCG64(seed)).
class RandomGenerator {
public:
    explicit RandomGenerator(Uint128 seed);
    /// Go on from the state of another PCG64.
    RandomGenerator(Uint128 state, Uint128 increment) : state_(state), increment_(increment) {}

    std::uint64_t next();
    /// `integers(2**63)`, whose first one is the noise key of a request.
    std::uint64_t next63() { return next() >> 1; }
    /// `random()`: uniform in [0, 1).
    double next_double() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
    /// `standard_exponential()`.
    double next_exponential();

private:
    Uint128 state_;
    Uint128 increment_;
};

}  // namespace dsbd
