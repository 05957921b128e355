// Tables of characters, and what is looked up in them.
#include "unicode.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include <utf8proc.h>

#include "../core/error.hpp"
#include "unicode_tables.hpp"

namespace dsbd {

Scan scanned(std::string_view bytes, std::size_t begin) {
    const auto byte = [&](std::size_t index) {
        const bool is_there = begin + index < bytes.size();
        return is_there ? static_cast<unsigned char>(bytes[begin + index]) : 0U;
    };
    const unsigned first = byte(0);
    if (first < 0x80) {
        return {1, true, false};
    }
    const std::size_t width = first < 0xC2 || first > 0xF4 ? 0
                              : first < 0xE0               ? 2
                              : first < 0xF0               ? 3
                                                           : 4;
    // Longer forms than needed, surrogates and code points above U+10FFFF are no characters.
    unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    std::size_t length = 1;
    for (; length < width && byte(length) >= low && byte(length) <= high; ++length) {
        low = 0x80;
        high = 0xBF;
    }
    return {length, length == width, length < width && begin + length == bytes.size()};
}

char32_t code_at(std::string_view text, std::size_t begin, std::size_t length) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[begin + i]); };
    if (length == 1) return byte(0);
    char32_t code = byte(0) & (0xFFU >> (length + 1));
    for (std::size_t i = 1; i < length; ++i) code = code << 6 | (byte(i) & 0x3FU);
    return code;
}

void append(std::string& text, char32_t code) {
    utf8proc_uint8_t bytes[4];
    const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code), bytes);
    text.append(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(length));
}

std::size_t num_characters(std::string_view text) {
    std::size_t count = 0;
    for_each_character(text, [&](char32_t, std::string_view) { ++count; });
    return count;
}

std::string characters(std::string_view text, std::size_t begin, std::size_t end) {
    std::string found;
    std::size_t index = 0;
    for_each_character(text, [&](char32_t, std::string_view character) {
        if (index >= begin && index < end) found += character;
        ++index;
    });
    return found;
}

std::string last_characters(std::string_view text, std::size_t number) {
    const std::size_t all = num_characters(text);
    return characters(text, all - std::min(all, number));
}

bool is_valid(std::string_view bytes) {
    for (std::size_t begin = 0; begin < bytes.size();) {
        const Scan scan = scanned(bytes, begin);
        if (!scan.is_character) return false;
        begin += scan.length;
    }
    return true;
}

bool ends_within_character(std::string_view bytes) {
    const std::size_t size = bytes.size();
    bool is_begun = false;
    for (std::size_t begin = 0; begin < size;) {
        const Scan scan = scanned(bytes, begin);
        is_begun = scan.is_begun;
        begin += scan.length;
    }
    return is_begun ||
           (size > 1 && bytes[size - 2] == '\xED' && (bytes[size - 1] & '\xC0') == '\x80');
}

std::string text_of_bytes(std::string_view bytes) {
    std::string text;
    for (std::size_t begin = 0; begin < bytes.size();) {
        const Scan scan = scanned(bytes, begin);
        text += scan.is_character ? bytes.substr(begin, scan.length) : replacement_character;
        begin += scan.length;
    }
    return text;
}

namespace {

utf8proc_category_t category(char32_t code) {
    return utf8proc_category(static_cast<utf8proc_int32_t>(code));
}

/// Return the range that has a character, nullptr without one. Ranges of a table are few.
template <class Range, std::size_t size>
const Range* range_of(char32_t code, const Range (&ranges)[size]) {
    for (const Range& range : ranges)
        if (code >= range.first && code <= range.last) return &range;
    return nullptr;
}

/// Return the first letter of a later character's category, 0 for one of 14.0 or older.
char later_kind(char32_t code) {
    const CategoryRange* range = code < 0x897 ? nullptr : range_of(code, later_characters);
    return range == nullptr ? '\0' : range->category[0];
}

}  // namespace

std::vector<std::string_view> clusters(std::string_view text) {
    constexpr CodeRange marks_of_17[] = {{0x1ACF, 0x1ADD}, {0x1AE0, 0x1AEB}};
    std::vector<std::string_view> found;
    std::size_t begin = 0, at = 0;
    utf8proc_int32_t last = 0, state = 0;
    for_each_character(text, [&](char32_t code, std::string_view character) {
        const bool is_later_mark = later_kind(code) == 'M' || range_of(code, marks_of_17);
        const auto next = static_cast<utf8proc_int32_t>(is_later_mark ? 0x300 : code);
        if (at > 0 && utf8proc_grapheme_break_stateful(last, next, &state)) {
            found.push_back(text.substr(begin, at - begin));
            begin = at;
        }
        last = next;
        at += character.size();
    });
    if (begin < at) found.push_back(text.substr(begin));
    return found;
}

bool is_space(char32_t code) {
    return (code >= 0x09 && code <= 0x0D) || code == 0x20 || code == 0x85 || code == 0xA0 ||
           code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 ||
           code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
}

bool is_word(char32_t code) {
    constexpr CodeRange letters_in_circles[] = {
        {0x24B6, 0x24E9}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}};
    if (const CategoryRange* later = range_of(code, later_characters)) {
        return later->category[0] == 'L' || later->category == "M" || later->category == "Nd";
    }
    const auto found = category(code);
    return (found >= UTF8PROC_CATEGORY_LU && found <= UTF8PROC_CATEGORY_NL) ||
           found == UTF8PROC_CATEGORY_PC || code == 0x200C || code == 0x200D ||
           range_of(code, letters_in_circles) != nullptr;
}

bool is_numeric(char32_t code) {
    const auto found = category(code);
    return (found >= UTF8PROC_CATEGORY_ND && found <= UTF8PROC_CATEGORY_NO) ||
           later_kind(code) == 'N' || (code >= 0x11DE0 && code <= 0x11DE9) ||
           (code >= 0x16FF4 && code <= 0x16FF6);
}

bool is_punctuation(char32_t code) {
    if (code < 0x80) {
        return code > 0x20 && code < 0x7F && !(code >= '0' && code <= '9') &&
               !((code | 0x20) >= 'a' && (code | 0x20) <= 'z');
    }
    const auto found = category(code);
    return (found >= UTF8PROC_CATEGORY_PC && found <= UTF8PROC_CATEGORY_PO &&
            later_kind(code) == 0 && range_of(code, unknown_punctuation) == nullptr) ||
           code == 0x166D || code == 0x111C9;
}

bool is_accent(char32_t code) {
    return (category(code) == UTF8PROC_CATEGORY_MN && later_kind(code) == 0 &&
            range_of(code, unknown_accents) == nullptr &&
            range_of(code, unnormalized) == nullptr) ||
           code == 0x1734;
}

bool is_mark(char32_t code) {
    const auto found = category(code);
    return (found >= UTF8PROC_CATEGORY_MN && found <= UTF8PROC_CATEGORY_ME &&
            later_kind(code) == 0 && range_of(code, unnormalized) == nullptr) ||
           code == 0x1CF2 || code == 0x1CF3;
}

bool is_control(char32_t code) {
    constexpr CodeRange unknown[] = {
        {0x890, 0x891}, {0x8E2, 0x8E2}, {0x110CD, 0x110CD}, {0x13430, 0x13455}};
    const auto found = category(code);
    return (found == UTF8PROC_CATEGORY_CC || found == UTF8PROC_CATEGORY_CF ||
            found == UTF8PROC_CATEGORY_CO) &&
           range_of(code, unknown) == nullptr;
}

namespace {

/// Return the lower case of a character that has one since 15.0, 0 for every other.
char32_t later_lower_case(char32_t code) {
    constexpr std::pair<CodeRange, char32_t> lowered[] = {
        {{0x1C89, 0x1C89}, 0x1C8A},   {{0xA7CB, 0xA7CB}, 0x264},  {{0xA7CC, 0xA7CC}, 0xA7CD},
        {{0xA7CE, 0xA7CE}, 0xA7CF},   {{0xA7D2, 0xA7D2}, 0xA7D3}, {{0xA7D4, 0xA7D4}, 0xA7D5},
        {{0xA7DA, 0xA7DA}, 0xA7DB},   {{0xA7DC, 0xA7DC}, 0x19B},  {{0x10D50, 0x10D65}, 0x10D70},
        {{0x16EA0, 0x16EB8}, 0x16EBB}};
    for (const auto& [range, first] : lowered) {
        if (code >= range.first && code <= range.last) return first + (code - range.first);
    }
    return 0;
}

}  // namespace

std::string lower_case(std::string_view text) {
    std::string lowered;
    for_each_character(text, [&](char32_t code, std::string_view) {
        if (const char32_t later = later_lower_case(code); later != 0) {
            append(lowered, later);
        } else if (code == 0x130) {  // the only character whose lower case is two
            lowered += "i\xCC\x87";
        } else {
            append(lowered,
                   static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(code))));
        }
    });
    return lowered;
}

namespace {

std::string normal_form_of_known(std::string_view text, NormalForm form) {
    const bool composes = form == NormalForm::nfc || form == NormalForm::nfkc;
    const bool is_compatible = form == NormalForm::nfkc || form == NormalForm::nfkd;
    const auto options = static_cast<utf8proc_option_t>(
        UTF8PROC_STABLE | (composes ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
        (is_compatible ? UTF8PROC_COMPAT : 0));
    utf8proc_uint8_t* found = nullptr;
    const auto length = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                     static_cast<utf8proc_ssize_t>(text.size()), &found, options);
    if (length < 0) {
        throw Error(std::string("a text cannot be normalized: ") + utf8proc_errmsg(length) +
                    "; give valid UTF-8 of less length");
    }
    std::string normalized(reinterpret_cast<const char*>(found), static_cast<std::size_t>(length));
    std::free(found);
    return normalized;
}

}  // namespace

std::string normal_form(std::string_view text, NormalForm form) {
    std::string normalized;
    std::size_t begin = 0;  // of the characters that were not normalized yet
    std::size_t at = 0;
    for_each_character(text, [&](char32_t code, std::string_view character) {
        if (later_kind(code) != 0 || (code >= 0x7FD && range_of(code, unnormalized) != nullptr)) {
            normalized += normal_form_of_known(text.substr(begin, at - begin), form);
            normalized += character;
            begin = at + character.size();
        }
        at += character.size();
    });
    return normalized + normal_form_of_known(text.substr(begin), form);
}

}  // namespace dsbd
