// Next-token distributions of many positions, by row (slot), in flat arrays.
//
// Python has three classes: of the K best tokens each (top), of the whole vocabulary, held as
// logits (dense), of the tokens that may be drawn (listed). Here these are three kinds of rows of
// one class. Top and dense rows hold logits until they are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "forward.hpp"
#include "warp.hpp"

namespace dsbd {

/// The next-token distribution of one position.
struct TokenDistribution {
    std::span<const std::int64_t> tokens;  // top_k of them by decreasing logit, ties by id; or by id
    std::span<const double> log_probs;     // warped; -inf if top-p has cut a token
    std::span<const double> raw_log_probs; // unwarped, over the whole vocabulary
};

/// The arrays of candidates, one entry for each, into which distributions are copied.
struct CandidateArrays {
    std::int64_t* tokens;
    double* log_probs;
    double* raw_log_probs;
};

class TokenDistributions {
public:
    enum class Kind : std::uint8_t { none, top, dense, listed };

    /// Row 0 is no distribution.
    explicit TokenDistributions(const Warp& warp) : warp_(warp) { clear(); }

    Kind kind() const { return kind_; }
    /// Rows, row 0 included.
    std::size_t size() const { return begins_.size(); }

    /// Add a row of the K most probable tokens: room for K ids and logits, to be filled.
    std::span<double> add_top(std::size_t num_tokens, double normalizer, std::int64_t*& tokens);
    /// Add a row of the whole vocabulary, (vocab_size,), which is copied. normalizer: NaN if it is
    /// to be computed when the row is read.
    void add_dense(std::span<const float> logits, float largest, double normalizer);
    /// Add a row of listed tokens, of which those of log-probability -inf are left out.
    void add_listed(std::span<const std::int64_t> tokens, std::span<const double> log_probs,
                    std::span<const double> raw_log_probs);

    /// Keep row 0 and these rows, which become 1, 2, ...; drop all others.
    void keep(std::span<const std::int64_t> rows);
    void clear();

    /// How many tokens a row has; of row 0 as many as any other, 1 if the tokens are listed.
    std::size_t num_tokens(std::size_t row) const;
    /// Write the candidates of a row, `num_tokens(row)` of them.
    void copy(std::size_t row, const CandidateArrays& found);
    /// Return a row, valid until the next call.
    TokenDistribution read(std::size_t row);
    /// Return the last log-probability of a top row.
    double least(std::size_t row);
    /// Return the warped log-probability of one token of a row, -inf if it cannot be drawn.
    double log_prob_of(std::size_t row, std::int64_t token);

    std::size_t num_bytes() const;

private:
    void make(std::size_t row);  // of a top row that holds logits
    void begin(Kind kind);

    Warp warp_;
    Kind kind_ = Kind::none;
    std::size_t vocab_size_ = 0;               // of dense rows
    std::vector<std::size_t> begins_, counts_;  // by row, in the arrays of entries
    std::vector<std::uint8_t> is_made_;         // by row: whether a top row has been warped
    Floats normalizers_;                        // by row
    std::vector<float> largest_;                // by row
    Ints tokens_;                               // by entry, as the following
    Floats log_probs_, raw_log_probs_;
    std::vector<float> logits_;                 // of dense rows, (num_rows, vocab_size)
    TokenDistribution read_;
    Ints read_tokens_;
    Floats read_log_probs_, read_raw_;
};

}  // namespace dsbd
