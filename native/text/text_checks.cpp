// The checks of a bundle's text, run one after another.
#include "text_checks.hpp"

#include <algorithm>
#include <vector>

#include "../core/error.hpp"
#include "stream_decoder.hpp"

namespace dsbd {

namespace {

std::vector<std::int64_t> ids_in(const JsonObject& request, const char* name) {
    std::vector<std::int64_t> ids;
    for (const Json& id : request.list(name)) {
        ids.push_back(id.is_number_integer() ? id.get<std::int64_t>() : -1);
    }
    return ids;
}

Json streamed(const Tokenizer& tokenizer, const JsonObject& request) {
    const std::vector<std::int64_t> all = ids_in(request, "stream");
    const TokenIds ids(all);
    const auto after = std::min(request.number("after"), ids.size());
    auto window = TextWindow::after(tokenizer, ids.first(after));
    Json pieces = Json::array();
    for (std::size_t i = after; i < ids.size(); ++i) {
        pieces.push_back(window.push(ids.subspan(i, 1)));
    }
    pieces.push_back(window.rest());
    return pieces;
}

/// Return what a message shows of a value.
std::string shown_in_check(const Json& value) {
    constexpr std::size_t MOST_BYTES = 150;
    return value.dump(-1, ' ', true).substr(0, MOST_BYTES);
}

}  // namespace

Json TextAnswers::answer(const JsonObject& request) {
    if (request.has("encode")) {
        return tokenizer_.encode(request.text("encode"), request.boolean("special", true));
    }
    if (request.has("source")) {
        if (!sources_) sources_.emplace(folder_, std::nullopt, SOURCE_TOKENIZER_FILE);
        return sources_->encode(request.text("source"));
    }
    if (request.has("decode")) {
        return tokenizer_.decode(ids_in(request, "decode"), !request.boolean("special", false));
    }
    if (request.has("stream")) return streamed(tokenizer_, request);
    const Json& messages = request.value("chat");
    if (!chats_) chats_.emplace(folder_);
    return chats_->render(messages, request.json().value("variables", Json::object()),
                          request.number_or_null("now"));
}

std::string TextAnswers::difference(const JsonObject& checks, const char* question) {
    for (const Json& check : checks.list(question)) {
        if (!check.is_array() || check.size() != 2) {
            throw mismatch_error("a request and its answer", check, checks.where());
        }
        const Json &request = check[0], &wanted = check[1];
        Json found;
        try {
            found = answer(JsonObject(request, checks.where()));
        } catch (const Error& error) {
            if (wanted.is_null()) continue;  // Python refuses it as well
            return error.what();
        }
        if (found != wanted) {
            return shown_in_check(request) + " gives " + shown_in_check(found) + ", in Python " +
                   (wanted.is_null() ? "it is refused" : shown_in_check(wanted));
        }
    }
    return "";
}

TextVerdict TextAnswers::verdict() {
    const std::filesystem::path file = folder_ / TEXT_CHECKS_FILE;
    const Json content = json_from_file(file);
    const JsonObject checks(content, file.string());
    const std::string encodes = difference(checks, "encodes");
    const std::string decodes = difference(checks, "decodes");
    const std::string renders = checks.list("renders").empty()
                                    ? "the checkpoint has no chat template"
                                    : difference(checks, "renders");
    TextVerdict found{encodes.empty(), decodes.empty(), renders.empty(), ""};
    for (const std::string& reason : {encodes, decodes, renders}) {
        found.reason += (reason.empty() || found.reason.empty() ? "" : "; ") + reason;
    }
    return found;
}

}  // namespace dsbd
