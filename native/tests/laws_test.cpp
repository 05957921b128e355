// Makes the distributions of a folder of cases, and writes what they are.
//
//     laws_test FOLDER    the folder is written by tests/native/law_cases.py, which says its format
#include <algorithm>
#include <bit>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "computed_distributions.hpp"
#include "constraints/token_trie.hpp"
#include "error.hpp"
#include "forest.hpp"
#include "logits_processing/request_processing.hpp"
#include "noise.hpp"
#include "top_tokens.hpp"

namespace {

using dsbd::Floats;
using dsbd::Ints;
using nlohmann::json;

template <class T>
std::vector<T> read_all(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    std::vector<T> found(bytes.size() / sizeof(T));
    std::copy_n(bytes.data(), found.size() * sizeof(T), reinterpret_cast<char*>(found.data()));
    return found;
}

/// The logits that are not returned by a top-k head.
class Table final : public dsbd::FullLogits {
public:
    Table(const float* logits, std::size_t vocab_size) : logits_(logits), size_(vocab_size) {}
    std::span<const float> row(std::size_t row) override { return {logits_ + row * size_, size_}; }

private:
    const float* logits_;
    std::size_t size_;
};

class Case {
public:
    Case(const json& given, const std::string& folder, const std::vector<float>& floats,
         const Ints& ids, Ints& written)
        : given_(given),
          config_(dsbd::decoding_config(given.at("options").dump())),
          prompt_(given.at("prompt")),
          floats_(floats),
          ids_(ids),
          written_(written) {
        spec_.vocab_size = given.at("vocab_size");
        spec_.num_top_logits = given.at("num_top");
        spec_.keeps_full_logits = given.at("keeps_full");
        if (given.at("trie").is_string()) {
            auto trie = dsbd::TokenTrie::load(folder + "/" + given.at("trie").get<std::string>());
            config_.constraint = std::make_shared<dsbd::TokenTrie>(std::move(trie));
            if (auto most = config_.constraint->most_tokens()) config_.end_after(*most);
        }
        dsbd::check_top_k(spec_, config_);
        if (config_.processes_logits()) {
            processing_ = std::make_unique<dsbd::RequestProcessing>(
                config_, config_.constraint.get(), prompt_, spec_.vocab_size);
        }
        forest_.emplace(
            prompt_.back(), static_cast<std::int64_t>(prompt_.size()) - 1, 7,
            config_.eos_token_id.value_or(Ints{}),
            processing_ ? processing_->path_states() : std::vector<dsbd::PathStates*>());
    }

    void run() {
        grow();
        const bool is_draft = given_.at("is_draft");
        role_ = is_draft ? dsbd::Role::draft : dsbd::Role::target;
        dsbd::Warp warp = dsbd::Warp::of(config_);
        if (is_draft) warp = warp.within(spec_.num_top_logits);
        if (given_.at("narrowed")) warp = warp.narrowed();
        dsbd::ComputedDistributions known(role_, spec_, *forest_, warp, processing_.get());
        const auto logits = logits_of(forest_->size());
        append(known, logits);
        const Ints nodes = given_.at("beams");
        const Floats weights = given_.at("log_weights");
        const Ints copies = given_.at("copies");
        dsbd::JointDistribution joint = known.joint(nodes, weights, copies);
        write(joint);
        write(joint.aligned_to(joint));
        write_drawn(known.best_by_noise(nodes, weights, copies, num_wanted(), DEPTH));
        write_log_probs(known, nodes);
        look_for_left_out(known, joint, weights, nodes);
        write_tops(logits);
        const Ints slots = given_.at("kept");
        known.keep(slots);
        for (std::size_t i = 0; i < slots.size(); ++i) {
            forest_->slots_of(role_)[static_cast<std::size_t>(slots[i]) - 1] =
                static_cast<std::int64_t>(i) + 1;
        }
        Ints kept_nodes;
        for (const auto slot : slots) kept_nodes.push_back(slot - 1);
        write(known.joint(kept_nodes, Floats(slots.size(), -1.5), {}));
    }

private:
    static constexpr std::size_t DEPTH = 5;

    std::size_t num_wanted() const { return given_.at("num_wanted"); }

    /// Make the paths of the nodes.
    void grow() {
        for (const auto& [parent, token] :
             given_.at("nodes").get<std::vector<std::pair<int, int>>>()) {
            dsbd::JointDistribution joint;
            joint.nodes = {parent};
            joint.parents = {0};
            joint.tokens = {token};
            forest_->descend(joint, Ints{0});
        }
    }

    dsbd::Logits logits_of(std::size_t num_rows) {
        const float* const values = floats_.data() + given_.at("first_float").get<std::size_t>();
        dsbd::Logits logits;
        logits.num_rows = num_rows;
        logits.vocab_size = spec_.vocab_size;
        logits.num_top = spec_.num_top_logits;
        if (!logits.num_top) {
            logits.values = values;
            return logits;
        }
        full_ = std::make_unique<Table>(values, spec_.vocab_size);
        if (spec_.keeps_full_logits) logits.full = full_.get();
        logits.top_ids = ids_.data() + given_.at("first_id").get<std::size_t>();
        logits.top_logits = values + num_rows * logits.vocab_size;
        logits.logsumexp = logits.top_logits + num_rows * logits.num_top;
        return logits;
    }

    /// Take the logits in two calls.
    void append(dsbd::ComputedDistributions& known, const dsbd::Logits& logits) {
        auto& slots = forest_->slots_of(role_);
        Ints nodes(forest_->size());
        for (std::size_t node = 0; node < nodes.size(); ++node) {
            nodes[node] = static_cast<std::int64_t>(node);
            if (!forest_->is_absorbing[node]) slots[node] = nodes[node] + 1;
        }
        const std::size_t half = given_.at("num_first");
        const std::span all(nodes);
        if (half) known.append(logits.part(0, half), all.first(half), 1);
        known.append(logits.part(half, nodes.size() - half), all.subspan(half),
                     static_cast<std::int64_t>(half) + 1);
    }

    /// Write the log-probability of a token after each beam that has not ended.
    void write_log_probs(dsbd::ComputedDistributions& known, const Ints& nodes) {
        const Ints tokens = given_.at("tokens");
        Ints live_nodes, live_tokens;
        for (std::size_t i = 0; i < nodes.size(); ++i) {
            if (forest_->slot(role_, nodes[i]) == 0) continue;
            live_nodes.push_back(nodes[i]);
            live_tokens.push_back(tokens[i]);
        }
        write(known.log_probs(live_nodes, live_tokens));
    }

    void look_for_left_out(dsbd::ComputedDistributions& known, const dsbd::JointDistribution& joint,
                           const Floats& weights, const Ints& nodes) {
        if (config_.row->rule != dsbd::Rule::search) return;
        const std::size_t most = dsbd::num_searched(config_);
        const Ints best = dsbd::best_candidates(joint.log_weights, most);
        const double threshold = best.size() == most
                                     ? joint.log_weights[static_cast<std::size_t>(best.back())]
                                     : dsbd::LOG_ZERO;
        Ints slots;
        for (const auto node : nodes) slots.push_back(forest_->slot(role_, node));
        const auto found = known.left_out.read(known.known, slots, weights, threshold, most);
        written_.push_back(static_cast<std::int64_t>(found));
        if (found == dsbd::LeftOut::gone) return write(known.left_out.gone);
        write(known.joint(nodes, weights, {}));
    }

    /// Write what was drawn of candidates, in order.
    void write_drawn(const dsbd::JointDistribution& joint) {
        Floats scores(joint.num_candidates());
        dsbd::noisy(joint.log_masses(), forest_->candidate_keys(joint), DEPTH, {}, scores);
        const Ints drawn = dsbd::best_candidates(scores, num_wanted());
        const auto write_each = [&](const auto& numbers) {
            std::decay_t<decltype(numbers)> found;
            for (const auto place : drawn)
                found.push_back(numbers[static_cast<std::size_t>(place)]);
            write(found);
        };
        write_each(joint.parents);
        write_each(joint.tokens);
        write_each(joint.log_weights);
        write_each(joint.log_masses());
        write_each(joint.raw_log_probs);
    }

    void write_tops(const dsbd::Logits& logits) {
        const std::size_t number = std::min<std::size_t>(7, spec_.vocab_size);
        if (logits.num_top && !logits.full && logits.num_top < number) return;
        for (std::size_t row = 0; row < logits.num_rows; ++row) {
            Ints tokens;
            Floats logprobs;
            for (const auto& [token, logprob] : dsbd::top_logprobs_of(logits, row, number)) {
                tokens.push_back(token);
                logprobs.push_back(logprob);
            }
            write(tokens);
            write(logprobs);
        }
    }

    void write(const dsbd::JointDistribution& joint) {
        write(joint.parents);
        write(joint.tokens);
        write(joint.log_weights);
        write(joint.log_masses());
        write(joint.raw_log_probs);
        if (joint.num_candidates()) write(joint.probabilities());
        const auto& keys = forest_->candidate_keys(joint);
        Floats scores(keys.size());
        for (const std::optional<std::size_t> draw : {std::optional<std::size_t>(), {3}}) {
            dsbd::noisy(joint.log_masses(), keys, DEPTH, draw, scores);
            write(scores);
            write(dsbd::best_candidates(scores, num_wanted()));
        }
    }
    void write(const Ints& numbers) {
        written_.push_back(static_cast<std::int64_t>(numbers.size()));
        written_.insert(written_.end(), numbers.begin(), numbers.end());
    }
    void write(const Floats& numbers) {
        written_.push_back(static_cast<std::int64_t>(numbers.size()));
        for (const double number : numbers) written_.push_back(std::bit_cast<std::int64_t>(number));
    }

    const json& given_;
    dsbd::DecodingConfig config_;
    Ints prompt_;
    const std::vector<float>& floats_;
    const Ints& ids_;
    Ints& written_;
    dsbd::EngineSpec spec_;
    std::unique_ptr<dsbd::RequestProcessing> processing_;
    std::optional<dsbd::Forest> forest_;
    std::unique_ptr<Table> full_;
    dsbd::Role role_ = dsbd::Role::target;
};

}  // namespace

int main(int, char** arguments) {
    const std::string folder = arguments[1];
    std::ifstream file(folder + "/cases.json");
    const json cases = json::parse(file);
    const auto floats = read_all<float>(folder + "/floats");
    const auto ids = read_all<std::int64_t>(folder + "/ids");
    json outcomes = json::array();
    Ints written;
    for (const json& each : cases) {
        const std::size_t first = written.size();
        try {
            Case(each, folder, floats, ids, written).run();
            outcomes.push_back(written.size() - first);
        } catch (const dsbd::Error& error) {
            written.resize(first);
            outcomes.push_back(error.what());
        }
    }
    std::ofstream(folder + "/found", std::ios::binary)
        .write(reinterpret_cast<const char*>(written.data()),
               static_cast<std::streamsize>(written.size() * sizeof(std::int64_t)));
    std::cout << outcomes.dump() << "\n";
}
