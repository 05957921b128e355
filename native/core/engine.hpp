// An engine as the algorithm sees it: append rows to a cache, get logits, keep some rows.
#pragma once

#include "forward.hpp"

namespace dsbd {

/// What a request reads of an engine before it begins.
struct EngineSpec {
    std::size_t vocab_size = 0;
    std::size_t context_length = 0;  // positions that the engine has; 0: no limit
    std::size_t num_top_logits = 0;  // K of a top-k head; 0: all logits of a row
    bool keeps_full_logits = false;  // whether all logits of a top-k head's forward can be read
    bool returns_features = false;   // a target that returns features of the rows asked for
    bool reads_features = false;     // a feature draft: each row needs its parent's feature
    bool reads_source = false;       // every forward needs a source
    bool joins_sources = false;      // the rows of a forward may have several
    bool folds_rows = false;         // rows that all paths share become a state (hybrids)
};

/// A language model with a cache of rows, one for each node that it has computed.
class Engine {
public:
    virtual ~Engine() = default;
    virtual const EngineSpec& spec() const = 0;
    /// Rows now in the cache.
    virtual std::size_t num_rows() const = 0;
    /// Rows that can be appended before the cache grows, which copies it.
    virtual std::size_t num_free_rows() const = 0;
    /// Make room for so many rows now; more or fewer are valid as well.
    virtual void expect(std::size_t num_rows) = 0;
    /// Append the rows of a forward; return the logits of some of them.
    virtual ForwardResult forward(const Forward& forward) = 0;
    /// Keep these cache rows, increasing, in this order; drop all others.
    virtual void keep(IntSpan rows) = 0;
    /// Read a source before a forward has it among others, which its errors would end.
    virtual void read_source(const SourcePointer&) {}
    /// Free what is kept of a source; a later forward may have it again.
    virtual void release_source(const Source&) {}
};

}  // namespace dsbd
