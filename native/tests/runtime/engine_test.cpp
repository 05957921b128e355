// engine_test BUNDLE ROLE: do what each line of stdin says with an engine; a line of JSON for each.
//
// {"forward": {"token_ids", "positions", "mask", "logit_rows", ...}}: mask has a text of 0 and 1
// for each row. The answer has the bits of every float as whole numbers. {"keep": [0, 1]},
// {"expect": 300}, {"full": row}: the full logits of the last forward.
#include <bit>
#include <cstdint>
#include <iostream>
#include <string>

#include <nlohmann/json.hpp>

#include "runtime/ort_engine.hpp"

namespace {

using nlohmann::json;

dsbd::Forward forward_of(const json& given, std::size_t num_rows) {
    dsbd::Forward forward;
    forward.token_ids = given.at("token_ids").get<dsbd::Ints>();
    forward.positions = given.at("positions").get<dsbd::Ints>();
    forward.logit_rows = given.at("logit_rows").get<dsbd::Ints>();
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

json done(dsbd::OrtEngine& engine, dsbd::ForwardResult& last, const json& line) {
    if (line.contains("forward")) {
        last = engine.forward(forward_of(line.at("forward"), engine.num_rows()));
        return answer_of(last.logits);
    }
    if (line.contains("keep")) {
        engine.keep(line.at("keep").get<dsbd::Ints>());
    } else if (line.contains("expect")) {
        engine.expect(line.at("expect").get<std::size_t>());
    } else {
        std::vector<float> row(engine.spec().vocab_size);
        last.logits.full->read(line.at("full").get<std::size_t>(), row);
        return {{"logits", bits_of(row.data(), row.size())}};
    }
    return {{"num_rows", engine.num_rows()}, {"num_free_rows", engine.num_free_rows()}};
}

}  // namespace

int main(int, char** arguments) {
    try {
        const Ort::Env env = dsbd::ort_environment();
        const dsbd::Bundle bundle = dsbd::open_bundle(arguments[1]);
        dsbd::OrtEngine engine(env, bundle, arguments[2], {1, 20});
        dsbd::ForwardResult last;
        for (std::string line; std::getline(std::cin, line);) {
            json answer;
            try {
                answer = done(engine, last, json::parse(line));
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
