// Recent rows of an engine with convolutions or recurrences, and the checkpoints before them.
//
// Such layers keep *recent* rows alone (docs/algorithm.md 3.11). A path is folded from its
// beginning on, in pieces: the rows up to its *checkpoint* are one state of each recurrent layer,
// those after it are recent rows. Checkpoint 0 is where all paths begin. With folded rows in
// brackets,
//
//     0 [a b c] 1 -- d -- e -- f         d to f continue from checkpoint 1, whose last row is c
//                         \-- g
//
// A new row can continue from any recent row, and from the last row of a checkpoint. Where a path
// branches off at another folded row, the rows from the last checkpoint above it on are computed
// again. So which rows are folded, and when, is a matter of cost alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "runtime/part.hpp"
#include "runtime/row_buffers.hpp"

namespace dsbd {

/// The S rows of one engine call, as yet without a place, and its inputs (recent_rows).
struct NewRows {
    Ints parents;      // (S,) row of the cache, NO_ROW where the path begins
    Ints depths;       // (S,) rows of the path to each, itself included
    Ints checkpoints;  // (S,) the one that each continues from
    Ints again;  // (S,) rows of the cache that are computed again; empty: they are appended
    std::size_t first_row = 0;  // recent row of the first
    Ints ancestors;  // (S, A) recent rows
    std::size_t first_checkpoint = 0;  // the states of the call begin with that of this one
    std::size_t num_checkpoints = 0;  // B
    Ints checkpoint_rows;  // (B, L)
    Ints row_places;  // (S,)
};

/// Recent rows of one engine, and the states of checkpoints, (B, H, Dk, Dv); the first is 0.
class RecentMemory {
public:
    RecentMemory(const Ort::Env& env, const std::filesystem::path& folder, const ModelEntry& entry,
                 const EngineSettings& settings);

    std::vector<const BoundTensor*> tensors() const;
    void bind(const NewRows& call, Binding& binding);
    std::size_t capacity() const { return rows_.capacity(); }
    std::size_t num_bytes() const;
    bool has_states() const { return !states_.empty(); }

    /// Give the recent rows room; keep the first ones. With `num_used` 0 start again.
    void reserve(std::size_t num_rows, std::size_t num_used);
    /// Free the room of recent rows that a call after so many of them does not need.
    void shrink(std::size_t num_used);
    void move_rows(std::span<const std::int64_t> rows, std::size_t first_row) {
        rows_.move_rows(rows, first_row);
    }
    /// Have exactly so many checkpoints; keep those that there are. The first one's state is zero.
    void reserve_checkpoints(std::size_t number);
    /// Let the state of `target` be that of `source` after these recent rows.
    void fold(const Ints& rows, std::size_t source, std::size_t target);

private:
    /// A state of each checkpoint, one after the other.
    struct State {
        BoundTensor tensor;
        std::size_t size;  // numbers of one
        std::vector<float> values;
    };
    void add_state(const std::string& name, std::vector<std::size_t> shape);

    std::filesystem::path fold_file_;
    std::optional<Ort::Session> fold_;  // of an engine with recurrences
    std::size_t row_bytes_;
    RowBuffers rows_;
    std::vector<State> states_;
    std::size_t num_checkpoints_ = 1;
};

/// Of every row of the cache, whether it is recent, and what continues from it.
class RecentPaths {
public:
    static constexpr std::int64_t NO_ROW = -1;

    RecentPaths(RecentMemory& memory, std::size_t num_ancestors)
        : memory_(memory), num_ancestors_(num_ancestors) {}

    /// Forget rows from this one on: those of a forward that has failed.
    void truncate(std::size_t num_rows);
    /// Keep these rows of the cache, increasing; drop all others.
    void keep(std::span<const std::int64_t> rows);
    /// Fold rows if it pays, before a call; the rows that it continues from stay.
    void prepare(const Call& call);
    /// Compute the rows again that a call needs and that are folded, in calls of at most so many:
    /// `compute` makes one whose rows are in `next`. Their own rows of the cache follow those in
    /// use, and may be overwritten.
    void compute_again(const Call& call, std::size_t most_rows,
                       const std::function<void(const Call&)>& compute);
    /// Let `next` be the rows of a call; Error: one does not see the whole path to its parent.
    void set_next(const Call& call, Ints again = {});
    /// The rows of `next` are computed.
    void append_next(const Call& call);
    /// Write the recent rows that row s of the call of `next` sees, (capacity,) of zeros so far.
    void fill_mask(const Call& call, std::size_t s, std::uint8_t* mask) const;

    NewRows next;

private:
    struct Row {
        std::int64_t token, position, parent;
        std::int64_t depth;  // rows of its path, itself included
        std::int64_t place;  // among the recent rows, or NO_ROW
        std::int64_t checkpoint;  // that a child would continue from, or FOLDED: none can
    };
    struct Chain {
        Ints rows, below;  // those to fold, and those that continue from them
    };
    using Rows = std::set<std::int64_t>;

    const Row& row(std::int64_t number) const { return table_[static_cast<std::size_t>(number)]; }
    Row& row(std::int64_t number) { return table_[static_cast<std::size_t>(number)]; }
    std::int64_t num_rows() const { return static_cast<std::int64_t>(table_.size()); }
    std::int64_t end_of(std::int64_t checkpoint) const;
    Rows continued(const Call& call) const;
    std::int64_t last_seen(const Call& call, std::size_t s) const;
    Ints continued_checkpoints(const Call& call, bool is_again) const;
    void set_ancestors(const Call& call);
    void set_places_of_rows();
    Forward forward_again(const Ints& path, std::size_t start, std::size_t stop) const;
    Ints path(std::int64_t last) const;

    void fold_chains(const Rows& continued);
    std::vector<Chain> foldable_chains(const Rows& stops) const;
    void fold(const Chain& chain, const Rows& stops);
    void give_up(const Rows& stops);
    std::size_t unused_checkpoint();
    void hold(std::int64_t number);
    Ints unfolded() const;
    void drop_unneeded();
    void look_later();

    RecentMemory& memory_;
    std::size_t num_ancestors_;
    std::vector<Row> table_;
    Ints ends_{0};  // depth of the last row of every checkpoint
    Ints held_;  // rows of the cache from which paths may continue; oldest first
    std::size_t num_recent_ = 0;  // places in use, those of dropped rows included
    std::size_t next_look_ = 0;
};

}  // namespace dsbd
