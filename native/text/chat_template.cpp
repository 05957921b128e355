// The template of a bundle, read from its config or its file.
#include "chat_template.hpp"

#include <algorithm>
#include <utility>

#include "../core/error.hpp"
#include "chat_messages.hpp"
#include "unicode.hpp"

namespace dsbd {

namespace {

constexpr const char* default_name = "default";
constexpr const char* with_tools_name = "tool_use";

/// Return the templates of a config's `chat_template` by name: a text is the default.
std::map<std::string, std::string> sources_of(const Json& entry) {
    std::map<std::string, std::string> sources;
    if (entry.is_string()) sources[default_name] = entry.get<std::string>();
    for (std::size_t i = 0; entry.is_array() && i < entry.size(); ++i) {
        const Json& each = entry[i];
        if (each.is_object() && each.contains("name") && each["name"].is_string() &&
            each.contains("template") && each["template"].is_string()) {
            sources[each["name"].get<std::string>()] = each["template"].get<std::string>();
        }
    }
    return sources;
}

/// Return `bos_token`, `eos_token`, ... and `extra_special_tokens`, each a text.
Json special_tokens_of(const Json& config) {
    Json tokens = Json::object();
    const auto add = [&](const std::string& name, const Json& value) {
        const Json content =
            value.is_object() && value.contains("content") ? value["content"] : value;
        if (content.is_string()) tokens[name] = content;
    };
    constexpr std::string_view ending = "_token";
    for (const auto& [name, value] : config.items()) {
        if (name.size() >= ending.size() && name.substr(name.size() - ending.size()) == ending) {
            add(name, value);
        }
    }
    if (config.contains("extra_special_tokens") && config["extra_special_tokens"].is_object()) {
        for (const auto& [name, value] : config["extra_special_tokens"].items()) add(name, value);
    }
    return tokens;
}

/// Raise Error for a text whose spaces at an end Python would strip and minja does not.
void check_ends(const Json& text, std::size_t index) {
    std::size_t place = 0;
    const std::string& content = text.get_ref<const std::string&>();
    for_each_character(content, [&](char32_t code, std::string_view character) {
        const bool is_end = place == 0 || place + character.size() == content.size();
        const bool is_plain = code == ' ' || code == '\t' || code == '\n' || code == '\r';
        if (is_end && !is_plain && (is_space(code) || (code >= 0x1C && code <= 0x1F))) {
            throw Error("messages[" + std::to_string(index) + "] begins or ends with the space " +
                        Json(character).dump(-1, ' ', true) +
                        ", which this library does not strip; leave it out");
        }
        place += character.size();
    });
}

void check_ends(const std::string& source, const Json& messages) {
    if (source.find("strip") == std::string::npos && source.find("trim") == std::string::npos) {
        return;
    }
    for (std::size_t i = 0; i < messages.size(); ++i) {
        const Json content = messages[i].value("content", Json());
        for (const Json& part : content.is_array() ? content : Json::array({content})) {
            const Json text = part.is_object() ? part.value("text", Json()) : part;
            if (text.is_string()) check_ends(text, i);
        }
    }
}

}  // namespace

ChatTemplate::ChatTemplate(const std::filesystem::path& folder) {
    const std::filesystem::path config_file = folder / "tokenizer_config.json";
    Json config =
        std::filesystem::exists(config_file) ? json_from_file(config_file) : Json::object();
    config = config.is_object() ? config : Json::object();
    std::map<std::string, std::string> sources;
    const std::pair<const char*, std::filesystem::path> files[] = {
        {default_name, folder / "chat_template.jinja"},
        {with_tools_name, folder / "additional_chat_templates" / "tool_use.jinja"}};
    for (const auto& [name, file] : files) {
        if (const auto text = text_from_file(file)) sources[name] = *text;
    }
    if (sources.empty()) sources = sources_of(config.value("chat_template", Json()));
    for (const char* name : {default_name, with_tools_name}) {
        if (const auto found = sources.find(name); found != sources.end()) {
            sources_.emplace(name, Source{found->second, MinjaTemplate(found->second, name)});
        }
    }
    if (sources_.empty()) {
        throw Error(folder.string() +
                    " has no chat template: neither chat_template.jinja nor a "
                    "chat_template in tokenizer_config.json; give a plain prompt, or export a chat "
                    "model");
    }
    special_tokens_ = special_tokens_of(config);
}

const ChatTemplate::Source& ChatTemplate::source(bool has_tools) const {
    auto found = has_tools ? sources_.find(with_tools_name) : sources_.end();
    found = found == sources_.end() ? sources_.find(default_name) : found;
    if (found == sources_.end()) {
        throw Error(
            "this bundle has a chat template for conversations with tools only (tool_use); "
            "give tools, or add a default one, chat_template.jinja, and export again");
    }
    return found->second;
}

std::string ChatTemplate::render(const Json& messages, const Json& variables,
                                 std::optional<std::size_t> now) const {
    check_messages(messages);
    if (!variables.is_object()) {
        throw Error("variables is " + in_short(variables) + ", expected an object");
    }
    const Source& used = source(!variables.value("tools", Json()).is_null());
    check_ends(used.text, messages);
    Json context{{"tools", nullptr}, {"documents", nullptr}, {"add_generation_prompt", true}};
    context.update(special_tokens_);
    context.update(variables);
    const auto rendered = [&](const Json& conversation) {
        Json all = context;
        all["messages"] = conversation;
        return used.compiled.rendered(all, now);
    };
    const auto with_texts = [&] {
        const Json ready =
            with_joined_parts(messages_for(used.text, messages, Arguments::text), rendered);
        const std::string text = rendered(ready);
        check_traces(ready, text, rendered);
        return text;
    };
    const Json ready =
        with_joined_parts(messages_for(used.text, messages, Arguments::object), rendered);
    const std::vector<Json> arguments = arguments_in(ready);
    std::string text;
    try {
        text = rendered(ready);
    } catch (const Error&) {
        if (arguments.empty()) throw;
        return with_texts();
    }
    // A template that writes arguments out as they are expects their JSON.
    const bool expects_texts =
        std::any_of(arguments.begin(), arguments.end(), [&](const Json& each) {
            return !each.empty() && text.find(shown(each)) != std::string::npos;
        });
    if (expects_texts) return with_texts();
    check_traces(ready, text, rendered);
    return text;
}

}  // namespace dsbd
