// Patterns of tokenizer.json, translated to PCRE2 or refused.
#include "regex.hpp"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <set>
#include <utility>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "../core/error.hpp"
#include "unicode.hpp"
#include "unicode_tables.hpp"

// Patterns are interpreted. PCRE2 calls these functions for patterns compiled to machine code
// alone; defined here, they keep that compiler (240 kB) of a static PCRE2 out of the library.
#define NEVER_CALLED extern "C" __attribute__((weak, visibility("hidden")))
NEVER_CALLED int _pcre2_jit_check_exec_8() { return 0; }
NEVER_CALLED void _pcre2_jit_free_8(void*, void*) {}
NEVER_CALLED int pcre2_jit_match_8(const pcre2_code_8*, PCRE2_SPTR8, PCRE2_SIZE, PCRE2_SIZE,
                                   std::uint32_t, pcre2_match_data_8*, pcre2_match_context_8*) {
    return PCRE2_ERROR_JIT_BADOPTION;
}

namespace dsbd {

namespace {

// Oniguruma's \s: PCRE2's has U+180E as well.
constexpr std::string_view space_class = "\\t-\\r\\x{85}\\p{Z}";
const std::set<std::string_view> categories{"L", "Lu", "Ll", "Lt", "Lm", "Lo",
                                            "M", "N",  "Nd", "P",  "S",  "Z"};

/// Return the members of a class that are characters of a category, the later ones included.
std::string category_class(std::string_view category) {
    std::string members = "\\p{" + std::string(category) + "}";
    for (const CategoryRange& later : later_characters) {
        if (later.category.substr(0, category.size()) == category) {
            char range[32];
            std::snprintf(range, sizeof range, "\\x{%X}-\\x{%X}",
                          static_cast<unsigned>(later.first), static_cast<unsigned>(later.last));
            members += range;
        }
    }
    return members;
}

// Written as two characters, one character is the same for Oniguruma if case is ignored: U+FB06.
const std::set<std::string_view> folded_pairs{"ss", "ff", "fi", "fl", "st"};

/// Translates a pattern of Oniguruma to PCRE2.
class Translator {
public:
    Translator(std::string_view pattern, const std::string& where)
        : pattern_(pattern), where_(where) {}

    std::string translated() {
        while (at_ < pattern_.size()) translate_outside();
        return out_;
    }

private:
    std::string_view rest() const { return pattern_.substr(at_); }

    bool skip(std::string_view text) {
        const bool is_here = rest().substr(0, text.size()) == text;
        at_ += is_here ? text.size() : 0;
        return is_here;
    }

    [[noreturn]] void refuse(std::string_view what) const {
        throw Error(where_ + ": the regular expression '" + std::string(pattern_) + "' has '" +
                    std::string(what) +
                    "', which may mean something else in PCRE2; use the C library or callbacks "
                    "for this tokenizer");
    }

    void translate_outside() {
        const char c = pattern_[at_];
        if (c == '\\') {
            translate_escape(false);
        } else if (c == '[') {
            translate_class();
        } else if (c == '(') {
            open_group();
        } else if (c == '{') {
            translate_count();
        } else {
            if (c == ')' && caseless_.size() > 1) caseless_.pop_back();
            check_folding(c);
            out_ += c;
            ++at_;
        }
    }

    void open_group() {
        bool is_caseless = caseless_.back();
        ++at_;
        out_ += '(';
        if (!rest().empty() && rest()[0] == '?') {
            const std::string_view start = rest();
            std::optional<std::string_view> found;
            for (const std::string_view kind : {"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:"}) {
                if (start.substr(0, kind.size()) == kind) found = kind;
            }
            if (!found) refuse(std::string("(") + std::string(start.substr(0, 3)));
            is_caseless = is_caseless || *found == "?i:";
            out_ += *found;
            at_ += found->size();
        }
        caseless_.push_back(is_caseless);
        last_ = 0;
    }

    /// A count such as {1,3}: after it ? and + mean other things than in PCRE2.
    void translate_count() {
        const std::size_t end = pattern_.find('}', at_);
        const std::string_view count =
            end == std::string_view::npos ? rest() : pattern_.substr(at_, end + 1 - at_);
        const std::size_t num_digits =
            std::min(count.find_first_not_of("0123456789", 1), count.size());
        const bool is_count = end != std::string_view::npos && num_digits > 1 &&
                              count.find_first_not_of("0123456789,", 1) == count.size() - 1 &&
                              std::count(count.begin(), count.end(), ',') <= 1;
        const char after = end + 1 < pattern_.size() && is_count ? pattern_[end + 1] : ' ';
        if (!is_count || after == '?' || after == '+') refuse(count.substr(0, 20));
        out_ += count;
        at_ = end + 1;
        last_ = 0;
    }

    void translate_class() {
        out_ += '[';
        ++at_;
        if (skip("^")) out_ += '^';
        if (rest().substr(0, 1) == "]") refuse("[]");
        while (at_ < pattern_.size() && pattern_[at_] != ']') {
            if (pattern_[at_] == '[' || rest().substr(0, 2) == "&&") refuse(rest().substr(0, 2));
            if (pattern_[at_] == '\\') {
                translate_escape(true);
            } else {
                check_folding(pattern_[at_]);
                out_ += pattern_[at_++];
            }
            last_ = 0;
        }
        if (!skip("]")) refuse("[");
        out_ += ']';
    }

    void translate_escape(bool is_in_class) {
        const std::string_view start = rest();
        const char c = start.size() > 1 ? start[1] : '\0';
        at_ += 2;
        last_ = 0;
        const auto class_of = [&](std::string_view members, bool is_negated) {
            if (is_in_class && is_negated) refuse(start.substr(0, 2));
            out_ += is_in_class ? std::string(members)
                                : (is_negated ? "[^" : "[") + std::string(members) + "]";
        };
        const auto control = std::string_view("rntfav").find(c);
        if (c == 's' || c == 'S') {
            class_of(space_class, c == 'S');
        } else if (c == 'd' || c == 'D') {
            class_of(category_class("Nd"), c == 'D');
        } else if (c == 'p' || c == 'P') {
            class_of(category_class(category_name(c)), c == 'P');
        } else if (c == 'x' || c == 'u') {
            translate_code(c);
        } else if (control != std::string_view::npos) {
            out_ += std::string("\\x0") + "DA9C7B"[control];
        } else if (!is_in_class && (c == 'A' || c == 'z')) {
            out_ += start.substr(0, 2);
        } else if (std::ispunct(static_cast<unsigned char>(c)) != 0) {
            out_ += start.substr(0, 2);
        } else {
            refuse(start.substr(0, 2));
        }
    }

    std::string_view category_name(char kind) {
        const std::size_t end = pattern_.find('}', at_);
        const std::string_view name =
            end == std::string_view::npos || !skip("{") ? "" : pattern_.substr(at_, end - at_);
        const bool has_case = name == "Lu" || name == "Ll" || name == "Lt";
        if (categories.count(name) == 0 || (has_case && caseless_.back())) {
            refuse(std::string("\\") + kind + "{" + std::string(name) + "}");
        }
        at_ = end + 1;
        return name;
    }

    /// \x41, \x{1F600} or \u0041.
    void translate_code(char kind) {
        const bool is_braced = kind == 'x' && skip("{");
        const std::size_t most = kind == 'u' ? 4 : is_braced ? 6 : 2;
        std::size_t length = 0;
        while (length < most && length < rest().size() &&
               std::isxdigit(static_cast<unsigned char>(rest()[length])) != 0) {
            ++length;
        }
        const std::string digits(rest().substr(0, length));
        at_ += length;
        if (length == 0 || (!is_braced && length != most) || (is_braced && !skip("}")) ||
            caseless_.back()) {
            refuse(std::string("\\") + kind + digits);
        }
        out_ += "\\x{" + digits + "}";
    }

    /// Refuse characters that may be equal to several others if case is ignored.
    void check_folding(char c) {
        const char lowered = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
        const char pair[] = {last_, lowered};
        const bool is_ascii = (static_cast<unsigned char>(c) & 0x80) == 0;
        if (caseless_.back() && (!is_ascii || folded_pairs.count({pair, 2}) != 0)) {
            refuse(is_ascii ? std::string(pair, 2) : "(?i: with other letters than English ones");
        }
        last_ = lowered;
    }

    std::string_view pattern_;
    const std::string& where_;
    std::string out_;
    std::size_t at_ = 0;
    std::vector<bool> caseless_{false};  // for each open group, and the whole
    char last_ = 0;                      // the plain character before, in lower case
};

}  // namespace

Regex::Regex(std::string_view pattern, const std::string& where) {
    // Lines end with LF alone, and ^ and $ are ends of lines, as in Oniguruma.
    const std::string source = "(*LF)" + Translator(pattern, where).translated();
    int problem = 0;
    PCRE2_SIZE place = 0;
    pcre2_code* code =
        pcre2_compile(reinterpret_cast<PCRE2_SPTR>(source.data()), source.size(),
                      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &problem, &place, nullptr);
    if (code == nullptr) {
        PCRE2_UCHAR message[200];
        pcre2_get_error_message(problem, message, sizeof message);
        throw Error(where + ": the regular expression '" + std::string(pattern) +
                    "' cannot be compiled (" + reinterpret_cast<const char*>(message) +
                    "); use the C library or callbacks for this tokenizer");
    }
    code_ = std::shared_ptr<const void>(code, [code](const void*) { pcre2_code_free(code); });
}

std::vector<Range> Regex::find_all(std::string_view text) const {
    const auto* code = static_cast<const pcre2_code*>(code_.get());
    const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> found(
        pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    std::vector<Range> matches;
    std::size_t start = 0;
    std::optional<std::size_t> last_end;
    while (start <= text.size()) {
        const int result = pcre2_match(code, subject, text.size(), start, PCRE2_NO_UTF_CHECK,
                                       found.get(), nullptr);
        if (result == PCRE2_ERROR_NOMATCH) break;
        if (result < 0) {
            throw Error("the tokenizer's regular expression fails for a text of " +
                        std::to_string(text.size()) + " bytes (PCRE2 error " +
                        std::to_string(result) + "); give a shorter text");
        }
        const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(found.get());
        const Range match{ends[0], ends[1]};
        const bool is_empty = match.begin == match.end;
        if (!is_empty || last_end != match.end) {  // no empty match right after another
            matches.push_back(match);
            last_end = match.end;
        }
        start = match.end;
        if (is_empty) start += start < text.size() ? scanned(text, start).length : 1;
    }
    return matches;
}

std::vector<Range> find_all(std::string_view text, std::string_view plain) {
    std::vector<Range> found;
    for (std::size_t at = text.find(plain); at != std::string_view::npos;
         at = text.find(plain, at + plain.size())) {
        found.push_back({at, at + plain.size()});
    }
    return found;
}

}  // namespace dsbd
