// The logits of the rows of a forward, by what the engine's head returns (as
// dsbd_forward/logits.py).
//
// The raw log-probability of a token is its logit minus the row's log-normalizer, in double. A
// top-k head returns the normalizer with the row; otherwise it is computed here. So a
// log-probability is a function of the engine and the path, never of the call.
#pragma once

#include "engine.hpp"

namespace dsbd {

/// ModelError: these are not logits of so many rows of an engine.
void check_logits(const Logits& logits, const EngineSpec& spec, std::size_t num_rows);

/// Whether all logits of the rows can be read.
inline bool has_full(const Logits& logits) { return logits.values || logits.full; }

/// Return all logits of a row, (vocab_size,).
std::span<const float> full_row(const Logits& logits, std::size_t row);
/// Write the logits of these tokens of a row whose logits can all be read, (n,).
void read_logits(const Logits& logits, std::size_t row, IntSpan tokens, std::span<double> found);

/// ModelError: a top-k head returned an infinite or NaN number, or a larger one after the first.
/// Those of a dense head are checked when they are read.
void check_largest(const Logits& logits);

/// Return the log of a row's sum of exp(logit); ModelError: it is not finite.
double log_normalizer(const Logits& logits, std::size_t row);

/// Return how many tokens `most_probable` writes for `number`; 0: all that are known.
std::size_t num_most_probable(const Logits& logits, std::size_t number);
/// Write the most probable tokens of a row by decreasing logit, ties by increasing id, and their
/// logits. Both checks have been made.
void most_probable(const Logits& logits, std::size_t row, std::size_t number, std::int64_t* tokens,
                   double* scores);

}  // namespace dsbd
