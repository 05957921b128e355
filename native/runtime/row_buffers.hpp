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

/// The key/value caches of an engine, where it runs (attention_rows.RowMemory).
class RowMemory {
public:
    virtual ~RowMemory() = default;
    virtual std::size_t capacity() const = 0;
    virtual std::vector<const BoundTensor*> tensors() const = 0;
    virtual void bind(Binding& binding) = 0;
    /// The capacity for so many rows, of which `num_used` are computed.
    virtual std::size_t capacity_for(std::size_t num_rows, std::size_t num_used) const;
    /// Give every cache room for `capacity` rows; keep its first `num_used` rows, set the others to
    /// zero. Called with the present capacity only if no row is used.
    /// CapacityError: there is no memory; the caches are as before.
    virtual void resize(std::size_t capacity, std::size_t num_used) = 0;
    /// Copy these rows, increasing and none below `first_row`, to `first_row` and after it.
    virtual void move_rows(std::span<const std::int64_t> rows, std::size_t first_row) = 0;
};

/// The capacity for so many rows: 128, 256, 320, 384, ..., 1024, 1152, ...
std::size_t bucket_capacity(std::size_t num_rows);

/// The inputs "past_key_values.{layer}.{part}" of an engine's caches, or, for each, the output.
BoundTensor cache_tensor(BoundTensor::Way way, const std::string& begin, const CacheEntry& entry,
                         const CachePart& part);

/// Buffers [1, num_heads, capacity, width], each bound as past and present. Rows that nobody wrote
/// are zero: masked rows still enter a product with weight 0, so they must be finite.
class RowBuffers final : public RowMemory {
public:
    /// Add the buffer "past_key_values.{layer}.{part}", without rows until `resize`.
    void add(const CacheEntry& entry, const CachePart& part);
    bool is_empty() const { return buffers_.empty(); }
    std::size_t capacity() const override { return capacity_; }
    std::vector<const BoundTensor*> tensors() const override;
    void bind(Binding& binding) override;
    void resize(std::size_t capacity, std::size_t num_used) override;
    void move_rows(std::span<const std::int64_t> rows, std::size_t first_row) override;
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
