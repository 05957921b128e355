// Attention rows: ids, positions, masks and the key/value caches (attention_rows.py, kv_cache.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/part.hpp"
#include "runtime/row_buffers.hpp"

namespace dsbd {

/// Caches in host memory, without rows.
std::unique_ptr<RowMemory> host_rows(const ModelEntry& entry);

/// The key/value cache that every node adds a row to, and the masks over it. Each cache is one
/// memory, bound as past and present, so that the engine writes its new rows in place.
class Rows : public Part {
public:
    Rows(const ModelEntry& entry, std::unique_ptr<RowMemory> memory);

    std::size_t capacity() const { return memory_->capacity(); }
    std::vector<const BoundTensor*> tensors() const override;
    void bind(const Call& call, Binding& binding) override;
    void reserve(std::size_t num_rows, std::size_t num_used) override;
    /// Rows before the first gap stay: of [0, 1, 4, 6] two move, to 2 and 3.
    void keep(std::span<const std::int64_t> rows) override;
    /// Whether the caches have shrunk to a quarter since the last question: the next call gives
    /// up the memory that it does not need itself.
    bool has_shrunk() { return std::exchange(has_shrunk_, false); }

private:
    void fill_mask(const Call& call, bool is_sliding, std::vector<std::uint8_t>& mask) const;

    std::size_t sliding_window_;
    std::unique_ptr<RowMemory> memory_;
    Ints positions_;  // (capacity,); as many as there are rows are valid
    Ints ids_of_call_, positions_of_call_, first_row_;
    BoundTensor input_ids_, position_ids_, write_indices_;
    std::optional<BoundTensor> mask_, sliding_mask_;
    std::optional<BoundTensor> row_positions_;  // of an engine with a bias by distance
    std::vector<std::uint8_t> mask_bytes_, sliding_mask_bytes_;  // (MAX_FORWARD_ROWS, capacity)
    bool has_shrunk_ = false;
};

}  // namespace dsbd
