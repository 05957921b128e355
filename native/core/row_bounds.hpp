// Bounds of the rows and nodes of a request, before it begins.
#pragma once

#include "forward.hpp"

namespace dsbd {

struct DecodingConfig;

/// Return how many nodes one draft may add.
///
/// No layer is drafted for the last token. Forced layers of a constraint are as wide as any.
std::size_t most_draft_nodes(const DecodingConfig& config);

/// Return how many nodes below the beams pruning may leave: two drafts' worth, the oldest.
///
/// So that the rows of a request have a bound. Others are computed again if they are selected.
std::size_t most_descendants(const DecodingConfig& config);

/// Return a bound of the rows that a request ever holds in the cache of one engine.
///
/// The paths of the beams take at most `num_beams` rows a token. Added are the nodes that pruning
/// leaves, and the rows of one iteration: a draft, and the selected nodes of every layer.
///
/// has_top_k_head: of the target, which may have to compute a node again.
std::size_t most_rows(std::size_t num_prompt_tokens, const DecodingConfig& config,
                      bool has_top_k_head = true);

/// Return the rows that a request usually comes to hold, if it runs to its end.
///
/// Its beams share most tokens. A very long answer is expected to end sooner: attention reads all
/// rows for which there is room.
std::size_t expected_rows(std::size_t num_prompt_tokens, const DecodingConfig& config);

}  // namespace dsbd
