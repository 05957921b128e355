// pipelines BUNDLE SETTINGS OPTIONS OPTIONS: requests to two pipelines at a time, one of which is
// closed meanwhile. Prints the token ids of four requests, a line each: of each pipeline, then of
// the thread whose pipeline was closed, then of a pipeline that was opened last.
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>

#include <dsbd_native.h>
#include <nlohmann/json.hpp>

namespace {

const std::int64_t IDS[] = {5, 6, 7, 8};

void fail() {
    std::cerr << dsbd_last_error() << std::endl;
    std::exit(2);
}

dsbd_pipeline* opened(char** arguments) {
    dsbd_pipeline* pipeline = nullptr;
    if (dsbd_open(arguments[1], arguments[2], &pipeline) != DSBD_OK) fail();
    return pipeline;
}

int note_step(const dsbd_step*, void* context) {
    *static_cast<std::atomic<bool>*>(context) = true;
    return 0;
}

/// has_begun: set at the first step.
std::string answer(dsbd_pipeline* pipeline, const char* options, std::atomic<bool>* has_begun) {
    dsbd_request request{};
    request.prompt_ids = IDS;
    request.num_prompt_ids = 4;
    request.options = options;
    request.on_step = note_step;
    request.on_step_context = has_begun;
    char* result = nullptr;
    if (dsbd_generate(pipeline, &request, &result) != DSBD_OK) fail();
    const auto parsed = nlohmann::json::parse(result);
    dsbd_free(result);
    return parsed["sequences"][0]["token_ids"].dump();
}

}  // namespace

int main(int, char** arguments) {
    dsbd_pipeline *one = opened(arguments), *two = opened(arguments);
    const char *of_one = arguments[3], *of_two = arguments[4];
    std::string answers[4];
    std::atomic<bool> has_begun{false}, ignored{false};
    std::thread first([&] { answers[0] = answer(one, of_one, &ignored); });
    answers[1] = answer(two, of_two, &ignored);
    first.join();
    std::thread running([&] { answers[2] = answer(one, of_one, &has_begun); });
    while (!has_begun) std::this_thread::yield();
    if (dsbd_close(one) != DSBD_OK) fail();  // waits for the request
    running.join();
    if (dsbd_close(two) != DSBD_OK) fail();
    dsbd_pipeline* last = opened(arguments);
    answers[3] = answer(last, of_two, &ignored);
    if (dsbd_close(last) != DSBD_OK) fail();
    for (const std::string& each : answers) std::cout << each << '\n';
}
