// One forward of an engine over nodes of a forest, and its result; of several requests, joined.
//
// S: new rows, parents before children; N: rows of the cache, the S new ones included; R: rows
// whose logits are returned. As dsbd_forward does in Python. All of the core includes this file,
// and with it these standard headers and short names.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace dsbd {

using Ints = std::vector<std::int64_t>;
using Floats = std::vector<double>;
using IntSpan = std::span<const std::int64_t>;
using FloatSpan = std::span<const double>;

using Flags = std::vector<std::uint8_t>;

/// A number that is not negative, as an index.
inline std::size_t at(std::int64_t number) { return static_cast<std::size_t>(number); }

/// Let numbers be `first`, `first` + 1, ..., so many.
template <class T>
void count_up(std::vector<T>& numbers, std::size_t size, std::type_identity_t<T> first = 0) {
    numbers.resize(size);
    std::iota(numbers.begin(), numbers.end(), first);
}

/// Return the entries in these places.
template <class Entries, class Places>
auto entries_at(const Entries& entries, const Places& places) {
    std::vector<typename Entries::value_type> found;
    found.reserve(places.size());
    for (const auto place : places) found.push_back(entries[static_cast<std::size_t>(place)]);
    return found;
}

/// Return the places of the flags that are set, increasing.
inline Ints places_of(const Flags& flags) {
    Ints found;
    for (std::size_t place = 0; place < flags.size(); ++place) {
        if (flags[place]) found.push_back(static_cast<std::int64_t>(place));
    }
    return found;
}

template <class Items, class T>
bool is_among(const Items& items, const T& item) {
    return std::find(items.begin(), items.end(), item) != items.end();
}

/// Bits of rows, packed lowest first into words: bit c of row s is bit c % 64 of word c / 64.
class BitRows {
public:
    BitRows() = default;
    BitRows(std::size_t num_rows, std::size_t num_columns) { reset(num_rows, num_columns); }

    /// Become so many rows of zeros.
    void reset(std::size_t num_rows, std::size_t num_columns) {
        num_rows_ = num_rows;
        num_columns_ = num_columns;
        num_words_ = (num_columns + 63) / 64;
        words_.assign(num_rows * num_words_, 0);
    }

    std::size_t num_rows() const { return num_rows_; }
    std::size_t num_columns() const { return num_columns_; }
    std::size_t num_words() const { return num_words_; }
    std::uint64_t* row(std::size_t s) { return words_.data() + s * num_words_; }
    const std::uint64_t* row(std::size_t s) const { return words_.data() + s * num_words_; }
    bool get(std::size_t s, std::size_t c) const { return row(s)[c / 64] >> (c % 64) & 1; }
    void set(std::size_t s, std::size_t c) { row(s)[c / 64] |= std::uint64_t{1} << (c % 64); }
    void clear(std::size_t s, std::size_t c) { row(s)[c / 64] &= ~(std::uint64_t{1} << (c % 64)); }

private:
    std::size_t num_rows_ = 0, num_columns_ = 0, num_words_ = 0;
    std::vector<std::uint64_t> words_;
};

/// Hidden states of the rows of one forward, which a feature draft reads. Only the engines know
/// what they hold; they stay where the engine put them while they are held.
class Features {
public:
    virtual ~Features() = default;
    /// Return those of one row in memory of its own, so that the others need not be held.
    virtual std::shared_ptr<const Features> copied(std::size_t row) const = 0;
};

/// For each of S rows, where the feature of its node's parent lies.
struct ParentFeatures {
    std::vector<std::shared_ptr<const Features>> forwards;  // earlier ones, of target and draft
    Ints sources;                                           // (S,) index among them, or ZEROS
    Ints rows;                                              // (S,) row of these features
    static constexpr std::int64_t ZEROS = -1;  // no parent: the row is computed from zeros
};

/// Input that rows depend on in addition to tokens, such as an encoder's.
class Source {
public:
    virtual ~Source() = default;
    /// The tokens of a text; none of any other source.
    virtual std::span<const std::int64_t> token_ids() const { return {}; }
};
using SourcePointer = std::shared_ptr<const Source>;

/// A text as token ids. Rows share those of the same object alone, so make equal ones once.
struct TextSource final : Source {
    explicit TextSource(Ints token_ids) : ids(std::move(token_ids)) {}
    std::span<const std::int64_t> token_ids() const override { return ids; }

    Ints ids;
};

/// Rows that a call appends to an engine's cache.
struct Forward {
    Ints token_ids;    // (S,)
    Ints positions;    // (S,); siblings share a position
    BitRows mask;  // S x N: row s sees cache row c; the last S columns are the new rows, each
                   // of which sees itself
    Ints logit_rows;  // (R,): which of the S rows need logits, in any order; may be empty
    Ints feature_rows;  // (F,) increasing: whose features an engine that returns them returns
    ParentFeatures parent_features;  // of a feature draft, else empty
    std::vector<SourcePointer> sources;  // distinct ones; empty: none
    Ints source_of_row;  // (S,) index among them; empty: the first

    std::size_t num_new() const { return token_ids.size(); }
};

/// All logits of the R rows of a forward of a top-k head, until the engine's next forward.
class FullLogits {
public:
    virtual ~FullLogits() = default;
    /// Return the logits of a row, (vocab_size,) float32; ModelError once another forward was made.
    virtual std::span<const float> row(std::size_t row) = 0;
    /// Write the logits of these tokens of a row, (n,).
    virtual void read(std::size_t number, IntSpan tokens, std::span<double> logits) {
        const auto all = row(number);
        for (std::size_t i = 0; i < tokens.size(); ++i) logits[i] = all[at(tokens[i])];
    }
};

/// The logits of R rows: all of each (values), or the K largest of each (top_*), by decreasing
/// logit, ties by increasing id. The memory is the engine's, valid until its next forward.
struct Logits {
    std::size_t num_rows = 0;
    std::size_t vocab_size = 0;
    const float* values = nullptr;  // (R, vocab_size)

    std::size_t num_top = 0;  // K of a top-k head, else 0
    const std::int64_t* top_ids = nullptr;  // (R, K)
    const float* top_logits = nullptr;  // (R, K)
    const float* logsumexp = nullptr;  // (R,)
    FullLogits* full = nullptr;  // null: the others cannot be read
    std::size_t first_full_row = 0;  // row of `full` that row 0 of these is

    /// Those of some neighbouring rows.
    Logits part(std::size_t first, std::size_t count) const {
        Logits found = *this;
        found.num_rows = count;
        found.first_full_row += first;
        if (values) found.values += first * vocab_size;
        if (num_top) {
            found.top_ids += first * num_top;
            found.top_logits += first * num_top;
            found.logsumexp += first;
        }
        return found;
    }
};

struct ForwardResult {
    Logits logits;
    std::shared_ptr<const Features> features;  // of the F rows, or of all that were joined
    std::size_t first_feature = 0;  // the first of the F rows in them
    std::size_t source_tokens = 0;  // of a source that was read for this call, else 0
    double source_seconds = 0.0;  // that reading it took
    double source_own_seconds = 0.0;  // of these the engine's, without its target's
    std::optional<double> run_s;  // seconds in the engine's runtime, if measured
    bool sets_up = false;  // the call was bound or recorded, which later ones of its size are not
    // Of a forward of several sources: those that could not be read, whose rows mean nothing.
    std::vector<std::pair<const Source*, std::exception_ptr>> failed;

    /// The error of a source; null: it was read.
    std::exception_ptr error_of(const Source* source) const {
        for (const auto& [other, error] : failed) {
            if (other == source) return error;
        }
        return nullptr;
    }
};

}  // namespace dsbd
