// Typed JSON (typed_json.py): objects of a bundle's files; every mismatch names its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"
#include "text/json_fields.hpp"

namespace dsbd {

inline constexpr std::uint64_t MOST_COUNT = (std::uint64_t{1} << 31) - 1;

/// The error for an unexpected value at a place.
Error mismatch_error(std::string_view expected, const Json& value, std::string_view where);

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
