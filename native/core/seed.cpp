// Random numbers of a seed, as numpy.random.default_rng(seed) gives them.
#include "seed.hpp"

#include <array>
#include <cmath>

namespace dsbd {
namespace {

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
std::array<std::uint32_t, 4> seed_pool(Uint128 seed) {
    SeedHash hash(0x43B0D7E5u, 0x931E8875u);
    std::array<std::uint32_t, 4> pool{};
    for (std::size_t i = 0; i < pool.size(); ++i) {
        pool[i] = hash(static_cast<std::uint32_t>(seed >> (32 * i)));
    }
    for (std::size_t source = 0; source < pool.size(); ++source) {
        for (std::size_t target = 0; target < pool.size(); ++target) {
            if (source == target) continue;
            const std::uint32_t mixed =
                0xCA01F9DDu * pool[target] - 0x4973F715u * hash(pool[source]);
            pool[target] = mixed ^ (mixed >> 16);
        }
    }
    return pool;
}

constexpr Uint128 MULTIPLIER = Uint128{0x2360ED051FC65DA4u} << 64 | 0x4385DF649FCCF645u;

/// Tables of the ziggurat of exponential numbers (Marsaglia and Tsang, 2000), 256 layers of equal
/// area, as numpy has them: the exact widths, rounded.
struct Ziggurat {
    static constexpr long double START = 7.6971174701310497140446280481L;  // of the tail
    std::array<std::uint64_t, 256> most{};  // draws below fall within the layer above as well
    std::array<double, 256> widths{}, heights{};

    Ziggurat() {
        constexpr long double scale = 9007199254740992.0L;  // 2 ** 53
        constexpr long double base = START + 1.0L;          // of the lowest layer, with the tail
        const long double area = base * std::exp(-START);   // of a layer
        long double x = START, above = base, height = std::exp(-START), rest = 0.0L;
        widths[0] = static_cast<double>(base / scale);
        heights[0] = 1.0;
        for (std::size_t i = 255; i >= 1; --i) {
            most[(i + 1) % 256] = static_cast<std::uint64_t>(x / above * scale);
            widths[i] = static_cast<double>(x / scale);
            heights[i] = static_cast<double>(height);
            const long double term = area / x + rest, sum = height + term;
            rest = term - (sum - height);  // lost by rounding: an error of the last bit grows
            height = sum;
            above = x;
            x = -std::log(height) - rest / height;
        }
    }
};

}  // namespace

RandomGenerator::RandomGenerator(Uint128 seed) {
    const std::array<std::uint32_t, 4> pool = seed_pool(seed);
    SeedHash hash(0x8B51F9DDu, 0x58F38DEDu);
    std::array<std::uint64_t, 4> words{};  // the lower half of a word comes first
    for (std::size_t i = 0; i < 2 * words.size(); ++i) {
        words[i / 2] |= std::uint64_t{hash(pool[i % pool.size()])} << (i % 2 * 32);
    }
    const Uint128 start = Uint128{words[0]} << 64 | words[1];
    increment_ = (Uint128{words[2]} << 64 | words[3]) << 1 | 1;
    state_ = (increment_ + start) * MULTIPLIER + increment_;
}

std::uint64_t RandomGenerator::next() {
    state_ = state_ * MULTIPLIER + increment_;
    const std::uint64_t folded =
        static_cast<std::uint64_t>(state_ >> 64) ^ static_cast<std::uint64_t>(state_);
    const auto turn = static_cast<unsigned>(state_ >> 122);
    return folded >> turn | folded << ((64 - turn) % 64);
}

double RandomGenerator::next_exponential() {
    static const Ziggurat table;
    for (;;) {
        const std::uint64_t drawn = next() >> 3;
        const std::size_t layer = drawn & 0xFF;
        const std::uint64_t place = drawn >> 8;
        const double x = static_cast<double>(place) * table.widths[layer];
        if (place < table.most[layer]) return x;  // nearly always
        if (layer == 0) return static_cast<double>(Ziggurat::START) - std::log1p(-next_double());
        const double height = table.heights[layer - 1] - table.heights[layer];
        if (height * next_double() + table.heights[layer] < std::exp(-x)) return x;
    }
}

}  // namespace dsbd
