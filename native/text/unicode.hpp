// Characters of UTF-8 texts: code points, categories and normal forms.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace dsbd {

/// What begins at a place of bytes: a character, the first bytes of one, or an invalid byte.
struct Scan {
    std::size_t length = 0;
    bool is_character = false;
    bool is_begun = false;  // the bytes end within a character
};

Scan scanned(std::string_view bytes, std::size_t begin);

/// Return the code point of the character of `length` bytes at a place of a valid text.
char32_t code_at(std::string_view text, std::size_t begin, std::size_t length);
void append(std::string& text, char32_t code);

/// Call `visit(code, character)` for each character of a valid text.
template <class Visit>
void for_each_character(std::string_view text, const Visit& visit) {
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t length = scanned(text, begin).length;
        visit(code_at(text, begin, length), text.substr(begin, length));
        begin += length;
    }
}

std::size_t num_characters(std::string_view text);
/// Return the extended grapheme clusters of a valid text: characters that are shown as one.
std::vector<std::string_view> clusters(std::string_view text);
/// Return the characters of a text from number `begin` on, to the one before number `end`.
std::string characters(std::string_view text, std::size_t begin,
                       std::size_t end = std::string_view::npos);
/// Return at most so many characters, the last ones of a text.
std::string last_characters(std::string_view text, std::size_t number);
bool is_valid(std::string_view bytes);
/// Whether bytes end within a character, or after two bytes of a surrogate: Python finds those by
/// their last byte.
bool ends_within_character(std::string_view bytes);
/// Return bytes as a text: U+FFFD for each longest beginning of a character that is not one.
std::string text_of_bytes(std::string_view bytes);

inline constexpr std::string_view replacement_character = "\xEF\xBF\xBD";

// As the steps of the tokenizers library classify characters, by the Unicode version of each.
bool is_space(char32_t code);        // White_Space
bool is_word(char32_t code);         // \w: letters, marks, decimal digits, connectors
bool is_numeric(char32_t code);      // categories N
bool is_punctuation(char32_t code);  // categories P, and ASCII symbols
bool is_accent(char32_t code);       // nonspacing marks
bool is_mark(char32_t code);         // categories M
bool is_control(char32_t code);      // control, format and private characters
std::string lower_case(std::string_view text);

enum class NormalForm { nfc, nfd, nfkc, nfkd };
std::string normal_form(std::string_view text, NormalForm form);

}  // namespace dsbd
