// Replays n-gram drafters, learned costs, draft policies and statistics from a JSON file; prints
// what they propose, decide and measure as JSON.
//
//     drafts_test FILE    FILE is written by tests/native/test_native_drafts.py
#include <algorithm>
#include <fstream>
#include <iostream>
#include <numeric>

#include <nlohmann/json.hpp>

#include "drafting/acceptance.hpp"
#include "drafting/cost_curve.hpp"
#include "drafting/ngram.hpp"
#include "drafting/throughput.hpp"
#include "numbers.hpp"
#include "stats.hpp"

namespace {

using dsbd::Floats;
using dsbd::Ints;
using nlohmann::json;

std::size_t index(std::int64_t number) { return static_cast<std::size_t>(number); }

/// Replay one n-gram drafter; its operations are [name, arguments ...].
json ngram(const json& given) {
    dsbd::NGramPool pool(given["pool"]);
    for (const json& text : given["texts"]) pool.add_text(text.get<Ints>());
    const json late = given["late"];
    dsbd::NGramDrafter::Settings settings{given["temperature"], given["only_long_matches"],
                                          given["num_beams"], given["copied"].get<Ints>(), nullptr};
    if (!late.is_null()) settings.late_ids = [late] { return late.get<Ints>(); };
    dsbd::NGramDrafter drafter(given["prompt"].get<Ints>(), &pool, settings);
    json found = json::array();
    for (const json& each : given["operations"]) {
        const auto name = each[0].get<std::string>();
        const Ints nodes = each[1].get<Ints>();
        if (name == "add") {
            dsbd::Flags ends(nodes.size());
            drafter.paths.add(nodes, each[2].get<Ints>(), ends);
        }
        if (name == "learn") drafter.learn(nodes);
        if (name == "prune") drafter.paths.prune(nodes, {});
        if (name != "propose") continue;
        for (const std::int64_t node : nodes) {
            const dsbd::Proposals proposed = drafter.proposals(node);
            found.push_back({proposed.tokens, proposed.log_probs, proposed.unlisted});
        }
    }
    return found;
}

json shown(const dsbd::CostCurve& curve) {
    return {curve.seconds, curve.seen ? json{curve.seen->first, curve.seen->second} : json()};
}

json costs(const json& given) {
    dsbd::LearnedCosts costs(given["bytes"][0], given["bytes"][1], given["bytes"][2]);
    json found = json::array();
    std::shared_ptr<const dsbd::EngineCosts> last;
    for (const auto& [kind, num_rows, seconds] :
         given["calls"].get<std::vector<std::tuple<int, std::size_t, double>>>()) {
        costs.observe(static_cast<dsbd::CostKind>(kind), num_rows, seconds);
        const auto now = costs.now();
        if (now == last) continue;
        last = now;
        found.push_back({shown(now->target), shown(now->draft), shown(now->source)});
    }
    return found;
}

/// The next of some costs after every call.
class ChangingCosts final : public dsbd::Costs {
public:
    explicit ChangingCosts(const json& given) {
        for (const json& each : given) {
            dsbd::EngineCosts costs;
            costs.target = curve(each, 1);
            costs.draft = curve(each, 2);
            costs.source = curve(each, 3);
            known_.push_back(std::make_shared<const dsbd::EngineCosts>(std::move(costs)));
        }
    }
    std::shared_ptr<const dsbd::EngineCosts> now() override {
        return known_[number_ % known_.size()];
    }
    void observe(dsbd::CostKind, std::size_t, double) override { ++number_; }

private:
    static dsbd::CostCurve curve(const json& given, std::size_t seconds) {
        dsbd::CostCurve found{given[0].get<Floats>(), given[seconds].get<Floats>(), {}};
        if (!given[4].is_null()) found.seen = {given[4][0], given[4][1]};
        return found;
    }

    std::vector<std::shared_ptr<const dsbd::EngineCosts>> known_;
    std::size_t number_ = 0;
};

/// One setting of the draft policy, on layers that the file describes.
class PolicyReplay {
public:
    explicit PolicyReplay(const json& given)
        : costs_(given["costs"]),
          estimator_(given["agreement"].is_null()
                         ? std::nullopt
                         : std::optional(given["agreement"].get<double>())),
          num_beams_(given["num_beams"]) {
        for (const json& request : given["requests"]) replay(given, request);
    }

    json found = json::array();

private:
    void replay(const json& given, const json& request) {
        const dsbd::DraftLimits limits{num_beams_, given["most_rows"], given["most_beams"],
                                       given["has_draft_model"]};
        dsbd::RequestCosts request_costs(costs_, [&] { return num_sharers_; }, limits);
        const auto clock = [this] { return host_; };
        const auto policy = dsbd::throughput_policy(
            request_costs, estimator_,
            [this](dsbd::JointDistribution& joint, std::size_t) { return scores(joint); }, forest_,
            {given["most_layers"], clock, [this] { return target_; }, [this] { return unread_; },
             [this] { return context_size_; }, given["may_rest"]});
        for (const json& iteration : request) iterate(*policy, iteration);
    }

    void iterate(dsbd::DraftPolicy& policy, const json& given) {
        forest_ = dsbd::Forest(1, 0, 0, {0});
        joints_.clear();
        num_sharers_ = given["num_sharers"];
        host_ += given["before"].get<double>();
        target_ += given["target"].get<double>();
        unread_ = {given["unread"][0], given["unread"][1]};
        context_size_ = given["context_size"];
        json decisions = json::array();
        dsbd::Iteration iteration;
        if (const std::size_t num_to_rest = policy.rest()) {
            decisions.push_back(num_to_rest);
        } else {
            policy.begin(given["num_pending"], given["most_layers"]);
            draft(policy, given["layers"], iteration, decisions);
        }
        host_ += given["host"].get<double>();
        for (int i = 0; i < given["num_calls"]; ++i) costs_.observe(dsbd::CostKind::target, 1, 0.0);
        commit(given, iteration);
        policy.observe(iteration);
        found.push_back({decisions, state()});
    }

    void draft(dsbd::DraftPolicy& policy, const json& layers, dsbd::Iteration& iteration,
               json& decisions) {
        dsbd::Nodes nodes{0};
        Floats log_weights{0.0};
        for (const json& layer : layers) {
            layer_ = &layer;
            dsbd::JointDistribution joint = joint_of(nodes, log_weights);
            decisions.push_back(policy.wants_layer(0));
            if (!decisions.back()) return;
            const std::size_t num_whole =
                policy.takes_all(joint.num_candidates(), nodes.size()) ? joint.num_candidates() : 0;
            decisions.push_back(num_whole);
            const bool is_forced = layer["is_forced"];
            if (!is_forced) {
                const std::size_t whole = layer["is_whole"] ? num_whole : 0;
                decisions.push_back(policy.wants_layer(layer["num_rows"], whole));
                if (!decisions.back()) return;
            }
            const Ints drawn = is_forced ? policy.choose_forced(joint) : policy.choose(joint, 0);
            decisions.push_back(drawn);
            joints_.push_back(joint);
            layers_.assign(layers.begin(), layers.end());
            if (drawn.empty()) return;
            nodes = forest_.descend(joint, drawn);
            log_weights.clear();
            for (const auto each : drawn) log_weights.push_back(joint.log_weights[index(each)]);
            iteration.drafted.emplace_back();
        }
    }

    dsbd::JointDistribution joint_of(const dsbd::Nodes& nodes, const Floats& log_weights) const {
        const auto log_probs = (*layer_)["log_probs"].get<Floats>();
        dsbd::JointDistribution joint;
        joint.nodes = nodes;
        for (std::size_t beam = 0; beam < nodes.size(); ++beam) {
            const bool has_ended = forest_.is_absorbing[index(nodes[beam])];
            for (std::size_t k = 0; k < (has_ended ? 1 : log_probs.size()); ++k) {
                const double listed = log_probs[(k + 3 * beam) % log_probs.size()];
                const double log_prob = has_ended ? 0.0 : listed;
                joint.parents.push_back(static_cast<std::int64_t>(beam));
                joint.tokens.push_back(has_ended ? dsbd::STAY : static_cast<std::int64_t>(k));
                joint.raw_log_probs.push_back(log_prob);
                joint.log_weights.push_back(log_weights[beam] + log_prob);
            }
        }
        if (!(*layer_)["log_unlisted"].is_null()) joint.log_unlisted = (*layer_)["log_unlisted"];
        return joint;
    }

    Floats scores(const dsbd::JointDistribution& joint) const {
        return noisy(joint, (*layer_)["noise"].get<Floats>());
    }
    static Floats noisy(const dsbd::JointDistribution& joint, const Floats& noise) {
        Floats found = joint.log_weights;
        for (std::size_t i = 0; i < found.size(); ++i) found[i] += noise[i % noise.size()];
        return found;
    }

    /// Select the best candidates of every drafted layer by scores that differ a little.
    void commit(const json& given, dsbd::Iteration& iteration) {
        const std::size_t most = given["num_committed"].get<std::size_t>();
        for (std::size_t i = 0; i < std::min(most, joints_.size()); ++i) {
            const Floats scores = noisy(joints_[i], layers_[i]["target_noise"].get<Floats>());
            const Ints best = dsbd::best_candidates(scores, num_beams_);
            dsbd::Beams beams;
            if (!given["has_all_ended"]) beams.nodes = forest_.descend(joints_[i], best);
            iteration.committed.push_back(beams);
        }
        if (iteration.committed.size() <= iteration.drafted.size()) {
            iteration.committed.push_back(dsbd::Beams::initial());
        }
    }

    json state() {
        const dsbd::AcceptanceEstimator& e = estimator_;
        const dsbd::DraftBudget& budget = estimator_.budget(num_sharers_);
        return {e.rates,        e.tokens,         e.calls,      e.acceptance,    e.rows,
                e.num_learned,  e.loop.iteration, e.loop.layer, e.agreement(64), e.agreement(1000),
                budget.balance, budget.share,     budget.saved, budget.gained};
    }

    ChangingCosts costs_;
    dsbd::AcceptanceEstimator estimator_;
    dsbd::Forest forest_{1, 0, 0, {0}};
    std::size_t num_beams_, num_sharers_ = 1;
    double host_ = 0.0, target_ = 0.0;
    std::pair<std::size_t, std::size_t> unread_;
    std::size_t context_size_ = 0;
    const json* layer_ = nullptr;
    std::vector<dsbd::JointDistribution> joints_;
    std::vector<json> layers_;
};

/// Statistics of iterations, each with its time, and of nothing before the first.
json stats(const json& given) {
    double now = 0.0;
    dsbd::Meter target, draft;
    dsbd::StatsRecorder recorder(
        given["num_prompt_tokens"], target, draft, [&] { return now; }, "ngram");
    for (const json& each : given["iterations"]) {
        now += each["seconds"].get<double>();
        target.count(each["rows"], 0.25 * each["seconds"].get<double>(), {});
        draft.count(1, 0.125 * each["seconds"].get<double>(), {});
        dsbd::Iteration iteration;
        iteration.drafted.resize(each["num_drafted"]);
        iteration.num_draft_tokens = each["num_draft_tokens"];
        iteration.num_accepted_tokens = each["num_accepted_tokens"];
        for (const std::size_t width : each["widths"].get<std::vector<std::size_t>>()) {
            iteration.committed.emplace_back().nodes.resize(width);
        }
        recorder.observe(iteration);
    }
    const dsbd::DecodingStats s = recorder.stats(given["num_output_tokens"]);
    const auto nullable = [](const auto& value) { return value ? json(*value) : json(); };
    return {s.num_iterations,
            s.num_draft_tokens,
            s.num_accepted_tokens,
            s.num_draft_layers,
            s.num_accepted_layers,
            s.mean_acceptance_length,
            nullable(s.draft_acceptance_rate),
            s.acceptance_histogram,
            s.mean_beam_width,
            s.num_prompt_tokens,
            s.num_output_tokens,
            s.num_cached_tokens,
            s.target_rows,
            s.draft_rows,
            s.target_calls,
            s.draft_calls,
            s.time_to_first_token_s,
            nullable(s.time_per_output_token_s),
            s.tokens_per_s,
            s.draft_s,
            s.target_s,
            s.host_s,
            s.drafter};
}

template <class Replay>
json all(const json& cases, Replay replay) {
    json found = json::array();
    for (const json& each : cases) found.push_back(replay(each));
    return found;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return 2;
    std::ifstream file(argv[1]);
    const json given = json::parse(file);
    std::cout << json{{"ngrams", all(given["ngrams"], ngram)},
                      {"costs", all(given["costs"], costs)},
                      {"policies", all(given["policies"],
                                       [](const json& each) { return PolicyReplay(each).found; })},
                      {"stats", all(given["stats"], stats)}}
                     .dump()
              << '\n';
}
