// dsbd_native_text FOLDER [BOS_TOKEN_ID]: the tokenizer of a folder, for checks of the library against Python.
//
// Each line of standard input is an object; each line of output is the answer in JSON, or
// {"error": "..."}:
//   {"encode": text, "special": true}    ids
//   {"source": text}                     ids by source_tokenizer.json
//   {"decode": ids, "special": false}    text; special: whether special tokens are spelled out
//   {"stream": ids, "after": 0}          pieces, the rest last; after: so many ids are the prompt
//   {"chat": messages, "variables": {"add_generation_prompt": true, "tools": [...]}}   text
#include <iostream>
#include <string>

#include "../core/error.hpp"
#include "chat_template.hpp"
#include "stream_decoder.hpp"
#include "tokenizer.hpp"

namespace {

using dsbd::Json;
using dsbd::JsonObject;

std::vector<std::int64_t> ids_in(const JsonObject& request, const char* name) {
    std::vector<std::int64_t> ids;
    for (const Json& id : request.list(name)) {
        ids.push_back(id.is_number_integer() ? id.get<std::int64_t>() : -1);
    }
    return ids;
}

Json streamed(const dsbd::Tokenizer& tokenizer, const JsonObject& request) {
    const std::vector<std::int64_t> all = ids_in(request, "stream");
    const dsbd::TokenIds ids(all);
    const auto after = std::min(request.number("after"), ids.size());
    auto window = dsbd::TextWindow::after(tokenizer, ids.first(after));
    Json pieces = Json::array();
    for (std::size_t i = after; i < ids.size(); ++i) {
        pieces.push_back(window.push(ids.subspan(i, 1)));
    }
    pieces.push_back(window.rest());
    return pieces;
}

Json rendered(const std::string& folder, const JsonObject& request) {
    const Json& messages = request.value("chat");
    static const dsbd::ChatTemplate chat_template(folder);
    return chat_template.render(messages, request.json().value("variables", Json::object()));
}

Json answer(const dsbd::Tokenizer& tokenizer, const std::string& folder, const std::string& line) {
    const auto json = dsbd::json_from_text(line, "a line");
    const JsonObject request(json, "a line");
    if (request.has("encode")) {
        return tokenizer.encode(request.text("encode"), request.boolean("special", true));
    }
    if (request.has("source")) {
        static const dsbd::Tokenizer sources(folder, std::nullopt, dsbd::SOURCE_TOKENIZER_FILE);
        return sources.encode(request.text("source"));
    }
    if (request.has("decode")) {
        return tokenizer.decode(ids_in(request, "decode"), !request.boolean("special", false));
    }
    if (request.has("stream")) return streamed(tokenizer, request);
    return rendered(folder, request);
}

}  // namespace

int main(int num_arguments, char** arguments) {
    if (num_arguments != 2 && num_arguments != 3) {
        std::cerr << "usage: dsbd_native_text FOLDER [BOS_TOKEN_ID] < requests, one a line\n";
        return 2;
    }
    try {
        const auto bos_token_id =
            num_arguments == 3 ? std::optional<std::int64_t>(std::stoll(arguments[2])) : std::nullopt;
        const dsbd::Tokenizer tokenizer(arguments[1], bos_token_id);
        for (std::string line; std::getline(std::cin, line);) {
            Json found;
            try {
                found = answer(tokenizer, arguments[1], line);
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
