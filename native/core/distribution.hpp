// Next-token distributions of many positions, by row (slot), in flat arrays.
//
// Python has three classes: of the K best tokens each (top), of the whole vocabulary, held as
// logits (dense), of the tokens that may be drawn (listed). Here these are three kinds of rows of
// one class. Top and dense rows hold logits until they are read.
#pragma once

#include "best_by_noise.hpp"
#include "warp.hpp"

namespace dsbd {

/// Arrays of candidates into which a distribution is copied, one entry for each token.
struct CandidateArrays {
    std::int64_t* tokens;   // top_k of them by decreasing logit, ties by id; or all by id
    double* log_probs;      // warped; -inf if top-p has cut a token
    double* raw_log_probs;  // unwarped, over the whole vocabulary
};

class TokenDistributions {
public:
    enum class Kind : std::uint8_t { none, top, dense, listed };

    /// Begin with row 0, which is no distribution and has no tokens.
    explicit TokenDistributions(const Warp& warp) : warp_(warp) { clear(); }

    /// Of all rows; none: there is only row 0.
    Kind kind() const { return kind_; }
    /// Rows, row 0 included.
    std::size_t size() const { return begins_.size(); }

    /// Add a row of the K most probable tokens; return arrays to be filled with these and their
    /// logits.
    struct TopRow {
        std::int64_t* tokens;
        double* logits;
    };
    TopRow add_top(std::size_t num_tokens, double normalizer);
    /// Add a row of the whole vocabulary, which is copied. ModelError: see `largest_logit`.
    void add_dense(std::span<const float> logits);
    /// Add a row of the whole vocabulary of an engine that returns largest logit and normalizer.
    void add_dense(std::span<const float> logits, float largest, double normalizer);
    /// Add a row of listed tokens, of which those of log-probability -inf are left out.
    void add_listed(IntSpan tokens, FloatSpan log_probs, FloatSpan raw_log_probs);

    /// Keep row 0 and these rows, which become 1, 2, ...; drop all others.
    void keep(IntSpan rows);
    void clear();

    std::size_t num_tokens(std::int64_t row) const { return counts_[at(row)]; }
    /// Write the candidates of a row, `num_tokens(row)` of them.
    void copy(std::int64_t row, const CandidateArrays& found);
    /// Whether every token has its log-probability by itself: rows are dense and not cut.
    bool are_whole() const;
    /// Return such a row.
    WholeRow whole(std::int64_t row);
    /// Let `best` consider the continuations of a beam, those of a row.
    void consider(std::int64_t row, const NoisyBeam& beam, BestByNoise& best);
    /// Return the raw log-probability of an entry of a row.
    double raw_log_prob(std::int64_t row, std::size_t place);
    /// Return the last log-probability of a row of the most probable tokens.
    double least(std::int64_t row);
    /// Return the warped log-probability of one token of a row, -inf if it cannot be drawn.
    double log_prob_of(std::int64_t row, std::int64_t token);

    std::size_t num_bytes() const;

private:
    /// The numbers of all rows; one set is spare, for `keep`.
    struct Entries {
        Ints tokens;  // of top and listed rows, as the following
        Floats log_probs, raw_log_probs;
        std::vector<float> logits;  // of dense rows
    };

    std::size_t add_row(Kind kind, std::size_t num_entries, std::size_t num_tokens);
    /// Warp a top row that holds logits, if it still does; return where it begins.
    std::size_t made(std::int64_t row);
    std::span<const float> logits_of(std::size_t row) const {
        return {&entries_.logits[begins_[row]], counts_[row]};
    }
    /// Write the warped log-probabilities of a dense row, (vocab_size,).
    void warp_dense(std::size_t row, double* log_probs);
    double normalizer_of(std::size_t row);

    Warp warp_;
    Kind kind_ = Kind::none;
    Entries entries_, spare_;
    std::vector<std::size_t> begins_, counts_;  // by row, as the following
    std::vector<std::uint8_t> is_made_;         // whether a top row is warped
    std::vector<float> largest_;                // of dense rows
    Floats normalizers_, log_sums_;             // NaN: not computed yet
    Floats warped_;                             // of a dense row
};

}  // namespace dsbd
