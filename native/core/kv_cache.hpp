// Rows of one engine's key/value cache, of one request or of several: append, keep, trim.
//
// A request sees its rows through a CacheView; the engine sees one cache and one mask, in which no
// row of a view sees a row of another. Views whose tokens begin alike share the rows of their
// common prefix. A view gives rows up at no cost; the engine drops them together, before a call,
// when they are many or there is too little room.
#pragma once

#include <map>

#include "engine.hpp"
#include "engine_call.hpp"

namespace dsbd {

/// Prompt rows per call: bounds the mask at PREFILL_CHUNK x capacity.
inline constexpr std::size_t PREFILL_CHUNK = 256;

/// Everything that the rows of a path depend on, from position 0 on; equal ones share rows.
struct RowIdentity {
    Ints tokens;
    SourcePointer source;
};

/// Where a feature lies; null: the node has no parent, and its row is computed from zeros.
struct FeaturePlace {
    std::shared_ptr<const Features> features;
    std::int64_t row = 0;
};

/// The target's feature of the last of so many first tokens, for the draft's row of the next.
struct PromptFeature {
    std::size_t num_tokens = 0;
    FeaturePlace place;
};

/// The tokens whose rows begin a path in an engine's cache, for a request that begins alike.
struct PrefixCache {
    Ints tokens;
    Ints rows;  // (>= num_tokens,) increasing, of each token
    SourcePointer source;
    PromptFeature feature;  // for a feature draft
    // The first token of the path after `num_begin` begin tokens, see DraftContext.
    std::size_t start = 0, num_begin = 0;

    /// Return how many first tokens of a path have rows here.
    std::size_t num_common(const RowIdentity& identity) const;
    /// Return what rows that begin at `start` would be of a path.
    RowIdentity identity_of(const RowIdentity& path) const;
    /// Keep only the first tokens.
    void shorten(std::size_t num_tokens);
};

/// Rows that a request uses now: the seam of cache and requests.
class UsedRows {
public:
    virtual ~UsedRows() = default;
    /// Mark the rows of the cache that they are, (num_rows of the engine,).
    virtual void mark_used(Flags& is_used) const = 0;
    /// Follow the engine, which has kept some rows; `new_rows` is new row by old.
    virtual void renumber(IntSpan new_rows) = 0;

    PrefixCache prefix;
};

/// The key/value cache of one engine.
class SharedKVCache {
public:
    /// max_rows: most rows that it may hold, if there is a limit. Without `shares_prefixes` no view
    /// begins with rows of another.
    explicit SharedKVCache(Engine& engine, std::optional<std::size_t> max_rows = {},
                           bool shares_prefixes = true);

    Engine& engine() const { return engine_; }
    std::size_t num_rows() const { return engine_.num_rows(); }
    /// Rows that an open view sees.
    std::size_t num_used() const;

    /// Keep the rows of a new view: those of its prefix, usually of an earlier view.
    void open_view(UsedRows& view);
    /// Keep these rows until they are closed or removed.
    void add(UsedRows& rows);
    void remove(UsedRows& rows) {
        std::erase(views_, &rows);
        next_check_ = 0;
    }
    /// Give up a view's rows; until dropped its prefix may serve a request that begins alike.
    void close_view(UsedRows& view);
    /// Let no view begin with rows of closed ones.
    void forget() { closed_.clear(); }
    /// Drop all rows except the longest prefix of a path that is here. No view may be open.
    void keep_for(const RowIdentity& path);
    /// Return a copy of the longest prefix of a path of any view, with the path's source.
    PrefixCache longest_prefix(const RowIdentity& identity) const;

    /// Note that a request has a source, or is over; the engine frees one that no request has.
    void hold_source(const SourcePointer& source);
    void release_source(const SourcePointer& source);

    std::int64_t token_of(std::size_t row) const { return tokens_[row]; }
    std::int64_t position_of(std::size_t row) const { return positions_[row]; }

    /// Whether this many rows fit in addition to those in use.
    bool has_room(std::size_t num_new) const;
    /// Let the engine make room for so many more rows than are in use, within its limit.
    void expect(std::size_t num_new);
    /// Make calls that share a group in one forward of the engine; return the result of each.
    std::vector<ForwardResult> forward(std::span<EngineCall* const> calls);

private:
    void make_room(std::size_t num_new);
    Flags used() const;
    void keep(const Flags& is_used);
    void keep_rows(const Ints& rows);
    const Forward& written(std::span<EngineCall* const> calls);
    void join(const Forward& part);

    Engine& engine_;
    std::optional<std::size_t> max_rows_;
    bool shares_prefixes_;
    std::vector<UsedRows*> views_;
    std::vector<PrefixCache> closed_;  // oldest first
    std::map<SourcePointer, std::size_t> num_readers_;
    std::size_t next_check_ = 0;  // so many rows may be there before the unused are counted
    Ints tokens_, positions_;     // by row
    std::vector<Forward> parts_;  // one for each call; their memory is used again
    Forward joined_;
};

}  // namespace dsbd
