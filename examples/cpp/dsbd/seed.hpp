// From a seed to the noise key: the first draw of numpy.random.default_rng(seed).integers(2**63).
//
// numpy spreads the seed over 256 bits (SeedSequence) and starts a PCG64 generator with them
// (O'Neill: PCG, 2014; the variant XSL-RR 128/64). The constants are those of both publications.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace dsbd {

__extension__ using Uint128 = unsigned __int128;  // of GCC and Clang

/// The hash of SeedSequence: every call continues with another constant.
class SeedHash {
public:
    SeedHash(std::uint32_t constant, std::uint32_t multiplier)
        : constant_(constant), multiplier_(multiplier) {}

    std::uint32_t operator()(std::uint32_t value) {
        value ^= constant_;
        constant_ *= multiplier_;
        value *= constant_;
        return value ^ (value >> 16);
    }

private:
    std::uint32_t constant_;
    std::uint32_t multiplier_;
};

/// Return the 128 bits over which SeedSequence mixes a seed.
inline std::array<std::uint32_t, 4> seed_pool(std::uint64_t seed) {
    SeedHash hash(0x43B0D7E5u, 0x931E8875u);
    std::array<std::uint32_t, 4> pool{static_cast<std::uint32_t>(seed),
                                      static_cast<std::uint32_t>(seed >> 32), 0, 0};
    for (std::uint32_t& word : pool) {
        word = hash(word);
    }
    for (std::size_t source = 0; source < pool.size(); ++source) {
        for (std::size_t target = 0; target < pool.size(); ++target) {
            if (source != target) {
                const std::uint32_t mixed =
                    0xCA01F9DDu * pool[target] - 0x4973F715u * hash(pool[source]);
                pool[target] = mixed ^ (mixed >> 16);
            }
        }
    }
    return pool;
}

/// Return the noise key of a request with this seed, 63 bits.
inline std::uint64_t noise_key(std::uint64_t seed) {
    const std::array<std::uint32_t, 4> pool = seed_pool(seed);
    SeedHash hash(0x8B51F9DDu, 0x58F38DEDu);
    std::array<std::uint64_t, 4> words{};  // the lower half of a word comes first
    for (std::size_t i = 0; i < 2 * words.size(); ++i) {
        words[i / 2] |= std::uint64_t{hash(pool[i % pool.size()])} << (i % 2 * 32);
    }
    const Uint128 multiplier = Uint128{0x2360ED051FC65DA4u} << 64 | 0x4385DF649FCCF645u;
    const Uint128 start = Uint128{words[0]} << 64 | words[1];
    const Uint128 increment = (Uint128{words[2]} << 64 | words[3]) << 1 | 1;
    Uint128 state = (increment + start) * multiplier + increment;
    state = state * multiplier + increment;
    const std::uint64_t folded =
        static_cast<std::uint64_t>(state >> 64) ^ static_cast<std::uint64_t>(state);
    const auto turn = static_cast<unsigned>(state >> 122);
    const std::uint64_t drawn = folded >> turn | folded << ((64 - turn) % 64);
    return drawn >> 1;  // integers(2**63) keeps the upper 63 bits
}

}  // namespace dsbd
