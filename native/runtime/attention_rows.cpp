// The masks and positions of a call, and its caches.
#include "runtime/attention_rows.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

namespace dsbd {

namespace {

constexpr auto INT64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr auto BOOL = ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
constexpr auto NEW_ROWS = BoundTensor::NEW_ROWS;
constexpr auto EXACT = BoundTensor::EXACT;
constexpr auto INPUT = BoundTensor::Way::input;

/// Eight bytes of 0 and 1 from the lowest eight bits, the lowest first in memory.
std::uint64_t spread(std::uint64_t bits) {
    const std::uint64_t placed =
        ((bits & 0xff) * 0x0101010101010101u) & 0x8040201008040201u;  // bit i in byte i
    return ((placed + 0x7f7f7f7f7f7f7f7fu) >> 7) & 0x0101010101010101u;
}
static_assert(std::endian::native == std::endian::little);

std::optional<BoundTensor> mask_tensor(bool is_there, const char* name) {
    if (!is_there) return {};
    return BoundTensor(INPUT, name, BOOL, {1, 1, NEW_ROWS, EXACT});
}

}  // namespace

std::unique_ptr<RowMemory> host_rows(const ModelEntry& entry) {
    auto buffers = std::make_unique<RowBuffers>();
    for (const CacheEntry& cache : entry.caches) {
        if (cache.is_recent()) continue;
        for (const CachePart& part : cache.parts) buffers->add(cache, part);
    }
    return buffers;
}

Rows::Rows(const ModelEntry& entry, std::unique_ptr<RowMemory> memory)
    : sliding_window_(entry.sliding_window),
      memory_(std::move(memory)),
      positions_(bucket_capacity(0)),
      ids_of_call_(MAX_FORWARD_ROWS),
      positions_of_call_(MAX_FORWARD_ROWS),
      first_row_(1),
      input_ids_(INPUT, "input_ids", INT64, {1, NEW_ROWS}),
      position_ids_(INPUT, "position_ids", INT64, {1, NEW_ROWS}),
      write_indices_(INPUT, "write_indices", INT64, {1}),
      mask_(mask_tensor(entry.has_mask, ATTENTION_MASK)),
      sliding_mask_(mask_tensor(entry.has_sliding_mask, ATTENTION_MASK_SLIDING)) {
    if (entry.encoder && entry.encoder->reads_positions) {
        row_positions_.emplace(INPUT, "row_positions", INT64, Shape{EXACT});
    }
    memory_->resize(bucket_capacity(0), 0);
}

std::vector<const BoundTensor*> Rows::tensors() const {
    std::vector<const BoundTensor*> found = memory_->tensors();
    found.insert(found.end(), {&input_ids_, &position_ids_, &write_indices_});
    if (mask_) found.push_back(&*mask_);
    if (sliding_mask_) found.push_back(&*sliding_mask_);
    if (row_positions_) found.push_back(&*row_positions_);
    return found;
}

void Rows::bind(const Call& call, Binding& binding) {
    const Forward& forward = call.forward;
    const std::size_t num_new = call.num_new();
    const auto from = static_cast<std::ptrdiff_t>(call.start);
    const auto count = static_cast<std::ptrdiff_t>(num_new);
    std::copy_n(forward.token_ids.begin() + from, count, ids_of_call_.begin());
    std::copy_n(forward.positions.begin() + from, count, positions_of_call_.begin());
    std::copy_n(forward.positions.begin() + from, count,
                positions_.begin() + static_cast<std::ptrdiff_t>(call.first_row));
    first_row_[0] = static_cast<std::int64_t>(call.first_row);
    input_ids_.bind(binding, ids_of_call_.data(), {num_new});
    position_ids_.bind(binding, positions_of_call_.data(), {num_new});
    write_indices_.bind(binding, first_row_.data(), {});
    if (mask_) {
        fill_mask(call, false, mask_bytes_);
        mask_->bind(binding, mask_bytes_.data(), {num_new, capacity()});
    }
    if (sliding_mask_) {
        fill_mask(call, true, sliding_mask_bytes_);
        sliding_mask_->bind(binding, sliding_mask_bytes_.data(), {num_new, capacity()});
    }
    if (row_positions_) row_positions_->bind(binding, positions_.data(), {capacity()});
    memory_->bind(binding);
}

/// Write the rows of the call, (num_new, capacity). With a window of 2, position 5 and positions
/// [3, 4, 4, 5] of the cache, the bits 1101 become 1, 1, 0, 1, 0, ... and, sliding, 0, 1, 0, 1, 0.
void Rows::fill_mask(const Call& call, bool is_sliding, std::vector<std::uint8_t>& mask) const {
    const std::size_t capacity = this->capacity();
    mask.resize(MAX_FORWARD_ROWS * capacity);
    const BitRows& bits = call.forward.mask;
    for (std::size_t s = 0; s < call.num_new(); ++s) {
        std::uint8_t* const row = mask.data() + s * capacity;
        const std::uint64_t* const words = bits.row(call.start + s);
        for (std::size_t w = 0; w < bits.num_words(); ++w) {  // the capacity is a multiple of 64
            for (std::size_t byte = 0; byte < 8; ++byte) {
                const std::uint64_t eight = spread(words[w] >> (8 * byte));
                std::memcpy(row + w * 64 + byte * 8, &eight, 8);
            }
        }
        std::memset(row + bits.num_words() * 64, 0, capacity - bits.num_words() * 64);
        if (!is_sliding) continue;
        const std::int64_t first =
            call.forward.positions[call.start + s] - static_cast<std::int64_t>(sliding_window_);
        for (std::size_t c = 0; c < call.first_row + call.num_new(); ++c) {
            row[c] &= positions_[c] > first;
        }
    }
}

void Rows::reserve(std::size_t num_rows, std::size_t num_used) {
    const std::size_t capacity = memory_->capacity_for(num_rows, num_used);
    if (num_used > 0 && capacity <= this->capacity()) return;
    has_shrunk_ |= capacity <= this->capacity() / 4;
    memory_->resize(capacity, num_used);
    positions_.resize(capacity);
}

void Rows::keep(std::span<const std::int64_t> rows) {
    std::size_t first = 0;
    while (first < rows.size() && rows[first] == static_cast<std::int64_t>(first)) ++first;
    for (std::size_t to = first; to < rows.size(); ++to) {  // rows move down only
        positions_[to] = positions_[static_cast<std::size_t>(rows[to])];
    }
    memory_->move_rows(rows.subspan(first), first);
}

}  // namespace dsbd
