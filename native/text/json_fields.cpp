// Fields of a JSON object, each of its kind or an error.
#include "json_fields.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>

#include "unicode.hpp"

namespace dsbd {

namespace {

constexpr int MOST_DEPTH = 200;  // readers recurse

std::string whole_number(std::uint64_t least, std::uint64_t most) {
    return "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
}

void add_steps(JsonObject component, std::string_view list, std::vector<JsonObject>& steps) {
    if (component.text("type") != "Sequence") return steps.push_back(std::move(component));
    for (JsonObject& part : component.objects(list)) add_steps(std::move(part), list, steps);
    component.check_all_read();
}

}  // namespace

Json json_from_text(std::string_view text, const std::string& where, const JsonFilter& filter) {
    const auto checked = [&](int depth, Json::parse_event_t event, Json& value) {
        if (depth > MOST_DEPTH) {
            throw Error(where + " is nested deeper than " + std::to_string(MOST_DEPTH) +
                        " levels; make it flatter");
        }
        return !filter || filter(depth, event, value);
    };
    try {
        return Json::parse(text, checked);
    } catch (const Json::exception& error) {
        throw Error(where + " is invalid JSON (" + text_of_bytes(error.what()) + "); correct it");
    }
}

std::optional<std::string> text_from_file(const std::filesystem::path& file) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) return std::nullopt;
    std::string text(std::istreambuf_iterator<char>(stream), {});
    if (text.rfind("version https://git-lfs", 0) == 0) {
        throw Error(file.string() +
                    " is a pointer of git LFS, not the file itself; run 'git lfs "
                    "pull' in " +
                    std::filesystem::absolute(file).parent_path().string());
    }
    return text;
}

Json json_from_file(const std::filesystem::path& file, const JsonFilter& filter) {
    const std::optional<std::string> text = text_from_file(file);
    if (!text) throw Error(file.string() + " cannot be read; copy or export the bundle again");
    return json_from_text(*text, file.string(), filter);
}

bool is_whole(const Json& value, std::uint64_t least, std::uint64_t most) {
    return value.is_number_unsigned() && value.get<std::uint64_t>() >= least &&
           value.get<std::uint64_t>() <= most;
}

std::string in_short(const Json& value) {
    const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() <= 100 ? text : text.substr(0, 97) + "...";
}

Error mismatch_error(std::string_view expected, const Json& value, std::string_view where,
                     std::string_view remedy) {
    return Error(std::string(where) + " is " + in_short(value) + ", expected " +
                 std::string(expected) + "; " + std::string(remedy));
}

JsonObject::JsonObject(const Json& json, std::string where, std::string_view remedy)
    : json_(&json), where_(std::move(where)), remedy_(remedy) {
    if (!json.is_object()) throw mismatch_error("an object", json, where_, remedy_);
}

const Json* JsonObject::find(std::string_view name) const {
    read_.emplace(name);
    const auto found = json_->find(std::string(name));
    return found == json_->end() || found->is_null() ? nullptr : &*found;
}

void JsonObject::refuse(std::string_view name, std::string_view expected) const {
    throw mismatch_error(expected, value(name), place(name), remedy_);
}

const Json& JsonObject::value(std::string_view name) const {
    read_.emplace(name);
    const auto found = json_->find(std::string(name));
    if (found == json_->end()) {
        throw Error(place(name) + " is absent, expected a value; " + remedy_);
    }
    return *found;
}

JsonObject JsonObject::object(std::string_view name) const {
    return {value(name), place(name), remedy_};
}

std::vector<JsonObject> JsonObject::objects(std::string_view name) const {
    std::vector<JsonObject> found;
    for (const Json& each : list(name)) {
        found.emplace_back(each, place(name) + "[" + std::to_string(found.size()) + "]", remedy_);
    }
    return found;
}

const Json& JsonObject::list(std::string_view name) const {
    if (!value(name).is_array()) refuse(name, "a list");
    return value(name);
}

std::string JsonObject::text(std::string_view name) const {
    if (!value(name).is_string()) refuse(name, "a text");
    return value(name).get<std::string>();
}

std::optional<std::string> JsonObject::text_or_null(std::string_view name) const {
    return has(name) ? std::optional(text(name)) : std::nullopt;
}

std::string JsonObject::character(std::string_view name) const {
    const std::string found = text(name);
    if (found.empty() || scanned(found, 0).length != found.size()) refuse(name, "one character");
    return found;
}

bool JsonObject::boolean(std::string_view name, std::optional<bool> otherwise) const {
    if (otherwise && !has(name)) return *otherwise;
    if (!value(name).is_boolean()) refuse(name, "true or false");
    return value(name).get<bool>();
}

double JsonObject::share(std::string_view name) const {
    const double* share = value(name).get_ptr<const double*>();
    if (!share || !(*share >= 0.0 && *share <= 1.0)) refuse(name, "a number from 0 to 1");
    return *share;
}

std::size_t JsonObject::number(std::string_view name, std::uint64_t most,
                               std::uint64_t least) const {
    if (!is_whole(value(name), least, most)) {
        refuse(name, whole_number(least, most));
    }
    return value(name).get<std::size_t>();
}

std::optional<std::size_t> JsonObject::number_or_null(std::string_view name, std::uint64_t most,
                                                      std::uint64_t least) const {
    return has(name) ? std::optional(number(name, most, least)) : std::nullopt;
}

std::vector<std::int64_t> JsonObject::numbers(std::string_view name, std::uint64_t most) const {
    std::vector<std::int64_t> found;
    for (const Json& each : list(name)) {
        if (!is_whole(each, 0, most)) {
            throw mismatch_error(whole_number(0, most), each, place(name), remedy_);
        }
        found.push_back(each.get<std::int64_t>());
    }
    return found;
}

std::string JsonObject::one_of(std::string_view name,
                               std::initializer_list<std::string_view> known) const {
    const std::string found = text(name);
    if (std::find(known.begin(), known.end(), found) != known.end()) return found;
    std::string names;
    for (const std::string_view each : known) {
        names += (names.empty() ? "one of " : ", ") + std::string(each);
    }
    refuse(name, names);
}

std::vector<JsonObject> JsonObject::steps(std::string_view name, std::string_view list) const {
    std::vector<JsonObject> found;
    if (has(name)) add_steps(object(name), list, found);
    return found;
}

void JsonObject::skip(std::initializer_list<std::string_view> names) const {
    read_.insert(names.begin(), names.end());
}

void JsonObject::check_all_read() const {
    for (const auto& [name, value] : json_->items()) {
        if (!read_.contains(name) && !value.is_null()) {
            refuse(name, "no such field: its meaning is unknown");
        }
    }
}

void JsonObject::check_known(std::initializer_list<std::string_view> names,
                             const Json& made_by) const {
    for (const auto& [name, value] : json_->items()) {
        const bool is_known = std::find(names.begin(), names.end(), name) != names.end();
        if (!is_known && !value.is_null()) {
            throw Error(where_ + " has " + in_short(name) + " " + in_short(value) +
                        ", which this version of dsbd_native does not know; use the version that "
                        "made the bundle (" +
                        in_short(made_by) + ") or a later one");
        }
    }
}

}  // namespace dsbd
