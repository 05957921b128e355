// dsbd_native_text FOLDER [BOS_TOKEN_ID]: the tokenizer of a folder, for checks of the library
// against Python.
//
// Each line of standard input is an object; each line of output is the answer in JSON, or
// {"error": "..."}:
//   {"encode": text, "special": true}    ids
//   {"source": text}                     ids by source_tokenizer.json
//   {"decode": ids, "special": false}    text; special: whether special tokens are spelled out
//   {"stream": ids, "after": 0}          pieces, the rest last; after: so many ids are the prompt
//   {"chat": messages, "variables": {"add_generation_prompt": true, "tools": [...]}, "now":
//   seconds}   text
//   {"check": true}                      whether all answers of text_checks.json are equal
// Of a bundle, BOS_TOKEN_ID need not be given.
#include <iostream>
#include <string>

#include "../core/error.hpp"
#include "text_checks.hpp"

namespace {

using dsbd::Json;

/// The token of a bundle's manifest, null in a folder without one.
std::optional<std::int64_t> bos_token_id_of(const std::string& folder) {
    const std::filesystem::path file = std::filesystem::path(folder) / "dsbd.json";
    if (!std::filesystem::exists(file)) return {};
    const Json manifest = dsbd::json_from_file(file);
    return dsbd::JsonObject(manifest, file.string())
        .object("target")
        .number_or_null("bos_token_id");
}

Json answer(dsbd::TextAnswers& answers, const std::string& line) {
    const auto json = dsbd::json_from_text(line, "a line");
    const dsbd::JsonObject request(json, "a line");
    if (!request.has("check")) return answers.answer(request);
    const dsbd::TextVerdict found = answers.verdict();
    return {{"encodes", found.encodes},
            {"decodes", found.decodes},
            {"renders", found.renders},
            {"reason", found.reason}};
}

}  // namespace

int main(int num_arguments, char** arguments) {
    if (num_arguments != 2 && num_arguments != 3) {
        std::cerr << "usage: dsbd_native_text FOLDER [BOS_TOKEN_ID] < requests, one a line\n";
        return 2;
    }
    try {
        const auto bos_token_id = num_arguments == 3
                                      ? std::optional<std::int64_t>(std::stoll(arguments[2]))
                                      : bos_token_id_of(arguments[1]);
        const dsbd::Tokenizer tokenizer(arguments[1], bos_token_id);
        dsbd::TextAnswers answers(tokenizer, arguments[1]);
        for (std::string line; std::getline(std::cin, line);) {
            Json found;
            try {
                found = answer(answers, line);
            } catch (const dsbd::Error& error) {
                found = {{"error", error.what()}};
            }
            std::cout << found.dump(-1, ' ', true) << '\n' << std::flush;
        }
    } catch (const std::exception& error) {
        std::cerr << "error: " << error.what() << '\n';
        return 1;
    }
    return 0;
}
