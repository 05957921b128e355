// Preemption: the cache rows of a request are dropped, and computed again when it goes on.
//
// All else that a request has (its forest, distributions, hypotheses and randomness) stays as it
// is, so no token of it changes, whatever its strategy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache_view.hpp"
#include "engine_call.hpp"
#include "kv_cache.hpp"

namespace dsbd {

/// What the rows of a preempted view held, and those computed again so far.
///
/// They are numbered anew, by position. Every slot sees a path: one row at each position from 0 to
/// its own. So a row sees, of any slot that sees it, the rows before it.
class PreemptedRows final : public UsedRows {
public:
    /// Drop the rows of an open view.
    explicit PreemptedRows(CacheView& view);

    /// Compute the rows again, without logits, or share those that another request has.
    EngineCalls<void> compute(Role role);

    std::size_t num_rows() const { return tokens_.size(); }
    CacheView& view() { return view_; }
    void mark_used(Flags& is_used) const override;
    void renumber(std::span<const std::int64_t> new_rows) override;

private:
    void begin(PrefixCache shared);
    EngineCall next_call(Role role);
    void write(std::size_t start, std::size_t size, std::size_t first_row, Forward& forward);
    void show_prefix();
    void end();

    CacheView& view_;
    Ints tokens_, positions_;      // (num_rows,) by position
    std::vector<Ints> seen_;       // by slot: its rows, increasing
    Ints slots_;                   // (num_rows,) one slot that sees the row
    Ints rows_;                    // of the cache, of those computed again so far
};

/// By engine: null if its rows are there.
using Preempted = std::array<std::unique_ptr<PreemptedRows>, 2>;

/// Compute the rows of a preempted request again; remove them from there once they are.
EngineCalls<void> recomputed(Preempted& preempted);

}  // namespace dsbd
