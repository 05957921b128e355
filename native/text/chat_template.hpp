// Chat template of a bundle: converts messages to the text that the model was trained on.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "json_fields.hpp"
#include "minja_template.hpp"

namespace dsbd {

/// The templates of a bundle: for conversations without and with tools. Threads may share it.
///
/// minja is not jinja2, and templates are programs: text_checks.hpp says whether the text is that
/// of the Python library.
class ChatTemplate {
public:
    /// Read chat_template.jinja and additional_chat_templates/tool_use.jinja of a folder, or else
    /// `chat_template` of its tokenizer_config.json.
    explicit ChatTemplate(const std::filesystem::path& folder);

    /// Return the text of a conversation, all special tokens spelled out.
    ///
    /// variables: an object, variables of the template such as `tools`; `add_generation_prompt`,
    ///     true unless given: end with the beginning of the model's answer.
    /// now: the time of `strftime_now` in seconds, shown in UTC; none: this moment, local time.
    /// Error: the messages are invalid, refused by the template, or one leaves no trace.
    std::string render(const Json& messages, const Json& variables = Json::object(),
                       std::optional<std::size_t> now = {}) const;

private:
    struct Source {
        std::string text;
        MinjaTemplate compiled;
    };

    const Source& source(bool has_tools) const;

    std::map<std::string, Source> sources_;  // by name
    Json special_tokens_ = Json::object();   // by name
};

}  // namespace dsbd
