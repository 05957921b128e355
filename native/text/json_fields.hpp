// JSON of a bundle's files, read strictly: what is not understood is an error that names its place.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "../core/error.hpp"

namespace dsbd {

/// An object keeps the order of its fields, and finds one in linear time.
using Json = nlohmann::ordered_json;
/// Called with the depth, the event and the value of each part; false: leave it out.
using JsonFilter = Json::parser_callback_t;

inline constexpr std::uint64_t MOST_COUNT = (std::uint64_t{1} << 31) - 1;

/// Return parsed JSON; `where` names it in errors. Deep nesting is refused.
Json json_from_text(std::string_view text, const std::string& where,
                    const JsonFilter& filter = nullptr);
Json json_from_file(const std::filesystem::path& file, const JsonFilter& filter = nullptr);
/// Return the text of a file, or no value if it is absent. Throws for a pointer of git LFS.
std::optional<std::string> text_from_file(const std::filesystem::path& file);

/// Whether a value is a whole number from `least` to `most`.
bool is_whole(const Json& value, std::uint64_t least = 0, std::uint64_t most = MOST_COUNT);
/// Return at most 100 characters that show a value.
std::string in_short(const Json& value);
/// The error for an unexpected value at a place.
Error mismatch_error(std::string_view expected, const Json& value, std::string_view where,
                     std::string_view remedy = "export the bundle again");

/// An object of a file and its place there. Its readers raise Error at the first mismatch, with a
/// remedy; `check_all_read` finds the fields that none of them has read.
class JsonObject {
public:
    JsonObject(const Json& json, std::string where,
               std::string_view remedy = "export the bundle again");

    const Json& json() const { return *json_; }
    const std::string& where() const { return where_; }

    /// Return a field, nullptr if it is absent or null, by which a file says that it lacks
    /// something.
    const Json* find(std::string_view name) const;
    bool has(std::string_view name) const { return find(name) != nullptr; }
    /// Return a field that must be there, but may be null.
    const Json& value(std::string_view name) const;
    JsonObject object(std::string_view name) const;
    std::vector<JsonObject> objects(std::string_view name) const;
    const Json& list(std::string_view name) const;
    std::string text(std::string_view name) const;
    std::optional<std::string> text_or_null(std::string_view name) const;
    /// Return the only character of a text.
    std::string character(std::string_view name) const;
    bool boolean(std::string_view name, std::optional<bool> otherwise = {}) const;
    /// A number from 0 to 1.
    double share(std::string_view name) const;
    /// A whole number from `least` to `most`.
    std::size_t number(std::string_view name, std::uint64_t most = MOST_COUNT,
                       std::uint64_t least = 0) const;
    std::size_t count(std::string_view name, std::uint64_t most = MOST_COUNT) const {
        return number(name, most, 1);
    }
    std::optional<std::size_t> number_or_null(std::string_view name,
                                              std::uint64_t most = MOST_COUNT,
                                              std::uint64_t least = 0) const;
    std::vector<std::int64_t> numbers(std::string_view name, std::uint64_t most = MOST_COUNT) const;
    std::string one_of(std::string_view name, std::initializer_list<std::string_view> known) const;
    /// Return the steps of a field, none if it is null: a `Sequence` has them in the field `list`.
    std::vector<JsonObject> steps(std::string_view name, std::string_view list) const;

    /// Mark fields that have no influence here as read.
    void skip(std::initializer_list<std::string_view> names) const;
    void check_all_read() const;
    /// Refuse every field beyond these that is not null: a later version made the file.
    void check_known(std::initializer_list<std::string_view> names, const Json& made_by) const;
    [[noreturn]] void refuse(std::string_view name, std::string_view expected) const;

private:
    std::string place(std::string_view name) const { return where_ + ": " + std::string(name); }

    const Json* json_;
    std::string where_, remedy_;
    mutable std::set<std::string, std::less<>> read_;
};

}  // namespace dsbd
