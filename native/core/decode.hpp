// The decoding loop: draft a forest, verify it in one target call, select, prune, observe.
//
// Start here. Every strategy is this loop (docs/algorithm.md 3) with its own selection rule. The
// loop hands out the engine calls that it needs and never makes one: `batched_decoder` makes those
// of several requests together.
//
// Glossary:
//     iteration         draft, verify, select, prune once
//     node              a (path, token) of the forest, the trie below the prompt
//     row               a node's entry in the key/value cache of an engine
//     candidate         a (beam, token) pair that may become a node
//     draft layer       candidates of one depth that the draft proposed
//     accepted          committed layers whose nodes were all drafted
//     bonus             the layer after the last accepted one: selected by the target alone
//     committed         accepted and bonus layers together: final, never taken back
#pragma once

#include "cache_view.hpp"
#include "engine_call.hpp"
#include "request.hpp"
#include "result.hpp"

namespace dsbd {

/// Continue a prompt; hand out the engine calls it needs, and the output of every iteration to the
/// request's receiver. Throws what `check_decodable` throws, once it is begun.
///
/// request: outlives the computation. target: a view of the cache of the model whose distribution
/// the output follows, which begins with the rows of a prefix of the prompt without its last token.
/// draft: the same of the model that proposes; null for strategies without a draft.
EngineCalls<DecodeResult> decoding_loop(DecodingRequest& request, CacheView& target,
                                        CacheView* draft);

}  // namespace dsbd
