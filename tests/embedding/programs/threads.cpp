// threads BUNDLE NUM_THREADS: every thread answers every line of stdin, PROMPT TAB OPTIONS, at the
// same time as the others, each beginning with another. Prints LINE TAB STREAMED TAB RESULT.
#include <cstdlib>
#include <iostream>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dsbd.h"

namespace {

struct Close {
    void operator()(dsbd_pipeline *pipeline) const { dsbd_close(pipeline); }
};
struct Free {
    void operator()(char *text) const { dsbd_free(text); }
};
using Pipeline = std::unique_ptr<dsbd_pipeline, Close>;
using Text = std::unique_ptr<char, Free>;
using Line = std::pair<std::string, std::string>;

void check(dsbd_status status)
{
    if (status != DSBD_OK)
        throw std::runtime_error(dsbd_last_error());
}

Pipeline open(const char *bundle)
{
    dsbd_pipeline *opened = nullptr;
    check(dsbd_open(bundle, R"({"num_threads": 1})", &opened));
    return Pipeline(opened);
}

int append_ids(const dsbd_step *step, void *context) noexcept
{
    auto &streamed = *static_cast<std::string *>(context);
    for (std::size_t i = 0; i < step->num_tokens; i++)
        streamed += std::to_string(step->token_ids[i]) + ' ';
    return 0;
}

std::string answer(dsbd_pipeline *pipeline, const Line &line)
{
    std::string streamed;
    dsbd_request request{};
    request.prompt = line.first.c_str();
    request.options = line.second.c_str();
    request.on_step = append_ids;
    request.on_step_context = &streamed;
    char *result = nullptr;
    check(dsbd_generate(pipeline, &request, &result));
    return streamed + '\t' + Text(result).get();
}

void answer_all(dsbd_pipeline *pipeline, const std::vector<Line> &lines, std::size_t first)
{
    static std::mutex printing;
    for (std::size_t turn = 0; turn < lines.size(); turn++) {
        const std::size_t index = (first + turn) % lines.size();
        const std::string answered = answer(pipeline, lines[index]);
        const std::lock_guard<std::mutex> lock(printing);
        std::cout << index << '\t' << answered << '\n';
    }
}

std::vector<Line> read_lines()
{
    std::vector<Line> lines;
    for (std::string line; std::getline(std::cin, line);)
        lines.emplace_back(line.substr(0, line.find('\t')), line.substr(line.find('\t') + 1));
    return lines;
}

} // namespace

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    const std::vector<Line> lines = read_lines();
    const Pipeline pipeline = open(argv[1]);
    std::vector<std::thread> threads;
    for (int i = 0; i < std::atoi(argv[2]); i++)
        threads.emplace_back(answer_all, pipeline.get(), std::cref(lines), i * lines.size() / 4);
    for (std::thread &thread : threads)
        thread.join();
}
