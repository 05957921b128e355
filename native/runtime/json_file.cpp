#include "runtime/json_file.hpp"

#include <algorithm>
#include <utility>

namespace dsbd {

namespace {

std::size_t whole_number(const Json& value, std::uint64_t most, std::uint64_t least,
                         const std::string& where) {
    const bool is_whole = value.is_number_unsigned();
    if (!is_whole || value.get<std::uint64_t>() < least || value.get<std::uint64_t>() > most) {
        const std::string range = std::to_string(least) + " to " + std::to_string(most);
        throw mismatch_error("a whole number from " + range, value, where);
    }
    return value.get<std::size_t>();
}

}  // namespace

Error mismatch_error(std::string_view expected, const Json& value, std::string_view where) {
    return Error(std::string(where) + " is " + in_short(value) + ", expected " +
                 std::string(expected) + "; export the bundle again");
}

JsonObject::JsonObject(const Json& value, std::string where)
    : value_(&value), where_(std::move(where)) {
    if (!value.is_object()) throw mismatch_error("an object", value, where_);
}

bool JsonObject::has(const char* name) const {
    const auto found = value_->find(name);
    return found != value_->end() && !found->is_null();
}

void JsonObject::check_known(std::initializer_list<std::string_view> names,
                             const Json& made_by) const {
    for (const auto& [name, value] : value_->items()) {
        const bool is_known = std::find(names.begin(), names.end(), name) != names.end();
        if (!is_known && !value.is_null()) {
            throw Error(where_ + " has " + in_short(name) + " " + in_short(value) +
                        ", which this version of dsbd_native does not know; use the version that "
                        "made the bundle (" + in_short(made_by) + ") or a later one");
        }
    }
}

const Json& JsonObject::value(const char* name) const {
    const auto found = value_->find(name);
    if (found == value_->end()) {
        throw Error(where_ + " lacks " + name + "; export the bundle again");
    }
    return *found;
}

JsonObject JsonObject::object(const char* name) const { return {value(name), place(name)}; }

std::vector<JsonObject> JsonObject::objects(const char* name) const {
    const Json& list = value(name);
    if (!list.is_array()) throw mismatch_error("a list of objects", list, place(name));
    std::vector<JsonObject> found;
    for (const Json& each : list) {
        found.emplace_back(each, place(name) + "[" + std::to_string(found.size()) + "]");
    }
    return found;
}

std::string JsonObject::text(const char* name) const {
    if (!value(name).is_string()) throw mismatch_error("a text", value(name), place(name));
    return value(name).get<std::string>();
}

bool JsonObject::boolean(const char* name) const {
    if (!value(name).is_boolean()) throw mismatch_error("true or false", value(name), place(name));
    return value(name).get<bool>();
}

std::size_t JsonObject::number(const char* name, std::uint64_t most, std::uint64_t least) const {
    return whole_number(value(name), most, least, place(name));
}

std::vector<std::int64_t> JsonObject::numbers(const char* name, std::uint64_t most) const {
    if (!value(name).is_array()) throw mismatch_error("a list of numbers", value(name), place(name));
    std::vector<std::int64_t> found;
    for (const Json& each : value(name)) {
        found.push_back(static_cast<std::int64_t>(whole_number(each, most, 0, place(name))));
    }
    return found;
}

std::string JsonObject::one_of(const char* name,
                               std::initializer_list<std::string_view> known) const {
    std::string found = text(name), names;
    if (std::find(known.begin(), known.end(), found) == known.end()) {
        for (const std::string_view each : known) {
            names += (names.empty() ? "one of " : ", ") + std::string(each);
        }
        throw mismatch_error(names, found, place(name));
    }
    return found;
}

}  // namespace dsbd
