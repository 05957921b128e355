#include "json_fields.hpp"

#include <fstream>
#include <iterator>
#include <limits>

#include "../core/error.hpp"
#include "unicode.hpp"

namespace dsbd {

namespace {

constexpr int most_depth = 200;

void check_depth(std::string_view text, const std::string& where) {
    int depth = 0;
    bool is_text = false;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (is_text) {
            i += c == '\\';
            is_text = c != '"';
        } else if (c == '"') {
            is_text = true;
        } else if (c == '[' || c == '{') {
            if (++depth > most_depth) {
                throw Error(where + " is nested deeper than " + std::to_string(most_depth) +
                            " levels; make it flatter");
            }
        } else if (c == ']' || c == '}') {
            --depth;
        }
    }
}

}  // namespace

template <class Parsed>
Parsed json_from_text(std::string_view text, const std::string& where) {
    check_depth(text, where);
    try {
        return Parsed::parse(text);
    } catch (const nlohmann::detail::exception& error) {
        throw Error(where + " is not JSON (" + text_of_bytes(error.what()) + "); export again");
    }
}

std::optional<std::string> text_from_file(const std::filesystem::path& file) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) return std::nullopt;
    return std::string(std::istreambuf_iterator<char>(stream), {});
}

template <class Parsed>
Parsed json_from_file(const std::filesystem::path& file) {
    const std::optional<std::string> text = text_from_file(file);
    if (!text) throw Error(file.string() + " cannot be read; copy or export the bundle again");
    return json_from_text<Parsed>(*text, file.string());
}

template Json json_from_text<Json>(std::string_view, const std::string&);
template SortedJson json_from_text<SortedJson>(std::string_view, const std::string&);
template Json json_from_file<Json>(const std::filesystem::path&);
template SortedJson json_from_file<SortedJson>(const std::filesystem::path&);

namespace {

std::string shortened(const std::string& text) {
    return text.size() <= 100 ? text : text.substr(0, 97) + "...";
}

}  // namespace

std::string in_short(const Json& value) {
    return shortened(value.dump(-1, ' ', true, Json::error_handler_t::replace));
}

template <class Value>
    requires std::same_as<Value, SortedJson>
std::string in_short(const Value& value) {
    return shortened(value.dump(-1, ' ', true, SortedJson::error_handler_t::replace));
}

template std::string in_short<SortedJson>(const SortedJson&);

Fields::Fields(const SortedJson& object, std::string where)
    : object_(object), where_(std::move(where)) {
    if (!object.is_object()) {
        throw Error(where_ + " is " + in_short(object) +
                    ", expected an object; export the bundle again");
    }
}

std::string Fields::place(std::string_view name) const { return where_ + ": " + std::string(name); }

const SortedJson* Fields::find(std::string_view name) {
    read_.emplace(name);
    const auto found = object_.find(std::string(name));
    return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void Fields::refuse(std::string_view name, const std::string& expected) const {
    const auto found = object_.find(std::string(name));
    throw Error(place(name) + " is " + (found == object_.end() ? "absent" : in_short(*found)) +
                ", expected " + expected + "; use the C library or callbacks for this tokenizer");
}

const SortedJson& Fields::at(std::string_view name) {
    if (const SortedJson* found = find(name)) return *found;
    refuse(name, "a value");
}

std::string Fields::text(std::string_view name) {
    const SortedJson* found = find(name);
    if (found == nullptr || !found->is_string()) refuse(name, "a text");
    return found->get<std::string>();
}

std::optional<std::string> Fields::text_or_null(std::string_view name) {
    return find(name) == nullptr ? std::nullopt : std::optional(text(name));
}

std::string Fields::character(std::string_view name) {
    const std::string found = text(name);
    if (found.empty() || scanned(found, 0).length != found.size()) refuse(name, "one character");
    return found;
}

bool Fields::flag(std::string_view name, std::optional<bool> otherwise) {
    const SortedJson* found = find(name);
    if (found == nullptr && otherwise) return *otherwise;
    if (found == nullptr || !found->is_boolean()) refuse(name, "true or false");
    return found->get<bool>();
}

std::int64_t Fields::count(std::string_view name) {
    const SortedJson* found = find(name);
    if (found == nullptr || !found->is_number_unsigned() ||
        found->get<std::uint64_t>() > std::numeric_limits<std::int32_t>::max()) {
        refuse(name, "a whole number from 0 to 2147483647");
    }
    return found->get<std::int64_t>();
}

const SortedJson& Fields::list(std::string_view name) {
    const SortedJson* found = find(name);
    if (found == nullptr || !found->is_array()) refuse(name, "a list");
    return *found;
}

void Fields::skip(std::initializer_list<std::string_view> names) {
    read_.insert(names.begin(), names.end());
}

void Fields::check_all_read() const {
    for (const auto& [name, value] : object_.items()) {
        if (read_.count(name) == 0 && !value.is_null()) {
            refuse(name, "no such field: its meaning is unknown");
        }
    }
}

std::vector<std::pair<const SortedJson*, std::string>> steps_of(const SortedJson& component,
                                                          const std::string& where,
                                                          const std::string& list) {
    std::vector<std::pair<const SortedJson*, std::string>> steps;
    if (component.is_null()) return steps;
    Fields fields(component, where);
    if (fields.text("type") != "Sequence") {
        return {{&component, where}};
    }
    const SortedJson& parts = fields.list(list);
    fields.check_all_read();
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const auto place = where + "[" + std::to_string(i) + "]";
        for (auto& step : steps_of(parts[i], place, list)) steps.push_back(std::move(step));
    }
    return steps;
}

}  // namespace dsbd
