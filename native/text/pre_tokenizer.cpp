// Pre-tokenizers of tokenizer.json: a text to words.
#include <algorithm>
#include <utility>

#include "steps.hpp"
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

/// Join parts with the part before them where `joins` says so of a part and of the one before it.
template <class Joins>
std::vector<Part> joined(const std::vector<Part>& parts, const Joins& joins) {
    std::vector<Part> found;
    bool was_match = false;
    for (const Part& part : parts) {
        if (!found.empty() && joins(part.is_match, was_match)) {
            Range& last = found.back().range;
            last = {std::min(last.begin, part.range.begin), std::max(last.end, part.range.end)};
        } else {
            found.push_back({part.range, false});
        }
        was_match = part.is_match;
    }
    return found;
}

enum class Behavior { isolated, removed, contiguous, merged_with_previous, merged_with_next };

std::vector<Word> split(const Word& word, const std::vector<Range>& matches, Behavior behavior,
                        bool is_inverted = false) {
    std::vector<Part> parts = parts_of(word.text, matches);
    for (Part& part : parts) part.is_match = part.is_match != is_inverted;
    const bool is_backward = behavior == Behavior::merged_with_next;
    if (behavior == Behavior::contiguous) {
        parts = joined(parts, [](bool is_match, bool was_match) { return is_match == was_match; });
    } else if (is_backward || behavior == Behavior::merged_with_previous) {
        if (is_backward) std::reverse(parts.begin(), parts.end());
        parts = joined(parts, [](bool is_match, bool was_match) { return is_match && !was_match; });
        if (is_backward) std::reverse(parts.begin(), parts.end());
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

Behavior behavior_in(const JsonObject& step, const std::string& name) {
    const std::pair<std::string_view, Behavior> behaviors[] = {
        {"Isolated", Behavior::isolated},
        {"Removed", Behavior::removed},
        {"Contiguous", Behavior::contiguous},
        {"MergedWithPrevious", Behavior::merged_with_previous},
        {"MergedWithNext", Behavior::merged_with_next}};
    const std::string found = step.text(name);
    for (const auto& [known, behavior] : behaviors)
        if (found == known) return behavior;
    step.refuse(name, "Isolated, Removed, Contiguous, MergedWithPrevious or MergedWithNext");
}

Step byte_level(const JsonObject& step) {
    const bool adds_space = step.boolean("add_prefix_space");
    const bool has_words = step.boolean("use_regex", true);
    step.skip({"trim_offsets"});
    return [adds_space, has_words, regex = Regex(gpt_2_words, step.where())](const Word& word) {
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

Step metaspace(const JsonObject& step, bool& asks_for_start) {
    const std::string replacement = step.character("replacement");
    const std::string scheme = step.text_or_null("prepend_scheme").value_or("always");
    const bool has_space = step.boolean("add_prefix_space", scheme != "never");
    const bool splits = step.boolean("split", true);
    step.skip({"str_rep"});
    const bool is_known = scheme == "always" || scheme == "first" || scheme == "never";
    if (!is_known || (!has_space && scheme != "never")) {
        step.refuse("prepend_scheme", "always, first or never, as add_prefix_space says");
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
            const bool is_printable =
                (byte >= 0x21 && byte < 0x7F) || (byte >= 0xA1 && byte < 0xAD) || byte >= 0xAE;
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

PreTokenizer::PreTokenizer(const JsonObject& tokenizer) {
    for (const JsonObject& step : tokenizer.steps("pre_tokenizer", "pretokenizers")) {
        add(step);
        step.check_all_read();
    }
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

void PreTokenizer::add(const JsonObject& step) {
    const std::string type = step.text("type");
    if (type == "ByteLevel") {
        steps_.push_back(byte_level(step));
    } else if (type == "Metaspace") {
        steps_.push_back(metaspace(step, asks_for_start_));
    } else if (type == "Split") {
        const Behavior behavior = behavior_in(step, "behavior");
        const bool is_inverted = step.boolean("invert");
        steps_.push_back([=, pattern = Pattern(step)](const Word& word) {
            return split(word, pattern.find_all(word.text), behavior, is_inverted);
        });
    } else if (type == "Digits") {
        const bool each = step.boolean("individual_digits");
        steps_.push_back(
            character_split(is_numeric, each ? Behavior::isolated : Behavior::contiguous));
    } else if (type == "Punctuation") {
        const bool is_given = step.has("behavior");
        steps_.push_back(character_split(
            is_punctuation, is_given ? behavior_in(step, "behavior") : Behavior::isolated));
    } else if (type == "WhitespaceSplit") {
        steps_.push_back(character_split(is_space, Behavior::removed));
    } else if (type == "BertPreTokenizer") {
        steps_.push_back(character_split(is_space, Behavior::removed));
        steps_.push_back(character_split(is_punctuation, Behavior::isolated));
    } else {
        step.refuse("type", "a pre-tokenizer that is known here");
    }
}

}  // namespace dsbd
