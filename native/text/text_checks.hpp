// Checks of text that the export writes into a bundle: requests, and Python's answers to them.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "chat_template.hpp"
#include "json_fields.hpp"
#include "tokenizer.hpp"

namespace dsbd {

inline constexpr char TEXT_CHECKS_FILE[] = "text_checks.json";

/// Whether text is read and written as in Python.
struct TextVerdict {
    bool encodes = false, decodes = false, renders = false;
    std::string reason;  // why one is false
};

/// Answers about the tokenizers and chat templates of a folder; each is read once.
class TextAnswers {
public:
    TextAnswers(const Tokenizer& tokenizer, std::filesystem::path folder)
        : tokenizer_(tokenizer), folder_(std::move(folder)) {}

    /// Return the answer to one of the requests that main.cpp lists; Error: it is refused.
    Json answer(const JsonObject& request);
    /// Make the checks of the folder. Error: their file is damaged.
    TextVerdict verdict();

private:
    /// Return what differs from the answers of Python, an empty text if nothing does.
    std::string difference(const JsonObject& checks, const char* question);

    const Tokenizer& tokenizer_;
    std::filesystem::path folder_;
    std::optional<Tokenizer> sources_;
    std::optional<ChatTemplate> chats_;
};

}  // namespace dsbd
