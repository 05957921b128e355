// JSON of a bundle's text files, read strictly: a field that is not understood is an error.
#pragma once

#include <concepts>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace dsbd {

using Json = nlohmann::ordered_json;
/// For objects with many fields, such as vocabularies, in which `Json` is slow.
using SortedJson = nlohmann::json;

/// Return parsed JSON; `where` names it in errors. Deep nesting is refused, as readers recurse.
template <class Parsed = Json>
Parsed json_from_text(std::string_view text, const std::string& where);
template <class Parsed = Json>
Parsed json_from_file(const std::filesystem::path& file);
/// Return the text of a file, or no value if it is absent.
std::optional<std::string> text_from_file(const std::filesystem::path& file);

/// Return at most 100 characters that show a value.
std::string in_short(const Json& value);
template <class Value>
    requires std::same_as<Value, SortedJson>  // never a conversion: all others become `Json`
std::string in_short(const Value& value);

/// An object whose fields are all to be read; `check_all_read` finds those that were not.
class Fields {
public:
    Fields(const SortedJson& object, std::string where);

    const std::string& where() const { return where_; }
    const SortedJson& object() const { return object_; }
    std::string place(std::string_view name) const;

    /// Return a field, nullptr if it is absent or null.
    const SortedJson* find(std::string_view name);
    const SortedJson& at(std::string_view name);
    std::string text(std::string_view name);
    std::optional<std::string> text_or_null(std::string_view name);
    /// Return the only character of a text.
    std::string character(std::string_view name);
    bool flag(std::string_view name, std::optional<bool> otherwise = {});
    /// Return a number from 0 to 2^31 - 1.
    std::int64_t count(std::string_view name);
    const SortedJson& list(std::string_view name);
    /// Mark fields that have no influence here as read.
    void skip(std::initializer_list<std::string_view> names);
    void check_all_read() const;

    [[noreturn]] void refuse(std::string_view name, const std::string& expected) const;

private:
    const SortedJson& object_;
    std::string where_;
    std::set<std::string, std::less<>> read_;
};

/// Return the steps of a component, each with its place: a `Sequence` has them in the field `list`.
std::vector<std::pair<const SortedJson*, std::string>> steps_of(const SortedJson& component,
                                                          const std::string& where,
                                                          const std::string& list);

}  // namespace dsbd
