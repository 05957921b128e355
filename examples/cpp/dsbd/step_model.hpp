// The algorithm's only view of a model: rows are appended, some are kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dsbd {

/// S forest nodes to append to a cache of N rows, parents before children.
struct StepInput {
    std::vector<std::int64_t> token_ids;     // (S,)
    std::vector<std::int64_t> positions;     // (S,); siblings share one
    std::vector<std::uint8_t> mask;          // (S, N + S); 1: node s sees cache row c
    std::vector<std::int64_t> logit_rows;    // (R,): which of the S nodes need logits
};

/// What a model returns of R asked rows: all logits, or the largest of them and their sum.
struct HeadOutput {
    std::size_t row_size = 0;         // the vocabulary, or the K candidates of a top-k head
    std::vector<float> logits;        // (R, row_size); of candidates by decreasing logit
    std::vector<std::int64_t> ids;    // (R, row_size) tokens of candidates; empty: all, by id
    std::vector<float> logsumexp;     // (R,) over the vocabulary; empty without a top-k head
};

class StepModel {
public:
    virtual ~StepModel() = default;

    virtual std::size_t vocab_size() const = 0;
    virtual std::size_t context_length() const = 0;
    /// Return K of a top-k head, 0 for a model that returns all logits.
    virtual std::size_t num_candidates() const = 0;
    /// Return how many rows are in the cache.
    virtual std::size_t num_rows() const = 0;
    /// Append S rows, return what the head makes of the R asked ones.
    virtual HeadOutput step(const StepInput& input) = 0;
    /// Keep the cache rows `rows` (increasing), which become rows 0, 1, 2 ...; drop all others.
    virtual void keep(const std::vector<std::size_t>& rows) = 0;
};

}  // namespace dsbd
