// dsbd_host BUNDLE --ids 1,2,3: continue token ids with a bundle, without Python.

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "command_line.hpp"
#include "dsbd.hpp"

namespace {

void print_json(const dsbd::Result& result) {
    nlohmann::ordered_json sequences = nlohmann::ordered_json::array();
    for (const dsbd::Beam& beam : result.sequences) {
        sequences.push_back({{"token_ids", beam.token_ids},
                             {"logprob", beam.logprob},
                             {"token_logprobs", beam.token_logprobs}});
    }
    const nlohmann::ordered_json answer{{"sequences", sequences},
                                        {"target_calls", result.target_calls},
                                        {"draft_calls", result.draft_calls}};
    std::cout << answer.dump() << std::endl;
}

void print_text(const dsbd::Result& result) {
    const dsbd::Beam& best = result.sequences.front();
    for (std::size_t i = 0; i < best.token_ids.size(); ++i) {
        std::cout << (i == 0 ? "" : ",") << best.token_ids[i];
    }
    std::cout << std::endl;
    std::cerr << "logprob " << best.logprob << ", " << result.target_calls << " target calls, "
              << result.draft_calls << " draft calls" << std::endl;
}

void answer(dsbd::Pipeline& pipeline, const std::vector<std::int64_t>& ids,
            const dsbd::Options& options, bool is_json) {
    const dsbd::Result result = pipeline.generate(ids, options);
    if (is_json) {
        print_json(result);
    } else {
        print_text(result);
    }
}

/// Answer every line {"ids": [...], "seed": 0} of a file; a seed is that of the line alone.
void answer_file(dsbd::Pipeline& pipeline, const CommandLine& command) {
    std::ifstream file(*command.input_file);
    if (!file) {
        throw dsbd::Error("cannot read " + *command.input_file + "; give a file of JSON lines");
    }
    std::size_t number = 0;
    for (std::string line; std::getline(file, line);) {
        const std::string place = *command.input_file + ":" + std::to_string(++number);
        std::vector<std::int64_t> ids;
        dsbd::Options options = command.options;
        try {
            const nlohmann::json json = nlohmann::json::parse(line);
            ids = json.at("ids").get<std::vector<std::int64_t>>();
            options.seed = json.value("seed", options.seed);
        } catch (const nlohmann::json::exception& error) {
            throw dsbd::Error(place + ": " + error.what() +
                              "; expected {\"ids\": [1, 2, 3], \"seed\": 0}");
        }
        try {
            answer(pipeline, ids, options, command.is_json);
        } catch (const dsbd::Error& error) {
            throw dsbd::Error(place + ": " + error.what());
        }
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);  // ONNX Runtime's, on by default; set it to decide
    try {
        const CommandLine command = command_line_of({arguments + 1, arguments + num_arguments});
        dsbd::Pipeline pipeline(command.bundle, command.num_threads);
        if (command.input_file) {
            answer_file(pipeline, command);
        } else {
            answer(pipeline, *command.ids, command.options, command.is_json);
        }
        return 0;
    } catch (const dsbd::Error& error) {
        std::cerr << "dsbd_host: " << error.what() << std::endl;
        return 2;
    } catch (const std::exception& error) {
        std::cerr << "dsbd_host: a bug: " << error.what() << std::endl;
        return 1;
    }
}
