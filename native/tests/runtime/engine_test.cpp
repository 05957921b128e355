// engine_test BUNDLE ROLE: do what each line of stdin says with an engine; a line of JSON for each.
//
// {"forward": {"token_ids", "positions", "mask", "logit_rows", ...}}: mask has a text of 0 and 1
// for each row; "parent_features" names earlier forwards, those of ROLE "both" by their number. The
// answer has the bits of every float as whole numbers. {"keep": [0, 1]}, {"full": row}: the
// full logits of the last forward. With ROLE "both" a line has its own "role". Of an
// encoder-decoder a forward has "sources", lists of tokens, and "source_of_row"; {"release":
// tokens} gives one up. A further argument is the provider, with "+capture" if calls are recorded;
// {"counts": true} returns the copies and runs of its device since the last question. The provider
// "stand-in" is a device with memory of the host; {"lose": true}: it drops all calls from now on.
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "runtime/features.hpp"
#include "runtime/number_check.hpp"

namespace {

using nlohmann::json;

using AllFeatures = std::vector<std::shared_ptr<const dsbd::Features>>;

/// Equal sources are one object.
dsbd::SourcePointer source_of(const dsbd::Ints& ids) {
    static std::map<dsbd::Ints, dsbd::SourcePointer> known;
    dsbd::SourcePointer& source = known[ids];
    if (!source) source = std::make_shared<dsbd::TextSource>(ids);
    return source;
}

dsbd::Forward forward_of(const json& given, std::size_t num_rows, const AllFeatures& features) {
    dsbd::Forward forward;
    forward.token_ids = given.at("token_ids").get<dsbd::Ints>();
    forward.positions = given.at("positions").get<dsbd::Ints>();
    forward.logit_rows = given.at("logit_rows").get<dsbd::Ints>();
    forward.feature_rows = given.value("feature_rows", dsbd::Ints());
    if (given.contains("parent_features")) {
        const json& parents = given.at("parent_features");
        forward.parent_features.sources = parents.at("sources").get<dsbd::Ints>();
        forward.parent_features.rows = parents.at("rows").get<dsbd::Ints>();
        for (const auto number : parents.at("forwards").get<std::vector<std::size_t>>()) {
            forward.parent_features.forwards.push_back(features.at(number));
        }
    }
    for (const json& ids : given.value("sources", json::array())) {
        forward.sources.push_back(source_of(ids.get<dsbd::Ints>()));
    }
    forward.source_of_row = given.value("source_of_row", dsbd::Ints());
    const auto mask = given.at("mask").get<std::vector<std::string>>();
    forward.mask.reset(mask.size(), num_rows + mask.size());
    for (std::size_t s = 0; s < mask.size(); ++s) {
        for (std::size_t c = 0; c < mask[s].size(); ++c) {
            if (mask[s][c] == '1') forward.mask.set(s, c);
        }
    }
    return forward;
}

json bits_of(const float* values, std::size_t count) {
    json bits = json::array();
    for (std::size_t i = 0; i < count; ++i) bits.push_back(std::bit_cast<std::uint32_t>(values[i]));
    return bits;
}

json answer_of(const dsbd::Logits& logits) {
    const std::size_t num_rows = logits.num_rows;
    if (logits.values) return {{"logits", bits_of(logits.values, num_rows * logits.vocab_size)}};
    const std::size_t count = num_rows * logits.num_top;
    return {{"top_logits", bits_of(logits.top_logits, count)},
            {"top_ids", std::vector(logits.top_ids, logits.top_ids + count)},
            {"logsumexp", bits_of(logits.logsumexp, num_rows)},
            {"has_full", logits.full != nullptr}};
}

json features_of(const dsbd::ForwardResult& result) {
    const auto& features = static_cast<const dsbd::HostFeatures&>(*result.features);
    return bits_of(reinterpret_cast<const float*>(features.memory.data()),
                   features.num_rows * features.row_bytes / sizeof(float));
}

/// A device on the processor: values in memory of the host, which are copied as on a device.
class StandIn final : public dsbd::Device {
public:
    StandIn() : Device("stand-in:0") {}

    Ort::Session open(const std::filesystem::path& file, bool, OrtLoggingLevel) override {
        Ort::SessionOptions options;
        options.SetIntraOpNumThreads(1);
        static const Ort::Env env = dsbd::ort_environment();
        return Ort::Session(env, file.c_str(), options);
    }
    void run(Ort::Session& session, const Ort::RunOptions& options,
             const Ort::IoBinding& binding) override {
        if (!is_lost) Device::run(session, options, binding);
    }
    bool is_lost = false;

protected:
    Ort::Value created(ONNXTensorElementDataType type, const dsbd::Shape& shape) override {
        Ort::AllocatorWithDefaultOptions allocator;
        return Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), type);
    }
    void copy(const std::vector<Copy>& copies) override {
        for (const Copy& each : copies) {
            const Ort::ConstValue from{each.from};
            Ort::UnownedValue to{each.to};
            const auto info = from.GetTensorTypeAndShapeInfo();
            std::memcpy(to.GetTensorMutableRawData(), from.GetTensorRawData(),
                        dsbd::num_bytes_of(info.GetElementType(), info.GetShape()));
        }
    }
};

dsbd::EngineSettings settings_of(std::string provider) {
    dsbd::EngineSettings settings;
    settings.num_threads = 1;
    if (provider == "stand-in") {
        settings.device = std::make_shared<StandIn>();
        return settings;
    }
    const std::size_t plus = provider.find('+');
    settings.placement = dsbd::placement_of("provider", provider.substr(0, plus));
    settings.captures = plus != std::string::npos;
    if (std::getenv("DSBD_TEST_VERBOSE")) settings.log_level = ORT_LOGGING_LEVEL_VERBOSE;
    return settings;
}

json counted(dsbd::Device::Counts& counts) {
    const auto last = std::exchange(counts, {});
    return {{"uploads", last.num_uploads},
            {"downloads", last.num_downloads},
            {"runs", last.num_runs},
            {"recorded", last.num_recorded}};
}

json done(dsbd::OrtEngine& engine, dsbd::ForwardResult& last, AllFeatures& features,
          const json& line) {
    if (line.contains("forward")) {
        last = engine.forward(forward_of(line.at("forward"), engine.num_rows(), features));
        features.push_back(last.features);
        json answer = answer_of(last.logits);
        if (last.features) answer["features"] = features_of(last);
        return answer;
    }
    if (line.contains("counts")) {
        json answer = counted(engine.device()->counts());
        answer["sets_up"] = last.sets_up;
        return answer;
    }
    if (line.contains("lose")) {
        static_cast<StandIn&>(*engine.device()).is_lost = true;
        return true;
    }
    if (line.contains("release")) {
        engine.release_source(*source_of(line.at("release").get<dsbd::Ints>()));
    } else if (line.contains("keep")) {
        engine.keep(line.at("keep").get<dsbd::Ints>());
    } else {
        const auto row = last.logits.full->row(line.at("full").get<std::size_t>());
        return {{"logits", bits_of(row.data(), row.size())}};
    }
    return {{"num_rows", engine.num_rows()}, {"num_free_rows", engine.num_free_rows()}};
}

}  // namespace

int main(int count, char** arguments) {
    try {
        if (std::getenv("DSBD_TEST_VERBOSE")) new Ort::Env(ORT_LOGGING_LEVEL_VERBOSE, "test");
        const Ort::Env env = dsbd::ort_environment();
        const dsbd::Bundle bundle = dsbd::open_bundle(arguments[1]);
        std::map<std::string, std::unique_ptr<dsbd::OrtEngine>> engines;
        for (const std::string role : {"target", "draft"}) {
            if (arguments[2] != std::string("both") && arguments[2] != role) continue;
            const dsbd::OrtEngine* target = engines["target"].get();
            engines[role] = dsbd::checked_engine(
                env, bundle, role, settings_of(count > 3 ? arguments[3] : "cpu"), target);
        }
        dsbd::ForwardResult last;
        AllFeatures features;
        for (const auto& [role, engine] : engines) {  // of the check at opening
            if (engine && engine->device()) engine->device()->counts() = {};
        }
        for (std::string text; std::getline(std::cin, text);) {
            json answer;
            try {
                const json line = json::parse(text);
                const auto role = line.value("role", engines.begin()->first);
                answer = done(*engines.at(role), last, features, line);
            } catch (const dsbd::Error& error) {
                answer = {{"error", error.what()}};
            }
            std::cout << answer.dump() << std::endl;
        }
    } catch (const dsbd::Error& error) {
        std::cout << json{{"error", error.what()}}.dump() << std::endl;
        return 2;
    }
}
