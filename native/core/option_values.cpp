// The values that an option takes, read from JSON.
#include "option_values.hpp"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>

#include "error.hpp"

namespace dsbd::options {
namespace {

constexpr std::size_t MOST_SHOWN = 80;  // characters of a value in a message
constexpr double LARGEST = std::numeric_limits<double>::max();
constexpr std::int64_t MOST_TOKEN = (std::int64_t{1} << 31) - 1;
const std::string IN_PYTHON = "use libdsbd, the library with Python, for it, or leave it out";

[[noreturn]] void refuse(const std::string& name, const Json& value, const std::string& expected) {
    throw Error(name + " is " + shown(value) + "; expected " + expected);
}

bool is_within(const Json& number, const Whole& bounds) {
    if (number.is_number_unsigned() && number.get<std::uint64_t>() > INT64_MAX) return false;
    const auto whole = number.get<std::int64_t>();
    return bounds.least <= whole && whole <= bounds.most;
}

/// Refuse what is no list of at most so many entries.
void check_length(const std::string& name, const Json& value, std::size_t most) {
    if (value.size() > most) refuse(name, value, "a list of at most " + std::to_string(most));
}

/// Return characters, of which those that do not begin one are continuation bytes of UTF-8.
std::size_t num_characters(std::string_view text) {
    return static_cast<std::size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string shortest(const char* format, double number) {
    char text[32];
    std::snprintf(text, sizeof text, format, number);
    return text;
}

std::string python_float(double number) {
    char digits[32];
    const auto end = std::to_chars(digits, digits + 32, number, std::chars_format::scientific).ptr;
    const std::string text(digits, end);
    const auto e = text.find('e');
    const int exponent = std::stoi(text.substr(e + 1));
    if (exponent < -4 || exponent >= 16) return text;
    const auto plain_end = std::to_chars(digits, digits + 32, number, std::chars_format::fixed).ptr;
    const std::string plain(digits, plain_end);
    return plain.find('.') == std::string::npos ? plain + ".0" : plain;
}

/// Return a text as Python's repr does, except that it escapes nothing beyond ASCII.
std::string python_text(const std::string& text) {
    const bool has_single = text.find('\'') != std::string::npos;
    const char quote = has_single && text.find('"') == std::string::npos ? '"' : '\'';
    std::string found(1, quote);
    for (const char c : text) {
        if (c == '\n' || c == '\r' || c == '\t') {
            found += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
        } else if (c == quote || c == '\\') {
            (found += '\\') += c;
        } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
            char code[8];
            std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned>(c));
            found += code;
        } else {
            found += c;
        }
    }
    return found + quote;
}

std::string python(const Json& value, bool is_tuple = false) {
    if (value.is_null()) return "None";
    if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
    if (value.is_string()) return python_text(value.get_ref<const std::string&>());
    if (value.is_number_float()) return python_float(value.get<double>());
    if (!value.is_structured()) return value.dump();
    const bool is_list = value.is_array();
    std::string found(1, !is_list ? '{' : is_tuple ? '(' : '[');
    for (const auto& [key, entry] : value.items()) {
        if (found.size() > 1) found += ", ";
        if (found.size() > 8 * MOST_SHOWN) break;  // it is cut off
        found += (is_list ? "" : python_text(key) + ": ") + python(entry, is_tuple);
    }
    if (is_list && is_tuple && value.size() == 1) found += ',';
    return found + (!is_list ? '}' : is_tuple ? ')' : ']');
}

std::string listed(const std::vector<Json>& values, bool is_quoted) {
    std::string names;
    for (const Json& each : values) {
        if (!names.empty()) names += ", ";
        names += is_quoted ? python(each) : each.get<std::string>();
    }
    return names;
}

}  // namespace

std::string shown(const Json& value, bool is_tuple) {
    std::string text = python(value, is_tuple);
    if (num_characters(text) <= MOST_SHOWN) return text;
    std::size_t end = 0, num_seen = 0;
    while (num_seen < MOST_SHOWN - 3 || (text[end] & 0xC0) == 0x80) {
        num_seen += (text[end++] & 0xC0) != 0x80;
    }
    return text.substr(0, end) + "...";
}

Json Whole::operator()(const std::string& name, const Json& value) const {
    if (!value.is_number_integer()) refuse(name, value, "a whole number");
    const bool is_huge = value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX;
    const auto whole = value.get<std::int64_t>();
    if (off == whole && !is_huge) return least;
    const bool is_low = whole < least && !is_huge;
    if (!is_low && whole <= most && !is_huge) return value;
    const std::string bound = std::to_string(is_low ? least : most);
    refuse(name, value, (is_low ? "at least " : "at most ") + bound);
}

Json Wholes::operator()(const std::string& name, const Json& value) const {
    if (value.is_number_integer()) {
        Json number = entry(name, value);
        return is_always_list ? Json::array({number}) : number;
    }
    if (!value.is_array()) refuse(name, value, "a " + noun + " or a list of them");
    if (is_cut && value.size() > most_entries) {
        const auto end = value.begin() + static_cast<std::ptrdiff_t>(most_entries);
        return (*this)(name, Json(std::vector<Json>(value.begin(), end)));
    }
    check_length(name, value, most_entries);
    for (const Json& each : value) {
        if (!each.is_number_integer() || !is_within(each, entry)) {
            throw Error(name + " has " + shown(each) + "; expected " + noun + "s from " +
                        std::to_string(entry.least) + " to " + std::to_string(entry.most));
        }
    }
    return value;
}

Json Number::operator()(const std::string& name, const Json& value) const {
    if (!value.is_number()) refuse(name, value, "a number");
    const auto number = value.get<double>();
    if (!(least <= number && number <= most) || (is_open && number == least)) {
        const auto low = shortest("%g", least);
        if (most == LARGEST && least == -most) refuse(name, value, "a finite number");
        if (most == LARGEST) {
            const std::string bound = is_open ? "more than " + low : low + " or more";
            refuse(name, value, "a finite number, " + bound);
        }
        const std::string bound = is_open ? "more than " + low + ", up" : "from " + low;
        refuse(name, value, "a number " + bound + " to " + shortest("%g", most));
    }
    if (0.0 < number && number < least_positive) {
        refuse(name, value, "0 or at least " + python_float(least_positive));
    }
    return number;
}

Json OneOf::operator()(const std::string& name, const Json& value) const {
    if (is_among(choices, value)) return value;
    refuse(name, value, "one of " + listed(choices, is_quoted));
}

Json seed_number(const std::string& name, const Json& value) {
    if (value.is_number_unsigned()) return value;
    if (!value.is_number_float() || value < 1e18) return Whole{0, INT64_MAX}(name, value);
    refuse(name, value, "at most 18446744073709551615 in the native library");
}

Json WholeOrName::operator()(const std::string& name, const Json& value) const {
    if (is_among(names, value)) return value;
    if (value.is_number_integer()) return number(name, value);
    refuse(name, value, "a whole number or one of " + listed(names, true));
}

Json Text::operator()(const std::string& name, const Json& value) const {
    if (!value.is_string()) refuse(name, value, "a text");
    return value;
}

Json Texts::operator()(const std::string& name, const Json& value) const {
    if (!value.is_string() && !value.is_array()) refuse(name, value, "a text or a list of texts");
    const Json texts = value.is_string() ? Json::array({value}) : value;
    check_length(name, texts, most_texts);
    for (const Json& each : texts) {
        if (!each.is_string()) {
            throw Error(name + " has " + shown(each) + "; expected a text or a list of texts");
        }
        const auto& text = each.get_ref<const std::string&>();
        if (text.empty()) {
            throw Error(name + " has an empty text, which every text contains; drop it");
        }
        if (num_characters(text) > most_characters) {
            throw Error(name + " has a text of " + std::to_string(num_characters(text)) +
                        " characters; expected at most " + std::to_string(most_characters) +
                        ": shorten it");
        }
        if (text.find("\xEF\xBF\xBD") != std::string::npos) {
            throw Error(name + " has " + shown(each) +
                        ", with U+FFFD or a lone surrogate, which no finished text holds; drop it");
        }
    }
    return texts;
}

Json TokenSequences::operator()(const std::string& name, const Json& value) const {
    if (!value.is_array() || value.size() > most_sequences) {
        const std::string most = std::to_string(most_sequences);
        refuse(name, value, "a list of at most " + most + " lists of token ids");
    }
    const Wholes sequence{{0, MOST_TOKEN}, most_tokens, "token id", true};
    Json read = Json::array();
    for (const Json& each : value) read.push_back(sequence(name, each));
    for (const Json& each : read) {
        if (each.empty()) throw Error(name + " has an empty list of token ids; drop it");
    }
    return read;
}

Json Biases::operator()(const std::string& name, const Json& value) const {
    if (!value.is_structured() || value.size() > most_tokens) {
        refuse(name, value,
               "a mapping of at most " + std::to_string(most_tokens) + " token ids to numbers");
    }
    std::vector<std::pair<std::int64_t, double>> pairs;
    const Whole token_id{0, MOST_TOKEN};
    for (const auto& [key, given] : value.items()) {
        const Json pair = value.is_object() ? Json::array({key, given}) : given;
        const bool is_pair = pair.is_array() && pair.size() == 2;
        Json token = is_pair ? pair[0] : Json();
        if (token.is_string()) {
            const auto digits = token.get<std::string>();
            const bool is_number = !digits.empty() && digits.size() < 19 &&
                                   digits.find_first_not_of("0123456789") == std::string::npos;
            token = is_number ? Json(std::stoll(digits)) : Json();
        }
        if (!token.is_number_integer()) {
            throw Error(name + " has " + shown(pair, value.is_object()) +
                        "; expected a token id and a number");
        }
        pairs.emplace_back(token_id(name, token), bias(name, pair[1]));
    }
    std::sort(pairs.begin(), pairs.end());
    return pairs;
}

Json trie(const std::string& name, const Json& value) {
    if (!value.is_object() || !value.contains("trie")) {
        throw Error(name + " is " + shown(value) +
                    ", but the native library has no constraints "
                    "except tries, {\"trie\": FILE}; " +
                    IN_PYTHON);
    }
    for (const auto& [key, each] : value.items()) {
        if (key != "trie" && key != "end") {
            throw Error(name + " has " + shown(key) + " with trie; expected end alone");
        }
    }
    if (!value["trie"].is_string()) {
        throw Error(name + " has trie " + shown(value["trie"]) + "; expected a text");
    }
    const Json end = value.value("end", Json());
    if (!end.is_null() && end != "leaf" && end != "eos") {
        throw Error(name + " has end " + shown(end) + "; a trie ends with 'leaf' or 'eos'");
    }
    return value;
}

Json nothing(const std::string& name, const Json& value) {
    if (value.is_array() && value.empty()) return value;
    throw Error(name + " is " + shown(value) + ", which the native library does not support; " +
                IN_PYTHON);
}

namespace {

/// Return how many characters match in the longest common blocks, as Python's difflib finds them.
std::size_t num_matching(std::string_view a, std::string_view b) {
    std::size_t longest = 0, begin_a = 0, begin_b = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        for (std::size_t j = 0; j < b.size(); ++j) {
            std::size_t n = 0;
            while (i + n < a.size() && j + n < b.size() && a[i + n] == b[j + n]) ++n;
            if (n > longest) longest = n, begin_a = i, begin_b = j;
        }
    }
    if (!longest) return 0;
    return longest + num_matching(a.substr(0, begin_a), b.substr(0, begin_b)) +
           num_matching(a.substr(begin_a + longest), b.substr(begin_b + longest));
}

}  // namespace

std::string did_you_mean(const std::string& name, std::span<const std::string> known) {
    if (name.size() > 100) return "";
    std::pair<double, std::string> best{0.6, ""};
    for (const std::string& each : known) {
        const auto num_all = static_cast<double>(each.size() + name.size());
        const auto num_shared = static_cast<double>(num_matching(each, name));
        best = std::max(best, {2.0 * num_shared / num_all, each});
    }
    return best.second.empty() ? "" : "; did you mean " + python_text(best.second) + "?";
}

}  // namespace dsbd::options
