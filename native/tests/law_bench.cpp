// CPU time of a layer over all logits: rows of a forward are taken, and candidates chosen.
//
//     law_bench LOGITS VOCABULARY ROWS KIND REPEATS
//
// LOGITS: file of (ROWS, VOCABULARY) float32. KIND: "target" selects 4 beams, "draft" 6 candidates
// by their noise, "scores" ranks them for the policy "throughput", "rejection" draws them by that
// coupling, "joint" takes the most probable. lab/native_laws.py does the same in Python. Prints the
// microseconds of the fastest repeat and the candidates.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "computed_distributions.hpp"
#include "config.hpp"
#include "forest.hpp"
#include "rejection_coupling.hpp"
#include "sample_rule.hpp"

namespace {

constexpr std::size_t NUM_BEAMS = 4, NUM_DRAWS = 6, DEPTH = 5;

double cpu_seconds() {
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// One layer of beams, each in a node of its own below the prompt.
class Layer {
public:
    Layer(const std::vector<float>& values, std::size_t vocab_size, std::size_t num_rows)
        : forest_(1, 0, 7, {}, {}) {
        logits_.values = values.data();
        logits_.num_rows = num_rows;
        logits_.vocab_size = spec_.vocab_size = vocab_size;
        for (std::size_t row = 0; row < num_rows; ++row) {
            dsbd::JointDistribution joint;
            joint.nodes = {0};
            joint.parents = {0};
            joint.tokens = {static_cast<std::int64_t>(row)};
            nodes_.push_back(forest_.descend(joint, dsbd::Ints{0})[0]);
            weights_.push_back(-0.1 * static_cast<double>(row));
            forest_.slots_of(dsbd::Role::target)[row + 1] = static_cast<std::int64_t>(row) + 2;
        }
        known_.append(logits_.part(0, 1), std::span(nodes_).first(1), 1);  // of an earlier layer
    }

    dsbd::Ints chosen(const std::string& kind) {
        known_.keep(dsbd::Ints{1});
        known_.append(logits_, nodes_, 2);
        if (kind == "target") {
            const auto best = known_.best_by_noise(nodes_, weights_, {}, NUM_BEAMS, DEPTH);
            return numbers(best, dsbd::best_candidates(gumbel_.scores(best, DEPTH), NUM_BEAMS));
        }
        dsbd::JointDistribution joint = known_.joint(nodes_, weights_, {});
        if (kind == "draft") return gumbel_.propose(joint, NUM_DRAWS, DEPTH);
        if (kind == "scores") {
            const auto scores = rule_->draft_scores(joint, DEPTH);
            return numbers(joint, dsbd::best_candidates(scores, NUM_DRAWS));
        }
        if (kind == "joint") return joint.best(NUM_DRAWS);
        random_ = dsbd::RandomGenerator(7);
        return rejection_.propose(joint, NUM_DRAWS, DEPTH);
    }

private:
    /// Number candidates by beam and token.
    dsbd::Ints numbers(const dsbd::JointDistribution& joint, dsbd::Ints chosen) const {
        for (auto& each : chosen) {
            const auto place = static_cast<std::size_t>(each);
            const auto vocab_size = static_cast<std::int64_t>(spec_.vocab_size);
            each = joint.parents[place] * vocab_size + joint.tokens[place];
        }
        return chosen;
    }

    dsbd::EngineSpec spec_;
    dsbd::Logits logits_;
    dsbd::Forest forest_;
    dsbd::ComputedDistributions known_{dsbd::Role::target, spec_, forest_, {}, nullptr};
    dsbd::Hypotheses hypotheses_;
    dsbd::LayerBuilder builder_{forest_, hypotheses_, false};
    dsbd::DecodingConfig config_ = dsbd::decoding_config(R"({"draft_beams": 5})");
    dsbd::GumbelCoupling gumbel_{forest_, false};
    std::unique_ptr<dsbd::SelectionRule> rule_ = dsbd::sample_rule(
        config_, builder_, std::make_unique<dsbd::GumbelCoupling>(forest_, false));
    dsbd::RandomGenerator random_{7};
    dsbd::RejectionCoupling rejection_{random_, false};
    dsbd::Ints nodes_;
    dsbd::Floats weights_;
};

}  // namespace

int main(int, char** arguments) {
    const std::size_t vocab_size = std::strtoul(arguments[2], nullptr, 10);
    const std::size_t num_rows = std::strtoul(arguments[3], nullptr, 10);
    std::vector<float> values(vocab_size * num_rows);
    std::ifstream(arguments[1], std::ios::binary)
        .read(reinterpret_cast<char*>(values.data()),
              static_cast<std::streamsize>(values.size() * sizeof(float)));
    Layer layer(values, vocab_size, num_rows);
    double fastest = 1e9;
    dsbd::Ints chosen;
    for (std::size_t left = std::strtoul(arguments[5], nullptr, 10); left > 0; --left) {
        const double began = cpu_seconds();
        chosen = layer.chosen(arguments[4]);
        fastest = std::min(fastest, cpu_seconds() - began);
    }
    std::printf("%.1f", 1e6 * fastest);
    for (const auto each : chosen) std::printf(" %lld", static_cast<long long>(each));
    std::printf("\n");
}
