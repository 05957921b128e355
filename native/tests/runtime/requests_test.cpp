// requests_test BUNDLE [SETTINGS]: decode the requests of each line of stdin together; a line of
// JSON for each. SETTINGS: of dsbd_open.
//
// A line is a list of requests: {"prompt" or "ids", "options", "preempts"}; preempts: whether the
// rows are dropped before each of the first engine calls. All are prepared, then those that are
// valid join in their order. The answer is a list of results as `dsbd-run --json` prints them, or
// of {"error"}.
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "batched_decoder.hpp"
#include "runtime/service.hpp"

namespace {

using dsbd::Json;

dsbd::PreparedRequest prepared(dsbd::Pipeline& pipeline, const Json& given) {
    const std::string options = given.at("options").dump();
    const auto text = given.value("prompt", std::string());
    const auto ids = given.value("ids", dsbd::Ints());
    const dsbd::Prompt prompt = given.contains("ids") ? dsbd::Prompt(dsbd::TokenSpan(ids))
                                                      : dsbd::Prompt(std::string_view(text));
    dsbd::PreparedRequest request = pipeline.prepare(prompt, options);
    request.request.preempts = [flags = given.value("preempts", std::vector<bool>()),
                                next = std::size_t{0}](const dsbd::EngineCall&) mutable {
        return next < flags.size() && flags[next++];
    };
    return request;
}

Json result_of(const dsbd::DecodeResult& decoded, const dsbd::TextRun* start,
               const dsbd::DecodingConfig& config) {
    dsbd::GenerationResult result{decoded, {}, static_cast<std::uint64_t>(*config.seed)};
    for (const auto& sequence : decoded.sequences) {
        if (start) result.texts.push_back(text_until_stop(*start, sequence.token_ids, config));
    }
    return Json::parse(result.json());
}

Json error_of(std::exception_ptr error) {
    try {
        std::rethrow_exception(error);
    } catch (const dsbd::Error& known) {
        return {{"error", known.what()}};
    }
}

Json answers(dsbd::Pipeline& pipeline, const Json& given) {
    pipeline.target().keep({});
    if (pipeline.draft()) pipeline.draft()->keep({});
    std::vector<Json> found(given.size());
    std::vector<dsbd::PreparedRequest> requests;
    std::vector<std::size_t> numbers;
    for (std::size_t i = 0; i < given.size(); ++i) {
        try {
            requests.push_back(prepared(pipeline, given[i]));
            numbers.push_back(i);
        } catch (const dsbd::Error&) {
            found[i] = error_of(std::current_exception());
        }
    }
    dsbd::BatchedDecoder decoder(pipeline.target(), pipeline.draft());
    std::map<const dsbd::LiveRequest*, std::size_t> live;
    for (std::size_t i = 0; i < requests.size(); ++i) {
        live[decoder.join(requests[i].request).get()] = i;
    }
    while (!live.empty()) {
        for (const dsbd::Progress& progress : decoder.iterate()) {
            if (std::holds_alternative<dsbd::WasPreempted>(progress.event)) {
                decoder.resume(progress.live);
                continue;
            }
            const std::size_t i = live.extract(progress.live.get()).mapped();
            const auto* result = std::get_if<dsbd::DecodeResult>(&progress.event);
            found[numbers[i]] =
                result ? result_of(*result, requests[i].start.get(), requests[i].request.config)
                       : error_of(std::get<std::exception_ptr>(progress.event));
        }
    }
    return found;
}

}  // namespace

int main(int count, char** arguments) {
    try {
        const auto settings =
            dsbd::PipelineSettings::of(count > 2 ? arguments[2] : R"({"num_threads": 1})");
        dsbd::Pipeline pipeline(arguments[1], settings);
        for (std::string text; std::getline(std::cin, text);) {
            std::cout << answers(pipeline, Json::parse(text)).dump() << std::endl;
        }
    } catch (const dsbd::Error& error) {
        std::cout << Json{{"error", error.what()}}.dump() << std::endl;
        return 2;
    }
}
