#include "pre_tokenizer.hpp"

#include <algorithm>
#include <utility>

#include "../core/error.hpp"
#include "normalizer.hpp"
#include "regex.hpp"
#include "unicode.hpp"

namespace dsbd {

namespace {

constexpr std::string_view gpt_2_words =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/// A part of a word, and whether the pattern matches it.
struct Part {
    Range range;
    bool is_match = false;
};

/// Return matches and the parts between them.
std::vector<Part> parts_of(std::string_view text, const std::vector<Range>& matches) {
    std::vector<Part> parts;
    std::size_t end = 0;
    for (const Range& match : matches) {
        if (end != match.begin) {
            parts.push_back({{end, match.begin}, false});
        }
        parts.push_back({match, true});
        end = match.end;
    }
    if (end != text.size()) {
        parts.push_back({{end, text.size()}, false});
    }
    return parts;
}

/// Join every match with the part before it, unless that is one that was joined by its own match.
std::vector<Part> merged_with_previous(const std::vector<Part>& parts) {
    std::vector<Part> merged;
    bool was_match = false;
    for (const Part& part : parts) {
        if (part.is_match && !was_match && !merged.empty()) {
            Range& last = merged.back().range;
            last = {std::min(last.begin, part.range.begin), std::max(last.end, part.range.end)};
        } else {
            merged.push_back({part.range, false});
        }
        was_match = part.is_match;
    }
    return merged;
}

std::vector<Part> contiguous(const std::vector<Part>& parts) {
    std::vector<Part> merged;
    bool was_match = false;
    for (const Part& part : parts) {
        if (part.is_match == was_match && !merged.empty()) {
            merged.back().range.end = part.range.end;
        } else {
            merged.push_back({part.range, false});
        }
        was_match = part.is_match;
    }
    return merged;
}

enum class Behavior { isolated, removed, contiguous, merged_with_previous, merged_with_next };

std::vector<Word> split(const Word& word, const std::vector<Range>& matches, Behavior behavior,
                        bool is_inverted = false) {
    std::vector<Part> parts = parts_of(word.text, matches);
    for (Part& part : parts) part.is_match = part.is_match != is_inverted;
    if (behavior == Behavior::contiguous) {
        parts = contiguous(parts);
    } else if (behavior == Behavior::merged_with_previous) {
        parts = merged_with_previous(parts);
    } else if (behavior == Behavior::merged_with_next) {
        std::reverse(parts.begin(), parts.end());
        parts = merged_with_previous(parts);
        std::reverse(parts.begin(), parts.end());
    }
    std::vector<Word> words;
    for (const auto& [range, is_match] : parts) {
        if (range.begin < range.end && !(is_match && behavior == Behavior::removed)) {
            words.push_back({word.text.substr(range.begin, range.end - range.begin),
                             word.is_at_start && range.begin == 0});
        }
    }
    return words;
}

using Step = std::function<std::vector<Word>(const Word&)>;

template <class IsMatch>
Step character_split(const IsMatch& is_match, Behavior behavior) {
    return [=](const Word& word) {
        std::vector<Range> matches;
        std::size_t at = 0;
        for_each_character(word.text, [&](char32_t code, std::string_view character) {
            if (is_match(code)) {
                matches.push_back({at, at + character.size()});
            }
            at += character.size();
        });
        return split(word, matches, behavior);
    };
}

Behavior behavior_in(Fields& fields, const std::string& name) {
    const std::pair<std::string_view, Behavior> behaviors[] = {
        {"Isolated", Behavior::isolated},
        {"Removed", Behavior::removed},
        {"Contiguous", Behavior::contiguous},
        {"MergedWithPrevious", Behavior::merged_with_previous},
        {"MergedWithNext", Behavior::merged_with_next}};
    const std::string found = fields.text(name);
    for (const auto& [known, behavior] : behaviors) if (found == known) return behavior;
    fields.refuse(name, "Isolated, Removed, Contiguous, MergedWithPrevious or MergedWithNext");
}

Step byte_level(Fields& fields) {
    const bool adds_space = fields.flag("add_prefix_space");
    const bool has_words = fields.flag("use_regex", true);
    fields.skip({"trim_offsets"});
    return [adds_space, has_words, regex = Regex(gpt_2_words, fields.where())](const Word& word) {
        Word spaced = word;
        if (adds_space && word.text.substr(0, 1) != " ") spaced.text = " " + word.text;
        std::vector<Word> words{spaced};
        if (has_words) words = split(spaced, regex.find_all(spaced.text), Behavior::isolated);
        for (Word& each : words) {
            std::string symbols;
            for (const char byte : each.text) {
                symbols += symbol_by_byte()[static_cast<unsigned char>(byte)];
            }
            each.text = std::move(symbols);
        }
        return words;
    };
}

Step metaspace(Fields& fields, bool& asks_for_start) {
    const std::string replacement = fields.character("replacement");
    const std::string scheme = fields.text_or_null("prepend_scheme").value_or("always");
    const bool has_space = fields.flag("add_prefix_space", scheme != "never");
    const bool splits = fields.flag("split", true);
    fields.skip({"str_rep"});
    const bool is_known = scheme == "always" || scheme == "first" || scheme == "never";
    if (!is_known || (!has_space && scheme != "never")) {
        fields.refuse("prepend_scheme", "always, first or never, as add_prefix_space says");
    }
    asks_for_start = asks_for_start || scheme == "first";
    return [=](const Word& word) {
        Word spaced = word;
        spaced.text.clear();
        for (const char c : word.text) spaced.text += c == ' ' ? replacement : std::string(1, c);
        const bool begins = spaced.text.substr(0, replacement.size()) == replacement;
        if (!begins && (scheme == "always" || (scheme == "first" && word.is_at_start))) {
            spaced.text = replacement + spaced.text;
        }
        if (!splits) {
            return std::vector<Word>{spaced};
        }
        return split(spaced, find_all(spaced.text, replacement), Behavior::merged_with_next);
    };
}

}  // namespace

const std::array<std::string, 256>& symbol_by_byte() {
    static const std::array<std::string, 256> symbols = [] {
        std::array<std::string, 256> found;
        char32_t other = 256;
        for (unsigned byte = 0; byte < 256; ++byte) {
            const bool is_printable = (byte >= 0x21 && byte < 0x7F) ||
                                      (byte >= 0xA1 && byte < 0xAD) || byte >= 0xAE;
            append(found[byte], is_printable ? byte : other++);
        }
        return found;
    }();
    return symbols;
}

std::optional<std::string> bytes_from_symbols(std::string_view text) {
    static const std::vector<int> byte_by_code = [] {
        std::vector<int> found(256 + 68, -1);
        for (int byte = 0; byte < 256; ++byte) {
            const std::string& symbol = symbol_by_byte()[static_cast<std::size_t>(byte)];
            found[code_at(symbol, 0, symbol.size())] = byte;
        }
        return found;
    }();
    std::string bytes;
    bool are_bytes = true;
    for_each_character(text, [&](char32_t code, std::string_view) {
        const int byte = code < byte_by_code.size() ? byte_by_code[code] : -1;
        are_bytes = are_bytes && byte >= 0;
        bytes += static_cast<char>(byte);
    });
    return are_bytes ? std::optional(bytes) : std::nullopt;
}

PreTokenizer::PreTokenizer(const SortedJson& json, const std::string& where) {
    for (const auto& [step, place] : steps_of(json, where, "pretokenizers")) add(*step, place);
}

std::vector<Word> PreTokenizer::words(Word text) const {
    std::vector<Word> words{std::move(text)};
    for (const auto& step : steps_) {
        std::vector<Word> parts;
        for (const Word& word : words) {
            for (Word& part : step(word)) parts.push_back(std::move(part));
        }
        words = std::move(parts);
    }
    return words;
}

void PreTokenizer::add(const SortedJson& json, const std::string& where) {
    Fields fields(json, where);
    const std::string type = fields.text("type");
    if (type == "ByteLevel") {
        steps_.push_back(byte_level(fields));
    } else if (type == "Metaspace") {
        steps_.push_back(metaspace(fields, asks_for_start_));
    } else if (type == "Split") {
        const Behavior behavior = behavior_in(fields, "behavior");
        const bool is_inverted = fields.flag("invert");
        steps_.push_back([=, pattern = Pattern(fields)](const Word& word) {
            return split(word, pattern.find_all(word.text), behavior, is_inverted);
        });
    } else if (type == "Digits") {
        const bool each = fields.flag("individual_digits");
        steps_.push_back(
            character_split(is_numeric, each ? Behavior::isolated : Behavior::contiguous));
    } else if (type == "Punctuation") {
        const bool is_given = fields.find("behavior") != nullptr;
        steps_.push_back(character_split(
            is_punctuation, is_given ? behavior_in(fields, "behavior") : Behavior::isolated));
    } else if (type == "WhitespaceSplit") {
        steps_.push_back(character_split(is_space, Behavior::removed));
    } else if (type == "BertPreTokenizer") {
        steps_.push_back(character_split(is_space, Behavior::removed));
        steps_.push_back(character_split(is_punctuation, Behavior::isolated));
    } else {
        fields.refuse("type", "a pre-tokenizer that is known here");
    }
    fields.check_all_read();
}

}  // namespace dsbd
