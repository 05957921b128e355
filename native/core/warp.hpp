// From logits to distributions: temperature, top-k, top-p, renormalised per position.
#pragma once

#include "config.hpp"
#include "engine.hpp"

namespace dsbd {

/// The warping of a request: top_k 0, top_p 1, min_p 0 and typical_p 1 are off.
///
/// They are applied in this order, each with its renormalisation, as in transformers. With `is_raw`
/// the log-probabilities are the raw ones, and top-k bounds the tokens read.
struct Warp {
    double temperature = 1.0;
    std::size_t top_k = 0;
    double top_p = 1.0;
    bool is_raw = false;
    double min_p = 0.0;
    double typical_p = 1.0;

    /// Return the warping of both models' logits that a request's rule requires.
    static Warp of(const DecodingConfig& config);
    /// Return one for a search that reads fewer tokens of a position, and others later.
    Warp narrowed() const;
    /// Return one that a draft with a top-k head of K (0: all) logits can serve.
    Warp within(std::size_t num_top_logits) const;

    /// Turn logits less the largest into warped log-probabilities, -inf where one is cut.
    void warp(std::span<double> centred) const;
    /// Whether few of the tokens of largest logits may be enough to know all that can be drawn.
    bool cuts() const { return top_p < 1.0 || min_p > 0.0; }
};

/// Return how many candidates of a layer beam search takes, so that W of them go on.
std::size_t num_searched(const DecodingConfig& config);

/// Return whether sampling may draw tokens that a top-k head does not return.
bool looks_beyond(const Warp& warp, const EngineSpec& spec);

/// ConfigError: a request reads more tokens than the target keeps; a draft may.
void check_top_k(const EngineSpec& target, const DecodingConfig& config);

}  // namespace dsbd
