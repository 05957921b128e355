// Growth of row buffers, and rows moved in them.
#include "runtime/row_buffers.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <utility>

namespace dsbd {

std::size_t bucket_capacity(std::size_t num_rows) {
    if (num_rows <= 256) return num_rows <= 128 ? 128 : 256;
    const std::size_t step = std::max<std::size_t>(64, std::bit_ceil(num_rows) / 16);
    return (num_rows + step - 1) / step * step;
}

std::size_t RowMemory::capacity_for(std::size_t num_rows, std::size_t) const {
    return bucket_capacity(num_rows);
}

BoundTensor cache_tensor(BoundTensor::Way way, const std::string& begin, const CacheEntry& entry,
                         const CachePart& part) {
    const auto type = entry.dtype == "fp32" ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
                                            : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    return BoundTensor(way, begin + "." + std::to_string(entry.layer) + "." + part.name, type,
                       {1, static_cast<std::int64_t>(part.num_heads), BoundTensor::EXACT,
                        static_cast<std::int64_t>(part.width)});
}

void RowBuffers::add(const CacheEntry& entry, const CachePart& part) {
    buffers_.push_back({cache_tensor(BoundTensor::Way::input, "past_key_values", entry, part),
                        cache_tensor(BoundTensor::Way::output, "present", entry, part),
                        part.num_heads, part.width * (entry.dtype == "fp32" ? 4 : 2), nullptr});
}

std::vector<const BoundTensor*> RowBuffers::tensors() const {
    std::vector<const BoundTensor*> found;
    for (const Buffer& buffer : buffers_) {
        found.push_back(&buffer.past);
        found.push_back(&buffer.present);
    }
    return found;
}

void RowBuffers::bind(Binding& binding) {
    for (Buffer& buffer : buffers_) {
        buffer.past.bind(binding, buffer.memory.get(), {capacity_});
        buffer.present.bind(binding, buffer.memory.get(), {capacity_});
    }
}

void RowBuffers::resize(std::size_t capacity, std::size_t num_used) {
    std::size_t num_done = 0;
    try {
        for (; num_done < buffers_.size(); ++num_done) {
            resize(buffers_[num_done], capacity_, capacity, num_used);
        }
    } catch (const std::bad_alloc&) {
        for (std::size_t i = 0; i < num_done; ++i) {
            resize(buffers_[i], capacity, capacity_, num_used);
        }
        throw CapacityError("no memory for a key/value cache of " + std::to_string(capacity) +
                            " rows (it has " + std::to_string(capacity_) +
                            " rows); shorten the "
                            "prompt, ask for fewer new tokens or fewer beams");
    }
    capacity_ = capacity;
}

void RowBuffers::resize(Buffer& buffer, std::size_t from, std::size_t to, std::size_t num_used) {
    std::unique_ptr<std::byte, Free> memory(
        static_cast<std::byte*>(std::calloc(buffer.num_heads * to, buffer.row_bytes)));
    if (!memory) throw std::bad_alloc();
    for (std::size_t head = 0; num_used > 0 && head < buffer.num_heads; ++head) {
        std::memcpy(memory.get() + head * to * buffer.row_bytes,
                    buffer.memory.get() + head * from * buffer.row_bytes,
                    num_used * buffer.row_bytes);
    }
    buffer.memory = std::move(memory);
}

void RowBuffers::move_rows(std::span<const std::int64_t> rows, std::size_t first_row) {
    for (Buffer& buffer : buffers_) {
        for (std::size_t head = 0; head < buffer.num_heads; ++head) {
            std::byte* const memory = buffer.memory.get() + head * capacity_ * buffer.row_bytes;
            for (std::size_t i = 0; i < rows.size(); ++i) {  // rows move down only
                std::memcpy(memory + (first_row + i) * buffer.row_bytes,
                            memory + static_cast<std::size_t>(rows[i]) * buffer.row_bytes,
                            buffer.row_bytes);
            }
        }
    }
}

std::vector<std::pair<std::string, Ort::Value>> RowBuffers::inputs(
    const std::string& part_prefix) const {
    std::vector<std::pair<std::string, Ort::Value>> found;
    for (const Buffer& buffer : buffers_) {
        const std::string& name = buffer.past.name();
        if (name.find("." + part_prefix) != std::string::npos) {
            found.emplace_back(name, buffer.past.value_on(buffer.memory.get(), {capacity_}));
        }
    }
    return found;
}

}  // namespace dsbd
