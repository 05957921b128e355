// The arguments of dsbd_host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "dsbd/error.hpp"
#include "dsbd/options.hpp"

struct CommandLine {
    std::string bundle;
    std::optional<std::vector<std::int64_t>> ids;
    std::optional<std::string> input_file;    // one {"ids": [...], "seed": 0} a line
    std::optional<int> num_threads;
    bool is_json = false;
    dsbd::Options options;
};

constexpr const char* usage =
    "usage: dsbd_host BUNDLE (--ids 1,2,3 | --input ids.jsonl) [--strategy dsbd] [--num-beams 4]\n"
    "    [--draft-length 4] [--draft-beams 4] [--temperature 1] [--top-k 0] [--top-p 1]\n"
    "    [--max-new-tokens 64] [--seed 0] [--eos-token-id 1] [--trie items.trie]\n"
    "    [--threads N] [--json]";

inline std::uint64_t whole_number(const std::string& name, const std::string& text,
                                  std::uint64_t most = std::numeric_limits<std::int32_t>::max()) {
    std::uint64_t value = 0;
    std::istringstream stream(text);
    const bool has_digits_only =
        !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
    if (!has_digits_only || !(stream >> value) || value > most) {
        throw dsbd::Error(name + " is '" + text + "'; expected a whole number from 0 to " +
                          std::to_string(most));
    }
    return value;
}

inline double real_number(const std::string& name, const std::string& text) {
    double value = 0.0;
    std::istringstream stream(text);
    if (!(stream >> value) || !stream.eof()) {
        throw dsbd::Error(name + " is '" + text + "'; expected a number");
    }
    return value;
}

/// Return the numbers of "1,2,3".
template <typename Number>
std::vector<Number> whole_numbers(const std::string& name, const std::string& text) {
    std::vector<Number> numbers;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');) {
        numbers.push_back(static_cast<Number>(whole_number(name, part)));
    }
    return numbers;
}

/// Set the option of a request, or return false where there is none of this name.
inline bool set_option(dsbd::Options& options, const std::string& name, const std::string& text) {
    if (name == "--strategy") {
        options.strategy = text;
    } else if (name == "--num-beams") {
        options.num_beams = whole_number(name, text);
    } else if (name == "--draft-length") {
        options.draft_length = whole_number(name, text);
    } else if (name == "--draft-beams") {
        options.draft_beams = whole_numbers<std::size_t>(name, text);
    } else if (name == "--temperature") {
        options.temperature = real_number(name, text);
    } else if (name == "--top-k") {
        options.top_k = whole_number(name, text);
    } else if (name == "--top-p") {
        options.top_p = real_number(name, text);
    } else if (name == "--max-new-tokens") {
        options.max_new_tokens = whole_number(name, text);
    } else if (name == "--seed") {
        options.seed = whole_number(name, text, std::numeric_limits<std::uint64_t>::max());
    } else if (name == "--eos-token-id") {
        const auto ids = whole_numbers<std::int64_t>(name, text);
        options.eos_token_ids.emplace(ids.begin(), ids.end());
    } else if (name == "--trie") {
        options.trie = std::make_shared<const dsbd::Trie>(text);
    } else {
        return false;
    }
    return true;
}

inline CommandLine command_line_of(const std::vector<std::string>& arguments) {
    CommandLine found;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        const std::string& name = arguments[i];
        if (name.rfind("--", 0) != 0) {
            if (!found.bundle.empty()) {
                throw dsbd::Error("a second bundle, " + name + "\n" + usage);
            }
            found.bundle = name;
        } else if (name == "--json") {
            found.is_json = true;
        } else if (i + 1 == arguments.size()) {
            throw dsbd::Error(name + " is unknown or lacks a value\n" + usage);
        } else {
            const std::string& text = arguments[++i];
            if (name == "--ids") {
                found.ids = whole_numbers<std::int64_t>(name, text);
            } else if (name == "--input") {
                found.input_file = text;
            } else if (name == "--threads") {
                found.num_threads = static_cast<int>(whole_number(name, text, 1024));
            } else if (!set_option(found.options, name, text)) {
                throw dsbd::Error(name + " is unknown\n" + usage);
            }
        }
    }
    if (found.bundle.empty() || found.ids.has_value() == found.input_file.has_value()) {
        throw dsbd::Error(std::string("expected one bundle, and either --ids or --input\n") +
                          usage);
    }
    return found;
}
