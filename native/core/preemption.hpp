// Preemption: the cache rows of a request are dropped, and computed again when it goes on.
//
// All else that a request has (its forest, distributions, hypotheses and randomness) stays as it
// is, so no token of it changes, whatever its strategy.
#pragma once

#include <array>
#include <optional>

#include "cache_view.hpp"
#include "engine_call.hpp"
#include "kv_cache.hpp"

namespace dsbd {

/// What the rows of a preempted view held, and those computed again so far.
///
/// They are numbered anew, by position.
class PreemptedRows final : public UsedRows {
public:
    /// Drop the rows of an open view.
    PreemptedRows(Role role, CacheView& view);

    /// Compute the rows again, without logits, or share those that another request has.
    EngineCalls<void> compute();

    /// Return the rows of the prompt that another request has.
    PrefixCache reusable() const {
        return view_.row_cache.longest_prefix({view_.prefix.tokens, view_.prefix.source});
    }
    void begin(PrefixCache shared);
    /// Rows that are computed again so far, those of the lowest positions.
    std::size_t num_computed() const { return rows_.size(); }
    /// Return the call that computes so many of the next rows. reads: parents' features, if any.
    /// returns_features: of all these rows.
    EngineCall next_call(std::size_t size, ParentFeatures reads = {},
                         bool returns_features = false);
    /// Give the rows back to the view.
    void end();

    std::int64_t token(std::size_t row) const { return held_.tokens[row]; }
    std::int64_t position(std::size_t row) const { return held_.positions[row]; }
    /// The parent of a row, -1 if it is not seen.
    std::int64_t parent(std::size_t row) const;
    /// The rows that every slot sees, increasing.
    const std::vector<Ints>& rows_by_slot() const { return held_.seen; }

    std::size_t num_rows() const { return held_.tokens.size(); }
    Role role() const { return role_; }
    CacheView& view() { return view_; }
    void mark_used(Flags& is_used) const override;
    void renumber(IntSpan new_rows) override;

private:
    void write(std::size_t start, std::size_t size, std::size_t first_row, Forward& forward);
    void show_prefix();

    Role role_;
    CacheView& view_;
    RowsByPosition held_;
    Ints rows_;  // of the cache, of those computed again so far
};

using RoleViews = std::array<std::unique_ptr<CacheView>, 2>;  // by engine; null: there is no draft

/// The rows that a live request has given up, and their computation once it is resumed.
class Preemption {
public:
    /// Drop the rows of open views, which outlive it.
    explicit Preemption(const RoleViews& views);

    /// What the rows of an engine held, until they are computed again; then null.
    PreemptedRows* rows(Role role) const { return rows_[at(role)].get(); }
    /// The engine call that the computation waits for; null before it begins.
    EngineCall* wanted() const { return wanted_; }
    /// Begin to compute the rows; return whether none is left, as other requests have them.
    bool begin();
    /// Go on with the result of the wanted call; return whether all rows are there again.
    bool advance(const ForwardResult* result);
    /// Drop the rows that are there again.
    void interrupt();

private:
    EngineCalls<void> compute();

    const RoleViews& views_;
    std::array<std::unique_ptr<PreemptedRows>, 2> rows_;
    std::optional<EngineCallLoop<void>> computation_;
    EngineCall* wanted_ = nullptr;
};

}  // namespace dsbd
