// Part: one kind of state of an open engine, and a call as the parts see it (parts/part.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "forward.hpp"
#include "runtime/ort_graph.hpp"

namespace dsbd {

/// The most rows of one engine call; longer forwards run in chunks.
inline constexpr std::size_t MAX_FORWARD_ROWS = 256;

/// One engine call: the rows `start` to `stop - 1` of a forward, the cache's from `first_row` on.
struct Call {
    const Forward& forward;
    std::size_t start = 0, stop = 0, first_row = 0;

    std::size_t num_new() const { return stop - start; }
    bool is_last() const { return stop == forward.num_new(); }
};

/// One kind of state; a kind overrides the verbs that it needs.
class Part {
public:
    virtual ~Part() = default;
    /// The inputs and outputs of the graph that belong to it.
    virtual std::vector<const BoundTensor*> tensors() const = 0;
    /// A forward begins; refuse what the engine does not take, before anything is computed.
    virtual void begin(const Forward&) {}
    /// Say what a call reads and writes of its kind.
    virtual void bind(const Call& call, Binding& binding) = 0;
    /// Make room for so many cache rows, keep the first `num_used`; 0: a path begins anew.
    virtual void reserve(std::size_t, std::size_t /*num_used*/) {}
    /// Keep these cache rows, increasing; drop all others.
    virtual void keep(std::span<const std::int64_t>) {}
    /// All calls of the forward are made: add what it returns.
    virtual void finish(ForwardResult&) {}
};

}  // namespace dsbd
