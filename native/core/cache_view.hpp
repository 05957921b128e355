// One request's rows of an engine's key/value cache, and which of them each of its nodes sees.
#pragma once

#include "engine_call.hpp"
#include "kv_cache.hpp"

namespace dsbd {

/// Rows of a view, numbered by position.
///
/// Every slot sees a path: one row at each position from 0 to its own. So a row sees, of any slot
/// that sees it, the rows before it.
struct RowsByPosition {
    Ints tokens, positions;         // (num_rows,)
    std::vector<Ints> seen;         // by slot: its rows, increasing
    Ints slots;                     // (num_rows,) one slot that sees the row

    /// Call `use` with every row that a row sees, itself aside.
    template <class Use>
    void for_seen(std::size_t row, const Use& use) const {
        for (auto above : seen[at(slots[row])]) {
            if (positions[at(above)] < positions[row]) use(at(above));
        }
    }
};

/// One request's rows of an engine's cache, and which of them each of its nodes sees.
///
/// A node that was computed has a *slot*; slot 0 sees the prompt. Bit c of a slot says whether it
/// sees row c of the cache. With the prompt in the rows 0 and 1, a node in row 2 and its child in
/// row 4 (row 3 is another's) the slots are
///
///     0b00011, 0b00111, 0b10111
///
/// No other row of a feature draft sees that of the prompt's first token, which has no parent and
/// so comes from no feature: such drafts are trained without it.
class CacheView final : public UsedRows {
public:
    /// Open a view that begins with the rows of a prefix, in the cache from now on.
    CacheView(SharedKVCache& row_cache, PrefixCache prefix);
    CacheView(const CacheView&) = delete;
    CacheView& operator=(const CacheView&) = delete;

    std::size_t num_rows() const;
    std::size_t num_slots() const { return num_slots_; }
    const EngineSpec& spec() const { return row_cache.engine().spec(); }

    /// Let slot 0 see the prompt, whose rows are all there.
    void begin();
    /// Add the next tokens of the prompt, and write the mask of their rows, which are the last.
    void append_prompt(std::size_t num_tokens, std::size_t first_row, BitRows& mask);
    /// Add nodes, parents first, whose slots and rows are the next ones, and write their mask,
    /// (S, first_row + S). parent_slots: (S,) of each node's parent, which may be a new one.
    void append(IntSpan parent_slots, std::size_t first_row, BitRows& mask);
    /// Let the slots see what the parents of their nodes do: no longer their own rows.
    void forget_own_rows(IntSpan slots);
    /// Keep slot 0 and these, in any order, which become 1, 2, ...; drop all others.
    void keep(IntSpan slots);
    /// Leave to the next request the rows that all slots see; free the others. agreed_tokens: from
    /// position 0 on, those that all paths share.
    void end(const Ints& agreed_tokens);

    /// Return the call that computes a draft's rows again, with fewer positions before them.
    ///
    /// The rows of the next `num_dropped` positions after `num_begin` begin tokens are dropped, and
    /// later rows have positions that are lower by as many. The slots see the new rows once the
    /// call is made; none: no row is left.
    std::optional<EngineCall> begin_again(std::size_t num_dropped, std::size_t num_begin);

    void mark_used(Flags& is_used) const override;
    void renumber(IntSpan new_rows) override;

    /// The rows that are used, those aside whose positions begin_again drops.
    RowsByPosition rows_by_position(std::size_t num_dropped = 0, std::size_t num_begin = 0) const;
    /// Let every slot see these rows of the cache, by slot, and no others. first_row: of row 0.
    void show(const std::vector<Ints>& rows_by_slot, std::size_t first_row = 0);

    SharedKVCache& row_cache;
    Meter meter;
    /// Of a feature draft: returns the feature of its own that a slot's row comes from, none if it
    /// is the target's.
    std::function<FeaturePlace(std::size_t)> own_features;
    std::size_t num_rows_at_end = 0;  // rows that it held when it ended

private:
    Ints seen_rows(std::size_t slot) const;
    void reserve(std::size_t num_slots, std::size_t num_rows);

    bool hides_first_;
    std::size_t num_slots_ = 1;
    BitRows seen_{64, 512};            // (slots there is room for, rows there is room for)
    std::vector<std::uint64_t> kept_;  // of `keep`; its memory is used again
};

}  // namespace dsbd
