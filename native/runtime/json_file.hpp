// Typed JSON (typed_json.py): objects of a bundle's files; every mismatch names its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "error.hpp"

namespace dsbd {

using Json = nlohmann::ordered_json;

inline constexpr std::uint64_t MOST_COUNT = (std::uint64_t{1} << 31) - 1;

/// At most 100 characters, in one line, that show a value.
std::string shown_in_short(const Json& value);

/// The error for an unexpected value at a place.
Error mismatch_error(std::string_view expected, const Json& value, std::string_view where);

/// Parse the file of a bundle; Error if it is missing, too large or invalid.
Json parsed_file(const std::filesystem::path& file);

/// An object of a file and its place there. Its readers raise Error at the first mismatch.
class JsonObject {
public:
    JsonObject(const Json& value, std::string where);

    const std::string& where() const { return where_; }
    /// Whether the field is there and is not null, by which a file says that it lacks something.
    bool has(const char* name) const;
    /// Refuse every field beyond these that is not null: a later version made the file.
    void check_known(std::initializer_list<std::string_view> names, const Json& made_by) const;

    const Json& value(const char* name) const;
    JsonObject object(const char* name) const;
    std::vector<JsonObject> objects(const char* name) const;
    std::string text(const char* name) const;
    bool boolean(const char* name) const;
    /// A whole number from `least` to `most`.
    std::size_t number(const char* name, std::uint64_t most, std::uint64_t least = 0) const;
    std::size_t count(const char* name, std::uint64_t most = MOST_COUNT) const {
        return number(name, most, 1);
    }
    std::vector<std::int64_t> numbers(const char* name, std::uint64_t most) const;
    std::string one_of(const char* name, std::initializer_list<std::string_view> known) const;

private:
    std::string place(const char* name) const { return where_ + ": " + name; }

    const Json* value_;
    std::string where_;
};

}  // namespace dsbd
