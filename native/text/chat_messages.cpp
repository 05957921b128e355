// Messages of a chat, from JSON: contents as texts or parts.
#include "chat_messages.hpp"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <set>

#include "../core/error.hpp"
#include "unicode.hpp"

namespace dsbd {

namespace {

constexpr std::string_view mark_begin = "7031664";  // digits: no filter for case hides them
constexpr std::string_view mark_end = "9452738";

std::string place_of(std::size_t index) { return "messages[" + std::to_string(index) + "]"; }

/// Return a field of an object, null if it is absent.
const Json& field(const Json& object, const char* name) {
    static const Json null;
    const auto found = object.is_object() ? object.find(name) : object.end();
    return !object.is_object() || found == object.end() ? null : *found;
}

void check_parts(const Json& content, const std::string& place) {
    for (std::size_t i = 0; content.is_array() && i < content.size(); ++i) {
        const Json& kind = field(content[i], "type");
        if (content[i].is_object() && content[i].contains("type") && kind != "text") {
            throw Error(place + ".content[" + std::to_string(i) + "] is a part of type " +
                        in_short(kind) +
                        ": images and audio cannot be read; use parts of type "
                        "'text'");
        }
        if (!(content[i].is_object() ? field(content[i], "text") : content[i]).is_string()) {
            throw Error(place + ".content[" + std::to_string(i) + "] is " + in_short(content[i]) +
                        "; expected a text, or a part such as "
                        "{\"type\": \"text\", \"text\": \"Hello\"}");
        }
    }
}

/// Return arguments, given as an object or its JSON, in a form.
Json arguments_of(const Json& given, const std::string& place, Arguments form) {
    std::string text = given.is_string() ? given.get<std::string>() : python_json(given);
    text = text.find_first_not_of(" \t\r\n") == std::string::npos ? "{}" : text;
    const Json values = json_from_text(text, place);
    if (!values.is_object()) {
        throw Error(place + " is " + in_short(given) +
                    ", which is not a JSON object; give the "
                    "arguments as one, such as {\"city\": \"Rome\"}");
    }
    return form == Arguments::object ? values : Json(text);
}

Json call_for(const Json& call, const std::string& place, Arguments form) {
    if (!call.is_object()) {
        throw Error(place + " is " + in_short(call) + "; expected an object with a function");
    }
    Json ready = call;
    if (field(call, "function").is_object()) {
        ready["function"] = call_for(call["function"], place + ".function", form);
    } else if (call.contains("arguments")) {
        ready["arguments"] = arguments_of(call["arguments"], place + ".arguments", form);
    }
    return ready;
}

constexpr std::size_t of_name = 999;  // number of a message's name; its calls have smaller ones

std::size_t number(std::size_t index, std::size_t call = 0) {
    return index * 1000 + std::min(call, of_name);
}

std::string mark(std::size_t number) {
    const std::string digits = std::to_string(number);
    return std::string(mark_begin) +
           std::string(12 - std::min<std::size_t>(digits.size(), 12), '0') + digits +
           std::string(mark_end);
}

Json& function_of(Json& call) {
    return call.contains("function") && call["function"].is_object() ? call["function"] : call;
}

Json named(Json call, const std::string& name) {
    function_of(call)["name"] = name;
    return call;
}

bool has_name(const Json& message) {
    const Json& name = field(message, "name");
    return !name.is_null() && name != "";
}

/// Return a message whose name, if it has one, is a mark.
Json with_name(Json message, std::size_t index) {
    if (has_name(message)) message["name"] = mark(number(index, of_name));
    return message;
}

std::size_t num_calls(const Json& message) {
    const Json& calls = field(message, "tool_calls");
    return calls.is_array() ? calls.size() : 0;
}

/// Return a message whose texts, and whose calls' names, are marks.
Json marked(const Json& message, std::size_t index) {
    Json ready = message;
    const Json& content = field(message, "content");
    const std::size_t count = num_calls(message);
    for (std::size_t i = 0; i < count; ++i) {
        ready["tool_calls"][i] = named(message["tool_calls"][i], mark(number(index, i + 1)));
    }
    if (content.is_array()) {
        for (Json& part : ready["content"]) {
            if (part.is_object() && part.contains("text")) part["text"] = mark(number(index));
        }
    } else if (count == 0 || !(content.is_null() || content == "")) {
        ready["content"] = mark(number(index));
    }
    return ready;
}

std::optional<std::string> attempt(const Render& render, const Json& messages) {
    try {
        return render(messages);
    } catch (const Error&) {
        return std::nullopt;
    }
}

/// Return the marks of a text, except those after one of these endings.
std::set<std::string> marks_in(const std::string& text,
                               std::initializer_list<std::string_view> except_after = {}) {
    std::set<std::string> found;
    const std::size_t length = mark(0).size();
    for (std::size_t at = text.find(mark_begin); at != std::string::npos;
         at = text.find(mark_begin, at + 1)) {
        const std::string_view before = std::string_view(text).substr(0, at);
        const bool is_left_out =
            std::any_of(except_after.begin(), except_after.end(),
                        [&](std::string_view ending) { return before.ends_with(ending); });
        if (!is_left_out) found.insert(text.substr(at, length));
    }
    return found;
}

/// Whether a part of a message without visible marks has no influence on the prompt: another value
/// gives the same prompt. If the template refuses marks there, the part is left out instead.
/// other: the message with marks in that part; rest: without the part, no value: without any.
bool is_lost(const Json& messages, std::size_t index, const Json& other,
             const std::optional<Json>& rest, const std::string& text, const Render& render) {
    Json others = messages;
    others[index] = other;
    std::optional<std::string> prompt;
    if (other != messages[index]) prompt = attempt(render, others);
    if (!prompt) {
        rest ? void(others[index] = *rest) : others.erase(index);
        prompt = attempt(render, others);
    }
    return prompt == text;
}

/// Return a content of texts alone as one text, a line end between two parts.
Json joined_text(const Json& parts) {
    std::string text;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const Json& part = parts[i].is_object() ? parts[i]["text"] : parts[i];
        text += (i == 0 ? "" : "\n") + part.get_ref<const std::string&>();
    }
    return text;
}

Error lost(const std::string& place, const Json& message) {
    return Error(place + ", of role " + in_short(message["role"]) +
                 ", leaves no trace in the prompt: the chat template of this model has no place "
                 "for it; leave it out, or use a role and an order of messages that the template "
                 "reads");
}

/// Raise Error for a name that leaves no trace; a result may have that of a call before it.
void check_name(const Json& messages, std::size_t index, const std::vector<Json>& called,
                const std::set<std::string>& marks, const std::string& text, const Render& render) {
    const Json& message = messages[index];
    if (!has_name(message) || marks.count(mark(number(index, of_name))) != 0) return;
    const Json& name = message["name"];
    if (message["role"] == "tool" &&
        std::find(called.begin(), called.end(), name) != called.end()) {
        return;
    }
    Json unnamed = message;
    unnamed.erase("name");
    if (!is_lost(messages, index, with_name(message, index), unnamed, text, render)) return;
    throw Error(place_of(index) + ".name is " + in_short(name) +
                ", which leaves no trace in the "
                "prompt: the chat template of this model has no place for names there; leave it "
                "out, or write it into the content");
}

}  // namespace

void check_messages(const Json& messages) {
    if (!messages.is_array() || messages.empty()) {
        throw Error("messages is " + in_short(messages) +
                    "; expected a list such as "
                    "[{\"role\": \"user\", \"content\": \"Hello\"}]");
    }
    for (std::size_t i = 0; i < messages.size(); ++i) {
        if (!field(messages[i], "role").is_string()) {
            throw Error(place_of(i) + " is " + in_short(messages[i]) +
                        "; expected an object with a text as its role, such as "
                        "{\"role\": \"user\", \"content\": \"Hello\"}");
        }
        check_parts(field(messages[i], "content"), place_of(i));
    }
}

Json messages_for(const std::string& source, const Json& messages, Arguments form) {
    const bool knows_developer = source.find("\"developer\"") != std::string::npos ||
                                 source.find("'developer'") != std::string::npos;
    Json prepared = Json::array();
    for (std::size_t i = 0; i < messages.size(); ++i) {
        Json ready = Json::object();
        for (const auto& [name, value] : messages[i].items()) {
            if (!value.is_null()) {  // as in transformers, a null field is absent
                ready[name] = value;
            }
        }
        if (ready["role"] == "developer" && !knows_developer) ready["role"] = "system";
        const std::string place = place_of(i) + ".tool_calls";
        const Json calls = field(ready, "tool_calls");
        if (!calls.is_null() && calls != "" && calls != Json::array()) {
            if (source.find("tool_calls") == std::string::npos) {
                throw Error(place +
                            " is given, but the chat template of this model does not read "
                            "tool calls; leave them out");
            }
            if (!calls.is_array()) {
                throw Error(place + " is " + in_short(calls) + "; expected a list of calls");
            }
            for (std::size_t k = 0; k < calls.size(); ++k) {
                ready["tool_calls"][k] =
                    call_for(calls[k], place + "[" + std::to_string(k) + "]", form);
            }
        }
        prepared.push_back(std::move(ready));
    }
    return prepared;
}

Json with_joined_parts(Json messages, const Render& render) {
    Json probe = messages;
    bool has_parts = false;
    for (std::size_t i = 0; i < messages.size(); ++i) {
        if (!field(messages[i], "content").is_array()) continue;
        has_parts = true;
        for (std::size_t k = 0; k < probe[i]["content"].size(); ++k) {
            Json& part = probe[i]["content"][k];
            if (part.is_object()) part["text"] = mark(number(i, k));
        }
    }
    if (!has_parts) return messages;
    const std::set<std::string> marks =
        marks_in(attempt(render, probe).value_or(""), {"text': '", "text\": \"", "text\":\""});
    for (std::size_t i = 0; i < messages.size(); ++i) {
        const Json parts = field(messages[i], "content");
        if (!parts.is_array()) continue;
        bool is_read = !parts.empty();
        for (std::size_t k = 0; k < parts.size(); ++k) {
            is_read = is_read && marks.count(mark(number(i, k))) != 0;
        }
        if (!is_read) messages[i]["content"] = joined_text(parts);
    }
    return messages;
}

void check_traces(const Json& messages, const std::string& text, const Render& render) {
    Json all = Json::array();
    for (std::size_t i = 0; i < messages.size(); ++i) {
        all.push_back(with_name(marked(messages[i], i), i));
    }
    std::vector<Json> called;
    const std::set<std::string> marks = marks_in(attempt(render, all).value_or(""));
    for (std::size_t i = 0; i < messages.size(); ++i) {
        std::optional<std::size_t> first_missing;
        bool has_call = false;
        for (std::size_t k = 0; k < num_calls(messages[i]); ++k) {
            if (marks.count(mark(number(i, k + 1))) != 0) {
                has_call = true;
            } else if (!first_missing) {
                first_missing = k;
            }
        }
        if (has_call && first_missing) {
            throw lost(place_of(i) + ".tool_calls[" + std::to_string(*first_missing) + "]",
                       messages[i]);
        }
        if (!has_call && marks.count(mark(number(i))) == 0 &&
            is_lost(messages, i, marked(messages[i], i), std::nullopt, text, render)) {
            throw lost(place_of(i), messages[i]);
        }
        check_name(messages, i, called, marks, text, render);
        for (std::size_t k = 0; k < num_calls(messages[i]); ++k) {
            Json call = messages[i]["tool_calls"][k];
            called.push_back(function_of(call)["name"]);
        }
    }
}

std::vector<Json> arguments_in(const Json& messages) {
    std::vector<Json> found;
    for (const Json& message : messages) {
        for (std::size_t i = 0; i < num_calls(message); ++i) {
            const Json& call = message["tool_calls"][i];
            const Json& function = field(call, "function");
            const Json& arguments = field(function.is_object() ? function : call, "arguments");
            if (!arguments.is_null()) found.push_back(arguments);
        }
    }
    return found;
}

std::string python_json(const Json& value) {
    if (!value.is_structured()) return value.dump();
    std::string text;
    for (const auto& [name, each] : value.items()) {
        text += text.empty() ? "" : ", ";
        text += (value.is_object() ? Json(name).dump() + ": " : "") + python_json(each);
    }
    return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

}  // namespace dsbd
