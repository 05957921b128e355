// The loop: draft a forest, verify it in one target call, select layer by layer, prune.
//
// The page to read first. The width is fixed and every layer takes the target's best candidates by
// the noise that belongs to them (docs/algorithm.md), so the output does not depend on the draft.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "beams.hpp"
#include "error.hpp"
#include "forest.hpp"
#include "forest_cache.hpp"
#include "options.hpp"
#include "seed.hpp"
#include "step_model.hpp"

namespace dsbd {

struct Result {
    std::vector<Beam> sequences;    // best first
    std::size_t target_calls = 0;
    std::size_t draft_calls = 0;
};

/// What the layers of one request share.
struct Decoding {
    const Request& request;
    Scores scores;
    Forest forest;
};

inline JointLaw law_after(const ForestCache& cache, const std::vector<std::size_t>& nodes,
                          const std::vector<double>& log_weights) {
    std::vector<const TokenLaw*> laws;
    for (const std::size_t node : nodes) {
        laws.push_back(cache.law(node));
    }
    return joint_law(nodes, log_weights, laws);
}

inline bool have_all_ended(const Forest& forest, const std::vector<std::size_t>& nodes) {
    return std::all_of(nodes.begin(), nodes.end(),
                       [&forest](std::size_t node) { return forest[node].is_end; });
}

/// Add the draft's candidates to the forest, one engine call a layer. The draft's weights start at
/// those of the beams.
inline void draft_forest(Decoding& decoding, ForestCache& draft, const std::vector<Beam>& beams,
                         std::size_t num_layers) {
    std::vector<std::size_t> nodes = nodes_of(beams);
    std::vector<double> log_weights = log_weights_of(beams);
    const std::vector<std::size_t>& widths = decoding.request.layer_widths;
    const std::size_t most = decoding.request.max_new_tokens - num_layers - 1;
    for (std::size_t layer = 0; layer < std::min(widths.size(), most); ++layer) {
        if (have_all_ended(decoding.forest, nodes)) {
            return;
        }
        draft.compute(nodes);
        const JointLaw law = law_after(draft, nodes, log_weights);
        const std::vector<std::size_t> chosen = best_candidates(
            decoding.scores(decoding.forest, law, num_layers + layer), widths[layer]);
        nodes.clear();
        log_weights.clear();
        for (const std::size_t candidate : chosen) {
            nodes.push_back(decoding.forest.descend(law, candidate));
            log_weights.push_back(law.log_weights[candidate]);
        }
    }
}

/// Return the beams one layer on: the target's best candidates, whatever was drafted.
inline std::vector<Beam> select(Decoding& decoding, const ForestCache& target,
                                const std::vector<Beam>& beams, std::size_t step) {
    const JointLaw law = law_after(target, nodes_of(beams), log_weights_of(beams));
    const std::vector<std::size_t> chosen = best_candidates(
        decoding.scores(decoding.forest, law, step), decoding.request.num_beams);
    return descended(decoding.forest, beams, law, chosen);
}

/// Keep the beams, their descendants and what the caches need for both; renumber the rest away.
inline void prune(Forest& forest, const std::vector<ForestCache*>& caches,
                  std::vector<Beam>& beams) {
    std::set<std::size_t> live = forest.subtree(nodes_of(beams));
    for (const ForestCache* cache : caches) {
        live.merge(cache->needed_for(live));
    }
    const auto renumbered = forest.prune(live);
    for (ForestCache* cache : caches) {
        cache->prune(renumbered);
    }
    for (Beam& beam : beams) {
        beam.node = renumbered.at(beam.node);
    }
}

inline void check_prompt(const StepModel& model, const std::vector<std::int64_t>& prompt,
                         const Request& request) {
    if (prompt.empty()) {
        throw Error("the prompt has no token; give at least one");
    }
    for (const std::int64_t token : prompt) {
        if (token < 0 || static_cast<std::size_t>(token) >= model.vocab_size()) {
            throw Error("the prompt has token id " + std::to_string(token) + "; expected 0 to " +
                        std::to_string(model.vocab_size() - 1));
        }
    }
    const std::size_t num_positions = prompt.size() + request.max_new_tokens - 1;
    if (num_positions > model.context_length()) {
        throw Error(std::to_string(prompt.size()) + " prompt tokens and " +
                    std::to_string(request.max_new_tokens) + " new ones take " +
                    std::to_string(num_positions) + " positions, the model was made for " +
                    std::to_string(model.context_length()) +
                    "; shorten the prompt or lower max_new_tokens");
    }
    const std::size_t most = model.num_candidates();
    if (request.trie != nullptr) {
        request.trie->check(model.vocab_size());
        if (most != 0) {
            throw Error("a trie needs all logits, the engine returns " + std::to_string(most) +
                        " of a position; export with --logits full");
        }
    }
    if (most != 0 && (request.warp.top_k == 0 || request.warp.top_k > most)) {
        throw Error("the request looks at " +
                    (request.warp.top_k == 0 ? "all" : std::to_string(request.warp.top_k)) +
                    " tokens of a position, the engine returns " + std::to_string(most) +
                    "; use top_k (or draft_beams of a search) 1 to " + std::to_string(most) +
                    ", or export with --logits full");
    }
}

/// Continue a prompt; `draft` may be nullptr for strategies without one.
inline Result decode(StepModel& target, StepModel* draft, const std::vector<std::int64_t>& prompt,
                     const Request& request) {
    check_prompt(target, prompt, request);
    Decoding decoding{request, request.samples ? sampling_scores : search_scores,
                      Forest(prompt.back(), static_cast<std::int64_t>(prompt.size()) - 1,
                             noise_key(request.seed), request.eos_ids, request.trie.get())};
    ForestCache target_cache(target, decoding.forest, request.warp);
    std::optional<ForestCache> draft_cache;
    std::vector<ForestCache*> caches{&target_cache};
    if (!request.layer_widths.empty()) {
        if (draft == nullptr) {
            throw Error("the strategy drafts, but there is no draft model; give one");
        }
        check_prompt(*draft, prompt, request);
        caches.push_back(&draft_cache.emplace(*draft, decoding.forest, request.warp));
    }
    for (ForestCache* cache : caches) {
        cache->prefill(prompt);
    }
    std::vector<Beam> beams(1);
    std::size_t num_layers = 0;
    const auto is_finished = [&] {
        return num_layers == request.max_new_tokens ||
               have_all_ended(decoding.forest, nodes_of(beams));
    };
    while (!is_finished()) {
        if (draft_cache) {
            draft_forest(decoding, *draft_cache, beams, num_layers);
        }
        std::vector<std::size_t> all_nodes(decoding.forest.size());
        std::iota(all_nodes.begin(), all_nodes.end(), std::size_t{0});
        target_cache.compute(all_nodes);
        const auto is_computed = [&](const Beam& beam) {
            return target_cache.is_computed(beam.node);
        };
        while (!is_finished() && std::all_of(beams.begin(), beams.end(), is_computed)) {
            beams = select(decoding, target_cache, beams, num_layers++);
        }
        prune(decoding.forest, caches, beams);
    }
    std::stable_sort(beams.begin(), beams.end(),
                     [](const Beam& a, const Beam& b) { return a.score() > b.score(); });
    return {std::move(beams), target_cache.num_calls(), draft_cache ? draft_cache->num_calls() : 0};
}

}  // namespace dsbd
