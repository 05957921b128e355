// Normalizers of tokenizer.json: a text before it is split.
#include <algorithm>
#include <optional>
#include <utility>

#include "steps.hpp"
#include "unicode.hpp"

namespace dsbd {

namespace {

bool is_chinese(char32_t code) {
    return (code >= 0x4E00 && code <= 0x9FFF) || (code >= 0x3400 && code <= 0x4DBF) ||
           (code >= 0x20000 && code <= 0x2A6DF) || (code >= 0x2A700 && code <= 0x2B73F) ||
           (code >= 0x2B740 && code <= 0x2B81F) || (code >= 0x2B920 && code <= 0x2CEAF) ||
           (code >= 0xF900 && code <= 0xFAFF) || (code >= 0x2F800 && code <= 0x2FA1F);
}

/// Return a text with `map(code, character)` instead of each character.
template <class Map>
std::string mapped(std::string_view text, const Map& map) {
    std::string found;
    for_each_character(
        text, [&](char32_t code, std::string_view character) { found += map(code, character); });
    return found;
}

template <class IsDropped>
std::string without(std::string_view text, const IsDropped& is_dropped) {
    return mapped(text, [&](char32_t code, std::string_view character) {
        return is_dropped(code) ? "" : character;
    });
}

std::string_view clean(char32_t code, std::string_view character) {
    if (code == '\t' || code == '\n' || code == '\r') return " ";
    if (code == 0xFFFD || is_control(code)) return "";
    return is_space(code) ? " " : character;
}

std::string spaced_if_chinese(char32_t code, std::string_view character) {
    return is_chinese(code) ? " " + std::string(character) + " " : std::string(character);
}

std::string stripped(std::string_view text, bool left, bool right) {
    std::size_t begin = left ? text.size() : 0;
    std::size_t end = right ? 0 : text.size();
    std::size_t at = 0;
    for_each_character(text, [&](char32_t code, std::string_view character) {
        if (!is_space(code)) {
            begin = std::min(begin, at);
            end = right ? at + character.size() : end;
        }
        at += character.size();
    });
    return std::string(text.substr(begin, end - std::min(begin, end)));
}

std::function<std::string(std::string)> bert_normalizer(const JsonObject& step) {
    const bool cleans = step.boolean("clean_text");
    const bool spaces_chinese = step.boolean("handle_chinese_chars");
    const bool lowers = step.boolean("lowercase");
    const bool strips_accents = step.boolean("strip_accents", lowers);
    return [=](std::string text) {
        text = cleans ? mapped(text, clean) : text;
        text = spaces_chinese ? mapped(text, spaced_if_chinese) : text;
        if (strips_accents) text = without(normal_form(text, NormalForm::nfd), is_accent);
        return lowers ? lower_case(text) : text;
    };
}

std::string bytes_from_base64(std::string_view text) {
    constexpr std::string_view digits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string bytes;
    std::size_t bits = 0, num_bits = 0;
    for (const char c : text.substr(0, text.find('='))) {
        const std::size_t digit = digits.find(c);
        if (digit == std::string_view::npos) return "";
        bits = bits << 6 | digit;
        num_bits += 6;
        if (num_bits >= 8) bytes += static_cast<char>(bits >> (num_bits -= 8));
    }
    return bytes;
}

/// The table of a sentencepiece model, from texts to texts: its size, a trie (double array) whose
/// leaves are places of texts, and those texts, each with a zero byte at its end.
class Charsmap {
public:
    explicit Charsmap(const JsonObject& step)
        : bytes_(bytes_from_base64(step.text("precompiled_charsmap"))), texts_(4 + number(0)) {
        if (texts_ > bytes_.size() || !is_valid(std::string_view(bytes_).substr(texts_))) {
            step.refuse("precompiled_charsmap", "a trie and texts in base64");
        }
    }

    /// Clusters of up to 5 bytes are looked up as a whole, all others by character.
    std::string normalized(std::string_view text) const {
        std::string result;
        for (const std::string_view cluster : clusters(text)) {
            const auto whole = cluster.size() < 6 ? find(cluster) : std::nullopt;
            result += whole ? std::string(*whole)
                            : mapped(cluster, [&](char32_t, std::string_view character) {
                                  return find(character).value_or(character);
                              });
        }
        return result;
    }

private:
    /// Return what replaces the shortest beginning of a text that is in the table, if one is.
    std::optional<std::string_view> find(std::string_view text) const {
        std::size_t node = child(unit(0));
        for (const char c : text) {
            const auto byte = static_cast<unsigned char>(c);
            node ^= byte;
            const std::uint32_t found = unit(node);
            if (byte == 0 || (found & 0x800000FF) != byte) break;
            node ^= child(found);
            if ((found >> 8 & 1) == 0) continue;
            return bytes_.c_str() + std::min(texts_ + (unit(node) & MOST_COUNT), bytes_.size());
        }
        return std::nullopt;
    }
    std::uint32_t unit(std::size_t node) const { return number(4 + 4 * node); }
    static std::uint32_t child(std::uint32_t unit) { return unit >> 10 << ((unit & 0x200) >> 6); }

    std::uint32_t number(std::size_t begin) const {
        std::uint32_t found = 0;
        for (std::size_t at = std::min(begin + 4, bytes_.size()); at-- > begin;) {
            found = found << 8 | static_cast<unsigned char>(bytes_[at]);
        }
        return found;
    }

    std::string bytes_;
    std::size_t texts_;  // where they begin
};

}  // namespace

Pattern::Pattern(const JsonObject& step) {
    const JsonObject kind = step.object("pattern");
    if (const auto plain = kind.text_or_null("String")) {
        if (plain->empty()) kind.refuse("String", "a text that is not empty");
        plain_ = *plain;
        find_ = [plain = *plain](std::string_view text) { return dsbd::find_all(text, plain); };
    } else {
        find_ = [regex = Regex(kind.text("Regex"), kind.where())](std::string_view text) {
            return regex.find_all(text);
        };
    }
    kind.check_all_read();
}

std::string replaced(std::string_view text, const Pattern& pattern, std::string_view content) {
    std::string result;
    std::size_t end = 0;
    for (const Range& match : pattern.find_all(text)) {
        result += text.substr(end, match.begin - end);
        result += content;
        end = match.end;
    }
    result += text.substr(end);
    return result;
}

Normalizer::Normalizer(const JsonObject& tokenizer) {
    for (const JsonObject& step : tokenizer.steps("normalizer", "normalizers")) {
        add(step);
        step.check_all_read();
    }
}

std::string Normalizer::normalized(std::string text) const {
    for (const auto& step : steps_) text = step(std::move(text));
    return text;
}

void Normalizer::add(const JsonObject& step) {
    const std::string type = step.text("type");
    const std::pair<std::string_view, NormalForm> forms[] = {{"NFC", NormalForm::nfc},
                                                             {"NFD", NormalForm::nfd},
                                                             {"NFKC", NormalForm::nfkc},
                                                             {"NFKD", NormalForm::nfkd}};
    for (const auto& [name, form] : forms) {
        if (type == name) {
            steps_.push_back([form = form](std::string text) { return normal_form(text, form); });
            return;
        }
    }
    if (type == "Prepend") {
        steps_.push_back([prefix = step.text("prepend")](std::string text) {
            return text.empty() ? text : prefix + text;
        });
    } else if (type == "Replace") {
        const Pattern pattern(step);
        const std::string content = step.text("content");
        const std::string& plain = pattern.plain();
        keeps_start_ = keeps_start_ && !content.empty() && !plain.empty() &&
                       scanned(plain, 0).length == plain.size();
        steps_.push_back([=](std::string text) { return replaced(text, pattern, content); });
    } else if (type == "Lowercase") {
        steps_.push_back([](std::string text) { return lower_case(text); });
    } else if (type == "Strip") {
        const bool left = step.boolean("strip_left");
        const bool right = step.boolean("strip_right");
        steps_.push_back([=](std::string text) { return stripped(text, left, right); });
        keeps_start_ = keeps_start_ && !left;
    } else if (type == "StripAccents") {
        steps_.push_back([](std::string text) { return without(text, is_mark); });
        keeps_start_ = false;
    } else if (type == "Precompiled") {
        steps_.push_back([map = Charsmap(step)](std::string text) { return map.normalized(text); });
        keeps_start_ = false;
    } else if (type == "BertNormalizer") {
        steps_.push_back(bert_normalizer(step));
        keeps_start_ = false;
    } else {
        step.refuse("type", "a normalizer that is known here");
    }
}

}  // namespace dsbd
