// The options of a request, checked and resolved by the table of strategies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "error.hpp"
#include "token_law.hpp"
#include "trie.hpp"

namespace dsbd {

/// What a decoder differs in from the others.
struct Strategy {
    const char* name;
    bool samples;           // else it takes the target's likeliest token
    bool has_draft;
    bool has_beams;         // num_beams may exceed 1
    bool has_draft_tree;    // draft_beams may exceed 1
};

constexpr Strategy strategies[] = {
    {"dsbd", true, true, true, true},
    {"beam-sample", true, false, true, false},
    {"speculative", true, true, false, false},
    {"tree-speculative", true, true, false, true},
    {"sample", true, false, false, false},
    {"speculative-beam-search", false, true, false, true},
    {"greedy", false, false, false, false},
};

/// The names and meanings of dsbd-run; the width is fixed and the coupling gumbel.
struct Options {
    std::string strategy = "dsbd";
    std::optional<std::size_t> num_beams;       // default 4; 1 for strategies of one beam
    std::optional<std::size_t> draft_length;    // default 4
    std::vector<std::size_t> draft_beams;       // one number, or one a layer; default num_beams
    double temperature = 1.0;
    std::size_t top_k = 0;
    double top_p = 1.0;
    std::size_t max_new_tokens = 64;
    std::uint64_t seed = 0;
    std::optional<std::set<std::int64_t>> eos_token_ids;    // default: what the bundle says
    std::shared_ptr<const Trie> trie;                       // of the sequences that are allowed
};

/// Checked options with nothing left open.
struct Request {
    bool samples;
    std::size_t num_beams;
    std::vector<std::size_t> layer_widths;    // candidates of every drafted layer
    Warp warp;
    std::size_t max_new_tokens;
    std::uint64_t seed;
    std::set<std::int64_t> eos_ids;
    std::shared_ptr<const Trie> trie;
};

inline const Strategy& find_strategy(const std::string& name) {
    std::string names;
    for (const Strategy& strategy : strategies) {
        if (name == strategy.name) {
            return strategy;
        }
        names += std::string(names.empty() ? "" : ", ") + strategy.name;
    }
    throw Error("strategy is '" + name + "'; expected one of " + names);
}

inline std::vector<std::size_t> layer_widths(const Options& options, const Strategy& strategy,
                                             std::size_t num_beams) {
    if (!strategy.has_draft) {
        if (options.draft_length.value_or(0) != 0 || !options.draft_beams.empty()) {
            throw Error("draft_length or draft_beams is given, but strategy " + options.strategy +
                        " drafts nothing; leave them out or use dsbd");
        }
        return {};
    }
    const std::size_t length = options.draft_length.value_or(4);
    const bool has_wide_tree = strategy.has_draft_tree && strategy.samples && !strategy.has_beams;
    std::vector<std::size_t> widths = options.draft_beams;
    if (widths.size() <= 1) {
        const std::size_t width = widths.empty() ? (has_wide_tree ? 4 : num_beams) : widths[0];
        widths.assign(length, width);
    }
    if (widths.size() != length) {
        throw Error("draft_beams has " + std::to_string(widths.size()) +
                    " layers, draft_length is " + std::to_string(length) +
                    "; give one number per layer or one for all");
    }
    for (const std::size_t width : widths) {
        if (width < num_beams || (width > 1 && !strategy.has_draft_tree)) {
            throw Error("draft_beams has a layer of " + std::to_string(width) + "; expected " +
                        (strategy.has_draft_tree ? "at least num_beams, " : "") +
                        std::to_string(num_beams));
        }
    }
    return widths;
}

inline Warp sampling_warp(const Options& options) {
    if (!(options.temperature >= 1e-6)) {
        throw Error("temperature is " + std::to_string(options.temperature) + "; expected at " +
                    "least 0.000001, or strategy greedy");
    }
    if (!(options.top_p > 0.0 && options.top_p <= 1.0)) {
        throw Error("top_p is " + std::to_string(options.top_p) +
                    "; expected more than 0, up to 1");
    }
    return {options.temperature, options.top_k, options.top_p, false};
}

/// A layer takes one token of the target and at most the widest layer's number from the draft.
inline Warp search_warp(const Options& options, const std::vector<std::size_t>& widths) {
    const bool is_plain = options.temperature == 0.0 || options.temperature == 1.0;
    if (!is_plain || options.top_k != 0 || options.top_p != 1.0) {
        throw Error("temperature, top_k or top_p is given, which means nothing to strategy " +
                    options.strategy + "; leave it out");
    }
    std::size_t most = 1;
    for (const std::size_t width : widths) {
        most = std::max(most, width);
    }
    return {1.0, most, 1.0, true};
}

/// eos_ids: those of the model, for a request that names none.
inline Request checked(const Options& options, const std::set<std::int64_t>& eos_ids) {
    const Strategy& strategy = find_strategy(options.strategy);
    const std::size_t num_beams = options.num_beams.value_or(strategy.has_beams ? 4 : 1);
    if (num_beams == 0 || (num_beams > 1 && !strategy.has_beams)) {
        throw Error("num_beams is " + std::to_string(num_beams) + "; expected " +
                    (strategy.has_beams ? "at least 1" : "1: strategy " + options.strategy +
                                                             " has one beam in this host"));
    }
    if (options.max_new_tokens == 0) {
        throw Error("max_new_tokens is 0; expected at least 1");
    }
    std::vector<std::size_t> widths = layer_widths(options, strategy, num_beams);
    const Warp warp =
        strategy.samples ? sampling_warp(options) : search_warp(options, widths);
    return {strategy.samples, num_beams,    std::move(widths), warp, options.max_new_tokens,
            options.seed,     options.eos_token_ids.value_or(eos_ids), options.trie};
}

}  // namespace dsbd
