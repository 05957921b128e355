// known_answers SEED...: what the host makes of each seed, and the first cache capacities.

#include <cstdio>
#include <string>

#include "dsbd/kv_cache.hpp"
#include "dsbd/noise.hpp"
#include "dsbd/seed.hpp"

int main(int num_arguments, char** arguments) {
    for (int i = 1; i < num_arguments; ++i) {
        const std::uint64_t key = dsbd::noise_key(std::stoull(arguments[i]));
        const std::uint64_t child = dsbd::child_key(dsbd::root_key(key), 7);
        const std::uint64_t stayed = dsbd::child_key(child, -1);
        std::printf("%llu %llu %.17g\n", static_cast<unsigned long long>(key),
                    static_cast<unsigned long long>(stayed), dsbd::gumbel_noise(stayed, 3));
    }
    for (std::size_t num_rows = 0; num_rows < 5000; ++num_rows) {
        std::printf("%zu ", dsbd::bucket_capacity(num_rows));
    }
    std::printf("\n");
}
