// One request's rows of an engine's key/value cache, and which of them each of its nodes sees.
#pragma once

#include "engine_call.hpp"
#include "kv_cache.hpp"

namespace dsbd {

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

    void mark_used(Flags& is_used) const override;
    void renumber(IntSpan new_rows) override;

    /// The rows that a slot sees, increasing; those of the prefix as well for slot 0.
    Ints seen_rows(std::size_t slot) const;
    /// Let every slot see these rows of the cache, by slot, and no others.
    void show(const std::vector<Ints>& rows_by_slot);

    SharedKVCache& row_cache;
    Meter meter;
    /// Of a feature draft: returns the feature of its own that a slot's row comes from, none if it
    /// is the target's.
    std::function<FeaturePlace(std::size_t)> own_features;
    std::size_t num_rows_at_end = 0;  // rows that it held when it ended

private:
    void reserve(std::size_t num_slots, std::size_t num_rows);

    bool hides_first_;
    std::size_t num_slots_ = 1;
    BitRows seen_{64, 512};            // (slots there is room for, rows there is room for)
    std::vector<std::uint64_t> kept_;  // of `keep`; its memory is used again
};

}  // namespace dsbd
