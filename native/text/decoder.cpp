// Decoders of tokenizer.json: tokens to text.
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "steps.hpp"
#include "unicode.hpp"

namespace dsbd {

namespace {

using Tokens = std::vector<std::string>;
using Step = std::function<void(Tokens&)>;

std::string joined(const Tokens& tokens, std::string_view separator = "") {
    std::string text;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        text.append(i > 0 ? separator : "").append(tokens[i]);
    }
    return text;
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
    for (std::size_t at = text.find(from); at != std::string::npos;
         at = text.find(from, at + to.size())) {
        text.replace(at, from.size(), to);
    }
}

void byte_level(Tokens& tokens) {
    std::string bytes;
    for (const std::string& token : tokens) bytes += bytes_from_symbols(token).value_or(token);
    tokens = {text_of_bytes(bytes)};
}

void byte_fallback(Tokens& tokens) {
    Tokens found;
    std::string run;
    const auto end_run = [&] {
        if (is_valid(run)) {
            found.push_back(run);
        } else {
            found.insert(found.end(), run.size(), std::string(replacement_character));
        }
        run.clear();
    };
    for (const std::string& token : tokens) {
        if (const auto byte = byte_of_spelling(token)) {
            run += *byte;
            continue;
        }
        if (!run.empty()) end_run();
        found.push_back(token);
    }
    if (!run.empty()) end_run();
    tokens = std::move(found);
}

Step strip(const JsonObject& step) {
    const std::string content = step.character("content");
    const std::size_t start = step.number("start");
    const std::size_t stop = step.number("stop");
    return [=](Tokens& tokens) {
        for (std::string& token : tokens) {
            for (std::size_t i = 0; i < start && token.rfind(content, 0) == 0; ++i) {
                token.erase(0, content.size());
            }
            for (std::size_t i = 0;
                 i < stop && token.size() >= content.size() &&
                 token.compare(token.size() - content.size(), std::string::npos, content) == 0;
                 ++i) {
                token.erase(token.size() - content.size());
            }
        }
    };
}

Step metaspace(const JsonObject& step) {
    const std::string replacement = step.character("replacement");
    const bool begins = step.text_or_null("prepend_scheme").value_or("always") != "never" &&
                        step.boolean("add_prefix_space", true);
    step.skip({"split", "str_rep"});
    return [=](Tokens& tokens) {
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            replace_all(tokens[i], replacement, i == 0 && begins ? "" : " ");
        }
    };
}

Step word_piece(const JsonObject& step) {
    const std::string prefix = step.text("prefix");
    const bool cleans = step.boolean("cleanup");
    return [=](Tokens& tokens) {
        constexpr std::pair<std::string_view, std::string_view> cleaned[] = {
            {" .", "."},   {" ?", "?"},     {" !", "!"},    {" ,", ","},
            {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},  {" do not", " don't"},
            {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            std::string& token = tokens[i];
            if (i > 0) {
                token = token.rfind(prefix, 0) == 0 ? token.substr(prefix.size()) : " " + token;
            }
            for (const auto& [from, to] : cleaned)
                if (cleans) replace_all(token, from, to);
        }
    };
}

Step word_ends(const JsonObject& step) {
    const std::string suffix = step.text("suffix");
    if (suffix.empty()) step.refuse("suffix", "a text that is not empty");
    return [=](Tokens& tokens) {
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            replace_all(tokens[i], suffix, i + 1 == tokens.size() ? "" : " ");
        }
    };
}

/// What `joints_of` reads of a step.
struct Kind {
    std::string type;
    bool keeps_bytes = false;      // it leaves every <0xE2> as it is
    bool is_by_character = false;  // it treats each character of a joined text by itself
};

Step replace(const JsonObject& step, Kind& kind) {
    const Pattern pattern(step);
    const std::string content = step.text("content");
    const std::string& plain = pattern.plain();
    kind.keeps_bytes =
        !plain.empty() &&
        (plain + content).find_first_of("<0x123456789abcdefABCDEF+>") == std::string::npos;
    kind.is_by_character = !plain.empty() && scanned(plain, 0).length == plain.size();
    return [=](Tokens& tokens) {
        for (std::string& token : tokens) token = replaced(token, pattern, content);
    };
}

Step step_of(const JsonObject& step, Kind& kind) {
    kind.type = step.text("type");
    kind.is_by_character = kind.type == "Fuse" || kind.type == "Metaspace";
    if (kind.type == "ByteLevel") {
        step.skip({"add_prefix_space", "trim_offsets", "use_regex"});
        return byte_level;
    }
    if (kind.type == "ByteFallback") return byte_fallback;
    if (kind.type == "Fuse") {
        return [](Tokens& tokens) { tokens = {joined(tokens)}; };
    }
    if (kind.type == "Strip") {
        kind.is_by_character = step.number("start") <= most_stripped && step.number("stop") == 0;
        return strip(step);
    }
    if (kind.type == "Replace") return replace(step, kind);
    if (kind.type == "Metaspace") return metaspace(step);
    if (kind.type == "WordPiece") return word_piece(step);
    if (kind.type == "BPEDecoder") return word_ends(step);
    step.refuse("type", "a decoder that is known here");
}

void complete(TextJoints& joints, const std::vector<Kind>& kinds) {
    const auto has_type = [](std::string_view type) {
        return [type](const Kind& kind) { return kind.type == type; };
    };
    const auto begin = kinds.begin(), end = kinds.end();
    const auto fallback = std::find_if(begin, end, has_type("ByteFallback"));
    const auto joint = std::find_if(begin, end, [](const Kind& kind) {  // all before are by token
        return kind.type == "Fuse" || kind.type == "ByteLevel";
    });
    joints.joins_bytes = std::any_of(begin, end, has_type("ByteLevel"));
    joints.has_byte_runs = fallback != end;
    joints.is_local = !(joints.joins_bytes && joints.has_byte_runs) &&
                      std::count_if(begin, end, has_type("ByteFallback")) <= 1 &&
                      (fallback == end ||
                       std::all_of(begin, fallback, [](auto& kind) { return kind.keeps_bytes; })) &&
                      (joint == end || std::all_of(joint + 1, end, [](auto& kind) {
                           return kind.is_by_character;
                       }));
    joints.joins_bytes = joints.is_local && joints.joins_bytes;
    joints.has_byte_runs = joints.is_local && joints.has_byte_runs;
}

}  // namespace

Decoder::Decoder(const JsonObject& tokenizer) : is_given_(tokenizer.has("decoder")) {
    std::vector<Kind> kinds;
    for (const JsonObject& step : tokenizer.steps("decoder", "decoders")) {
        steps_.push_back(step_of(step, kinds.emplace_back()));
        step.check_all_read();
    }
    complete(joints_, kinds);
}

std::string Decoder::decoded(std::vector<std::string> tokens) const {
    for (const auto& step : steps_) step(tokens);
    return joined(tokens, is_given_ ? "" : " ");
}

std::optional<char> byte_of_spelling(std::string_view token) {
    if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return std::nullopt;
    // The tokenizers library reads "+A" as 10 as well.
    const std::string digits(token.substr(token[3] == '+' ? 4 : 3, token[3] == '+' ? 1 : 2));
    if (digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
        return std::nullopt;
    }
    return static_cast<char>(std::strtol(digits.c_str(), nullptr, 16));
}

}  // namespace dsbd
