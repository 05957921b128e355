// Decodes the whole requests of a JSON file on tables, and prints what they return as JSON.
//
//     loop_test FILE    FILE is written by tests/native/table_requests.py, which says its format
#include <bit>
#include <cstdint>
#include <deque>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "batched_decoder.hpp"
#include "constraints/token_trie.hpp"
#include "drafting/acceptance.hpp"
#include "drafting/cost_curve.hpp"
#include "drafting/ngram.hpp"
#include "error.hpp"
#include "logits_processing/path_states.hpp"
#include "table_engine.hpp"

namespace {

using dsbd::Ints;
using nlohmann::json;

/// The path ends when its last tokens are one of `wanted`.
class EndsWithAny final : public dsbd::StopState {
public:
    EndsWithAny(std::vector<Ints> wanted, Ints path, bool has_ended)
        : wanted_(std::move(wanted)), path_(std::move(path)), has_ended_(has_ended) {}

    bool has_ended() const override { return has_ended_; }
    std::shared_ptr<const StopState> extended(std::int64_t token) const override {
        Ints path = path_;
        path.push_back(token);
        bool ends = has_ended_;
        for (const Ints& tokens : wanted_) {
            ends = ends || (path.size() >= tokens.size() &&
                            std::equal(tokens.rbegin(), tokens.rend(), path.rbegin()));
        }
        return std::make_shared<EndsWithAny>(wanted_, std::move(path), ends);
    }

private:
    std::vector<Ints> wanted_;
    Ints path_;
    bool has_ended_;
};

std::int64_t bits(double number) { return std::bit_cast<std::int64_t>(number); }

json bits(const dsbd::Floats& numbers) {
    json found = json::array();
    for (double number : numbers) found.push_back(bits(number));
    return found;
}

json shown(const dsbd::TokenLogprobs& tops) {
    json found = json::array();
    for (const auto& [token, logprob] : tops) found.push_back({token, bits(logprob)});
    return found;
}

json shown(const dsbd::DecodedSequence& sequence) {
    json tops = json::array();
    for (const auto& top : sequence.top_logprobs) tops.push_back(shown(top));
    return {{"token_ids", sequence.token_ids},
            {"token_logprobs", bits(sequence.token_logprobs)},
            {"logprob", bits(sequence.logprob)},
            {"score", bits(sequence.score)},
            {"finish_reason", name_of(sequence.finish_reason)},
            {"top_logprobs", tops}};
}

json shown(const dsbd::PromptLogprobs& scored) {
    json logprobs = json::array(), tops = json::array();
    for (const auto& logprob : scored.token_logprobs) {
        logprobs.push_back(logprob ? json(bits(*logprob)) : json());
    }
    for (const auto& top : scored.top_logprobs) tops.push_back(top ? shown(*top) : json());
    return {{"token_logprobs", logprobs}, {"top_logprobs", tops}};
}

json shown(const dsbd::DecodingStats& stats) {
    return {{"num_iterations", stats.num_iterations},
            {"num_draft_tokens", stats.num_draft_tokens},
            {"num_accepted_tokens", stats.num_accepted_tokens},
            {"num_draft_layers", stats.num_draft_layers},
            {"num_accepted_layers", stats.num_accepted_layers},
            {"acceptance_histogram", stats.acceptance_histogram},
            {"mean_beam_width", bits(stats.mean_beam_width)},
            {"target_rows", stats.target_rows},
            {"target_calls", stats.target_calls},
            {"draft_rows", stats.draft_rows},
            {"draft_calls", stats.draft_calls},
            {"tokens_per_s", bits(stats.tokens_per_s)},
            {"drafter", stats.drafter},
            {"num_cached_tokens", stats.num_cached_tokens}};
}

/// Yields the same flags again and again.
class Pattern {
public:
    explicit Pattern(const json& flags) : flags_(flags.get<std::vector<bool>>()) {}
    bool next() { return flags_[next_++ % flags_.size()]; }

private:
    std::vector<bool> flags_;
    std::size_t next_ = 0;
};

/// The requests of one case on the engines that they share.
class Case {
public:
    Case(const json& given, const std::string& folder);
    json run();

private:
    struct Request {
        std::shared_ptr<dsbd::BatchMember> member;
        Ints agreed;  // number of agreed tokens after every iteration
        json outcome;
    };

    dsbd::tests::TableEngine engine_of(const json& model, const dsbd::tests::Table& table);
    dsbd::DecodingRequest request_of(const json& given, Ints& agreed);
    void admit(std::size_t number);
    void take(const dsbd::Progress& progress);

    const json& given_;
    std::string folder_;
    double now_ = 0.0;
    std::shared_ptr<dsbd::NGramPool> pool_;
    dsbd::tests::Table of_target_, of_draft_;
    dsbd::tests::TableEngine target_, draft_;
    dsbd::BatchedDecoder decoder_;
    std::vector<Request> requests_;
    std::deque<std::size_t> waiting_;  // first those that were preempted
    std::size_t num_running_ = 0;
};

dsbd::tests::Table table_of(const json& model, std::size_t vocab_size, const std::string& folder) {
    dsbd::tests::Table table;
    if (model.is_null()) return table;
    std::ifstream file(folder + model["file"].get<std::string>(), std::ios::binary);
    for (const json& path : model["paths"]) {
        std::vector<float> row(vocab_size + 1);
        const auto size = static_cast<std::streamsize>(row.size() * sizeof(float));
        if (!file.read(reinterpret_cast<char*>(row.data()), size)) {
            throw std::runtime_error("the file of a table is too short");
        }
        table[path.get<Ints>()] = std::move(row);
    }
    return table;
}

Case::Case(const json& given, const std::string& folder)
    : given_(given),
      folder_(folder),
      of_target_(table_of(given["target"], given["vocab_size"], folder)),
      of_draft_(table_of(given["draft"], given["vocab_size"], folder)),
      target_(engine_of(given["target"], of_target_)),
      draft_(engine_of(given["draft"], of_draft_)),
      decoder_(target_, given["draft"].is_null() ? nullptr : &draft_,
               {given["max_rows"].is_null()
                    ? std::nullopt
                    : std::optional<std::size_t>(given["max_rows"].get<std::size_t>()),
                true, nullptr, [this] { return now_; }}) {
    if (!given["pool"].is_null()) pool_ = std::make_shared<dsbd::NGramPool>(given["pool"]);
    requests_.resize(given["requests"].size());
}

dsbd::tests::TableEngine Case::engine_of(const json& model, const dsbd::tests::Table& table) {
    const std::size_t num_top = model.is_null() ? 0 : model["num_top"].get<std::size_t>();
    const json features = model.is_null() ? json() : model["features"];
    using dsbd::tests::FeatureKind;
    const auto kind = features.is_null()       ? FeatureKind::none
                      : features == "returned" ? FeatureKind::returned
                                               : FeatureKind::read;
    const json limit = model.is_null() ? json() : model["context_length"];
    return {table, given_["vocab_size"], num_top, now_, kind,
            limit.is_null() ? 0 : limit.get<std::size_t>()};
}

dsbd::DecodingRequest Case::request_of(const json& given, Ints& agreed) {
    dsbd::DecodingConfig config = dsbd::decoding_config(given["options"].dump());
    if (!given["trie"].is_null()) {
        const std::string file = folder_ + given["trie"].get<std::string>();
        config.constraint = std::make_shared<dsbd::TokenTrie>(dsbd::TokenTrie::load(file));
        if (auto most = config.constraint->most_tokens()) config.end_after(*most);
    }
    const dsbd::Uint128 seed = *config.seed;
    dsbd::DecodingRequest request{given["prompt"], std::move(config), dsbd::RandomGenerator(seed)};
    if (!given["begin_token"].is_null()) request.begin_token = given["begin_token"];
    const auto stop = given["stop"].get<std::vector<Ints>>();
    if (!stop.empty()) request.stop = std::make_shared<EndsWithAny>(stop, Ints{}, false);
    const double seconds = given["seconds_a_row"];
    request.costs = std::make_shared<dsbd::GivenCosts>(dsbd::EngineCosts{
        {{1.0, 16.0}, {1e-3, 1e-3 + 15 * seconds}, {}}, {{1.0, 16.0}, {1e-4, 2e-4}, {}}});
    request.estimator = std::make_shared<dsbd::AcceptanceEstimator>();
    request.ngram_pool = pool_;
    request.clock = [this] { return now_; };
    request.on_iteration = [&agreed](const dsbd::IterationOutput& output) {
        agreed.push_back(static_cast<std::int64_t>(output.agreed_tokens().size()));
    };
    if (!given["preempts"].is_null()) {
        request.preempts = [flags = given["preempts"].get<std::deque<bool>>()](
                               const dsbd::EngineCall&) mutable {
            if (flags.empty()) return false;
            const bool is_due = flags.front();
            flags.pop_front();
            return is_due;
        };
    }
    return request;
}

json Case::run() {
    Pattern admits(given_["admits"]);
    for (std::size_t number = 0; number < requests_.size(); ++number) waiting_.push_back(number);
    while (!waiting_.empty() || num_running_) {
        while (!waiting_.empty() && (!num_running_ || admits.next())) {
            const std::size_t number = waiting_.front();
            waiting_.pop_front();
            admit(number);
        }
        for (const dsbd::Progress& progress : decoder_.iterate()) take(progress);
    }
    json outcomes = json::array();
    for (Request& request : requests_) {
        request.outcome["agreed"] = request.agreed;
        outcomes.push_back(request.outcome);
    }
    return {{"outcomes", outcomes},
            {"target_calls", target_.rows_of_calls},
            {"draft_calls", draft_.rows_of_calls}};
}

void Case::admit(std::size_t number) {
    Request& request = requests_[number];
    ++num_running_;
    try {
        if (request.member) {
            decoder_.resume(request.member);
        } else {
            request.member =
                decoder_.join(request_of(given_["requests"][number], request.agreed));
        }
    } catch (const dsbd::Error& error) {
        request.outcome = {{"error", error.what()}};
        --num_running_;
    }
}

void Case::take(const dsbd::Progress& progress) {
    std::size_t number = 0;
    while (requests_[number].member != progress.member) ++number;
    Request& request = requests_[number];
    --num_running_;
    if (std::holds_alternative<dsbd::WasPreempted>(progress.event)) {
        waiting_.push_front(number);
    } else if (const auto* result = std::get_if<dsbd::DecodeResult>(&progress.event)) {
        json sequences = json::array();
        for (const auto& sequence : result->sequences) sequences.push_back(shown(sequence));
        request.outcome = {
            {"sequences", sequences},
            {"stats", shown(result->stats)},
            {"prompt_logprobs",
             result->prompt_logprobs ? shown(*result->prompt_logprobs) : json()}};
    } else {
        try {
            std::rethrow_exception(std::get<std::exception_ptr>(progress.event));
        } catch (const dsbd::Error& error) {
            request.outcome = {{"error", error.what()}};
        } catch (const std::exception& error) {
            request.outcome = {{"failure", error.what()}};
        }
    }
}

bool is_refused(const json& options) {
    try {
        dsbd::decoding_config(options.dump());
    } catch (const dsbd::Error&) {
        return true;
    }
    return false;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return std::cerr << "usage: loop_test FILE\n", 2;
    const std::string file = argv[1];
    std::ifstream stream(file);
    const json given = json::parse(stream);
    const std::string folder = file.substr(0, file.rfind('/') + 1);
    json cases = json::array(), refused = json::array();
    for (const json& each : given["cases"]) {
        try {
            cases.push_back(Case(each, folder).run());
        } catch (const std::exception& error) {
            cases.push_back({{"failure", error.what()}});
        }
    }
    for (const json& options : given["refused"]) refused.push_back(is_refused(options));
    std::cout << json{{"cases", cases}, {"refused", refused}} << "\n";
}
