// service BUNDLE NUM_THREADS: answer the requests of standard input, a JSON object of options a
// line with "ids" among them, by several threads at a time, which share the calls of the engines.
//
//     echo '{"ids": [1, 2, 3], "num_beams": 2, "seed": 5}' | service bundle/ 8
#include <dsbd_native.h>

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

using Json = nlohmann::json;
using Pipeline = std::unique_ptr<dsbd_pipeline, decltype(&dsbd_close)>;
using Text = std::unique_ptr<char, decltype(&dsbd_free)>;

static std::string answer(dsbd_pipeline* pipeline, const std::string& line) {
    try {
        Json options = Json::parse(line);
        const auto ids = options.at("ids").get<std::vector<std::int64_t>>();
        options.erase("ids");
        const std::string text = options.dump();
        dsbd_request request{};
        request.prompt_ids = ids.data();
        request.num_prompt_ids = ids.size();
        request.options = text.c_str();
        char* result = nullptr;
        const dsbd_status status = dsbd_generate(pipeline, &request, &result);
        const Text owned(result, dsbd_free);
        return status == DSBD_OK ? result : Json{{"error", dsbd_last_error()}}.dump();
    } catch (const Json::exception& error) {
        return Json{{"error", error.what()}}.dump();
    }
}

int main(int num_arguments, char** arguments) {
    dsbd_pipeline* opened = nullptr;
    const int num_threads = num_arguments == 3 ? std::atoi(arguments[2]) : 0;
    if (num_threads < 1 || dsbd_open(arguments[1], "{\"max_queued\": 1024}", &opened) != DSBD_OK) {
        std::cerr << (opened || num_threads < 1 ? "usage: service BUNDLE NUM_THREADS"
                                                : dsbd_last_error()) << std::endl;
        return EXIT_FAILURE;
    }
    const Pipeline pipeline(opened, dsbd_close);
    std::vector<std::string> lines, answers;
    for (std::string line; std::getline(std::cin, line);) lines.push_back(line);
    answers.resize(lines.size());
    std::atomic<std::size_t> next = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < num_threads; ++i) {
        threads.emplace_back([&] {
            for (std::size_t k = next++; k < lines.size(); k = next++) {
                answers[k] = answer(pipeline.get(), lines[k]);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& text : answers) std::cout << text << '\n';
}
