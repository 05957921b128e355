// Buffers of cache rows: one for each layer and part, updated by an engine in place (kv_cache.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/ort_graph.hpp"

namespace dsbd {

/// Buffers [1, num_heads, capacity, width], each bound as past and present. Rows that nobody wrote
/// are zero: masked rows still enter a product with weight 0, so they must be finite.
class RowBuffers {
public:
    /// Add the buffer "past_key_values.{layer}.{part}", without rows until `resize`.
    void add(const CacheEntry& entry, const CachePart& part);
    bool is_empty() const { return buffers_.empty(); }
    std::size_t capacity() const { return capacity_; }
    std::vector<const BoundTensor*> tensors() const;
    void bind(Ort::IoBinding& binding);
    /// Give every buffer so many rows and keep the first `num_used`; the rest is zero.
    /// CapacityError: there is no memory; the buffers are as before.
    void resize(std::size_t capacity, std::size_t num_used);
    /// Copy these rows, increasing and none below `first_row`, to `first_row` and after it.
    void move_rows(std::span<const std::int64_t> rows, std::size_t first_row);
    /// The buffers of one kind of part as inputs of another graph, by name.
    std::vector<std::pair<std::string, Ort::Value>> inputs(const std::string& part_prefix) const;

private:
    struct Free {
        void operator()(std::byte* memory) const { std::free(memory); }
    };
    struct Buffer {
        BoundTensor past, present;
        std::size_t num_heads, row_bytes;  // of one head
        std::unique_ptr<std::byte, Free> memory;
    };
    static void resize(Buffer& buffer, std::size_t from, std::size_t to, std::size_t num_used);

    std::size_t capacity_ = 0;
    std::vector<Buffer> buffers_;
};

}  // namespace dsbd
