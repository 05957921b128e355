// Bounds of the rows and nodes of a request, before it begins.
#include "row_bounds.hpp"

#include "config.hpp"
#include "drafting/draft.hpp"

namespace dsbd {
namespace {

constexpr std::size_t MOST_EXPECTED_TOKENS = 1024;

}  // namespace

std::size_t most_draft_nodes(const DecodingConfig& config) {
    const std::size_t most_layers = config.max_new_tokens - 1;
    if (!config.drafts() || !config.has_constraint()) {
        std::size_t num_nodes = 0;
        for (std::size_t i = 0; i < std::min(most_layers, config.draft_beams.size()); ++i) {
            num_nodes += config.draft_beams[i];
        }
        return num_nodes;
    }
    const std::size_t num_layers =
        std::min(most_layers, config.draft_beams.size() + MOST_FORCED_LAYERS);
    return num_layers * std::max(config.num_beams, config.most_draft_beams());
}

std::size_t most_descendants(const DecodingConfig& config) { return 2 * most_draft_nodes(config); }

std::size_t most_rows(std::size_t num_prompt_tokens, const DecodingConfig& config,
                      bool has_top_k_head) {
    const std::size_t num_beams = config.widest_search();
    const std::size_t num_forced =
        config.drafts() && config.has_constraint() ? MOST_FORCED_LAYERS : 0;
    const std::size_t num_layers =
        std::min(config.draft_beams.size() + num_forced + 1, config.max_new_tokens);
    const std::size_t on_paths = num_beams * (config.max_new_tokens + 1);
    const std::size_t left = num_beams + most_descendants(config);
    std::size_t added = most_draft_nodes(config) + (num_layers + 1) * num_beams;
    if (config.processes_logits()) {
        added *= has_top_k_head ? 2 : 1;  // see ForestRunner::compute
    } else if (config.row->rule == Rule::search) {
        added += num_beams;  // see ForestRunner::read_left_out
    }
    return num_prompt_tokens + on_paths + left + added;
}

std::size_t expected_rows(std::size_t num_prompt_tokens, const DecodingConfig& config) {
    const std::size_t num_tokens =
        num_prompt_tokens + std::min(config.max_new_tokens, MOST_EXPECTED_TOKENS);
    return std::min(num_tokens + most_descendants(config), most_rows(num_prompt_tokens, config));
}

}  // namespace dsbd
