// Host time of the loop itself: requests on engines that answer at once, from a pool of rows.
//
//     loop_bench [VOCABULARY [TOP]]    TOP: logits of a top-k head, 0: all logits of a row
//
// Prints for each request's options the microseconds of an iteration outside engine calls: of
// REPEATS requests the fastest, with hot caches, and what an iteration commits.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "batched_decoder.hpp"
#include "noise.hpp"

namespace {

constexpr std::size_t NUM_ROWS = 64, REPEATS = 30, NUM_TOKENS = 128;

/// Rows of logits, as a head returns them: normal numbers, of which the draft's are a little off.
class Pool {
public:
    Pool(std::size_t vocab_size, std::size_t num_top, double share) : num_top(num_top) {
        for (std::size_t row = 0; row < NUM_ROWS; ++row) {
            std::vector<std::pair<float, std::int64_t>> sorted;
            for (std::size_t token = 0; token < vocab_size; ++token) {
                const std::uint64_t key = dsbd::mix64(row, token);
                const double common = dsbd::gumbel_noise(key, 0), own = dsbd::gumbel_noise(key, 1);
                const double logit = 1.5 * (share * common + (1.0 - share) * own);
                sorted.emplace_back(static_cast<float>(logit), static_cast<std::int64_t>(token));
            }
            double sum = 0.0;
            for (const auto& each : sorted) sum += std::exp(static_cast<double>(each.first));
            sums.push_back(static_cast<float>(std::log(sum)));
            if (num_top) {
                std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
                    return a.first != b.first ? a.first > b.first : a.second < b.second;
                });
                sorted.resize(num_top);
            }
            for (const auto& [logit, token] : sorted) {
                logits.push_back(logit);
                ids.push_back(token);
            }
        }
    }
    std::size_t width() const { return logits.size() / NUM_ROWS; }

    std::size_t num_top;
    std::vector<float> logits, sums;
    dsbd::Ints ids;
};

/// Answers with the row that a node's token and position name.
class PoolEngine final : public dsbd::Engine {
public:
    PoolEngine(const Pool& pool, std::size_t vocab_size) : pool_(pool) {
        spec_.vocab_size = vocab_size;
        spec_.num_top_logits = pool.num_top;
    }
    const dsbd::EngineSpec& spec() const override { return spec_; }
    std::size_t num_rows() const override { return num_rows_; }
    std::size_t num_free_rows() const override { return std::size_t{1} << 30; }
    void expect(std::size_t) override {}
    void keep(std::span<const std::int64_t> rows) override { num_rows_ = rows.size(); }

    dsbd::ForwardResult forward(const dsbd::Forward& forward) override {
        const double began = dsbd::seconds_now();
        num_rows_ += forward.num_new();
        dsbd::ForwardResult result;
        result.logits.num_rows = forward.logit_rows.size();
        result.logits.vocab_size = spec_.vocab_size;
        result.logits.num_top = pool_.num_top;
        ids_.clear(), logits_.clear(), sums_.clear();
        for (auto s : forward.logit_rows) {
            const auto node = static_cast<std::size_t>(s);
            const auto token = static_cast<std::uint64_t>(forward.token_ids[node]);
            const std::size_t row = dsbd::child_key(token, forward.positions[node]) % NUM_ROWS;
            const auto begin = static_cast<std::ptrdiff_t>(row * pool_.width());
            const auto end = begin + static_cast<std::ptrdiff_t>(pool_.width());
            logits_.insert(logits_.end(), pool_.logits.begin() + begin, pool_.logits.begin() + end);
            if (!pool_.num_top) continue;
            ids_.insert(ids_.end(), pool_.ids.begin() + begin, pool_.ids.begin() + end);
            sums_.push_back(pool_.sums[row]);
        }
        (pool_.num_top ? result.logits.top_logits : result.logits.values) = logits_.data();
        result.logits.top_ids = ids_.data();
        result.logits.logsumexp = sums_.data();
        seconds += dsbd::seconds_now() - began;
        return result;
    }

    double seconds = 0.0;

private:
    const Pool& pool_;
    dsbd::EngineSpec spec_;
    std::size_t num_rows_ = 0;
    dsbd::Ints ids_;
    std::vector<float> logits_, sums_;
};

struct Measured {
    double microseconds = 1e9;  // of an iteration, outside engine calls
    double tokens = 0.0;        // that an iteration commits
};

Measured measured(const Pool& target_pool, const Pool& draft_pool, std::size_t vocab_size,
                  const std::string& options) {
    Measured best;
    for (std::size_t repeat = 0; repeat < REPEATS; ++repeat) {
        PoolEngine target(target_pool, vocab_size), draft(draft_pool, vocab_size);
        dsbd::BatchedDecoder decoder(target, &draft);
        dsbd::DecodingRequest request{
            {1, 2, 3, 4, 5}, dsbd::decoding_config(options), dsbd::RandomGenerator(repeat)};
        const double began = dsbd::seconds_now();
        decoder.join(std::move(request));
        std::vector<dsbd::Progress> progress;
        while (progress.empty()) progress = decoder.iterate();
        const double seconds = dsbd::seconds_now() - began - target.seconds - draft.seconds;
        const auto& result = std::get<dsbd::DecodeResult>(progress[0].event);
        const auto num_iterations = static_cast<double>(result.stats.num_iterations);
        best.microseconds = std::min(best.microseconds, 1e6 * seconds / num_iterations);
        best.tokens += result.stats.mean_acceptance_length / static_cast<double>(REPEATS);
    }
    return best;
}

}  // namespace

int main(int argc, char** argv) {
    const std::size_t vocab_size = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 4096;
    const std::size_t num_top = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 64;
    const Pool target(vocab_size, num_top, 1.0), draft(vocab_size, num_top, 0.8);
    const std::string top_k = num_top ? R"(, "top_k": )" + std::to_string(num_top) : "";
    for (const std::string options :
         {R"("strategy": "greedy")", R"("strategy": "sample")",
          R"("strategy": "beam-search", "num_beams": 4)",
          R"("strategy": "beam-sample", "num_beams": 4)",
          R"("strategy": "beam-sample", "num_beams": 32)",
          R"("strategy": "dsbd", "num_beams": 4, "draft_length": 2, "draft_beams": 6)"}) {
        const bool is_search = options.find("sample") == std::string::npos &&
                               options.find("dsbd") == std::string::npos;
        const bool has_draft = options.find("dsbd") != std::string::npos;
        const std::string given =
            "{" + options + (is_search ? "" : top_k) + ", \"seed\": 0, \"max_new_tokens\": " +
            std::to_string(NUM_TOKENS) + (has_draft ? R"(, "draft_policy": "fixed")" : "") + "}";
        const Measured found = measured(target, draft, vocab_size, given);
        std::printf("%8.1f us an iteration, %.2f layers: %s\n", found.microseconds, found.tokens,
                    options.c_str());
    }
}
