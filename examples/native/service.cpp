// service BUNDLE NUM_THREADS [OPTIONS]: continue each line of standard input, by several threads at
// a time, which share the calls of the engines.
//
//     export PKG_CONFIG_PATH=DIR/lib/pkgconfig   # DIR: where dsbd_native is installed
//     libraries=$(pkg-config --variable=libdir dsbd_native)
//     c++ -std=c++17 service.cpp $(pkg-config --cflags --libs dsbd_native) -Wl,-rpath,"$libraries" -pthread -o service
//     printf 'def read_json(\nimport os\n' | ./service bundle/ 8 '{"num_beams": 2, "seed": 5}'
#include <dsbd_native.h>

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using Pipeline = std::unique_ptr<dsbd_pipeline, decltype(&dsbd_close)>;
using Text = std::unique_ptr<char, decltype(&dsbd_free)>;

/// The result in JSON, one line, or the error.
static std::string answer(dsbd_pipeline* pipeline, const std::string& line, const char* options) {
    dsbd_request request{};
    request.prompt = line.c_str();
    request.options = options;
    char* result = nullptr;
    const dsbd_status status = dsbd_generate(pipeline, &request, &result);
    const Text owned(result, dsbd_free);
    return status == DSBD_OK ? result : std::string("error: ") + dsbd_last_error();
}

int main(int num_arguments, char** arguments) {
    dsbd_pipeline* opened = nullptr;
    const int num_threads = num_arguments == 3 || num_arguments == 4 ? std::atoi(arguments[2]) : 0;
    if (num_threads < 1 || dsbd_open(arguments[1], "{\"max_queued\": 1024}", &opened) != DSBD_OK) {
        std::cerr << (num_threads < 1 ? "usage: service BUNDLE NUM_THREADS [OPTIONS]"
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
                answers[k] = answer(pipeline.get(), lines[k], arguments[3]);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& text : answers) std::cout << text << '\n';
}
