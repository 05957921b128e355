// The key/value caches of one engine in host memory: one buffer a layer and part.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"

namespace dsbd {

/// What one layer caches: keys [1, num_heads, capacity, key_width], and values.
struct CacheEntry {
    std::size_t layer;
    std::size_t num_heads;
    std::size_t key_width;
    std::size_t value_width;
    std::string dtype;
};

/// The keys or the values of one layer in memory.
struct CacheBuffer {
    std::string name;              // without the "past_key_values" or "present" before it
    std::size_t num_heads;
    std::size_t width;
    bool is_fp32;
    std::vector<std::uint8_t> bytes;

    std::size_t row_bytes() const { return width * (is_fp32 ? 4 : 2); }    // of one head

    std::vector<std::int64_t> shape(std::size_t capacity) const {
        return {1, static_cast<std::int64_t>(num_heads), static_cast<std::int64_t>(capacity),
                static_cast<std::int64_t>(width)};
    }
};

/// Return the capacity for `num_rows` rows: 128, 256, 320, 384, ..., 1024, 1152, ...
inline std::size_t bucket_capacity(std::size_t num_rows) {
    std::size_t power = 128;
    while (power < num_rows) {
        power *= 2;
    }
    if (power <= 256) {
        return power;
    }
    const std::size_t step = std::max<std::size_t>(64, power / 16);
    return (num_rows + step - 1) / step * step;
}

/// Buffers [1, num_heads, capacity, width] that an engine updates in place.
///
/// Rows that nobody wrote are zero: masked rows still enter a product with weight 0.
class KvCache {
public:
    explicit KvCache(const std::vector<CacheEntry>& caches) : capacity_(bucket_capacity(0)) {
        for (const CacheEntry& cache : caches) {
            if (cache.dtype != "fp32" && cache.dtype != "fp16") {
                throw Error("the caches are " + cache.dtype +
                            ", this host runs fp32 and fp16; export with --dtype fp32");
            }
            const std::string layer = "." + std::to_string(cache.layer);
            const bool is_fp32 = cache.dtype == "fp32";
            buffers_.push_back({layer + ".key", cache.num_heads, cache.key_width, is_fp32, {}});
            buffers_.push_back({layer + ".value", cache.num_heads, cache.value_width, is_fp32, {}});
        }
        resize(capacity_, 0);
    }

    std::size_t capacity() const { return capacity_; }

    /// Return the keys and the values of every layer; their bytes are replaced by `resize`.
    std::vector<CacheBuffer>& buffers() { return buffers_; }

    /// Give every buffer `capacity` rows, keep the first `num_used`; the rest is zero.
    void resize(std::size_t capacity, std::size_t num_used) {
        for (CacheBuffer& buffer : buffers_) {
            const std::size_t size = buffer.row_bytes();
            std::vector<std::uint8_t> larger(buffer.num_heads * capacity * size);
            for (std::size_t head = 0; num_used > 0 && head < buffer.num_heads; ++head) {
                std::copy_n(buffer.bytes.begin() + offset(head * capacity_ * size),
                            num_used * size, larger.begin() + offset(head * capacity * size));
            }
            buffer.bytes = std::move(larger);
        }
        capacity_ = capacity;
    }

    /// Copy the rows `rows` (increasing, none below first_row) to first_row and after it.
    void move_rows(const std::vector<std::size_t>& rows, std::size_t first_row) {
        for (CacheBuffer& buffer : buffers_) {
            const std::size_t size = buffer.row_bytes();
            for (std::size_t head = 0; head < buffer.num_heads; ++head) {
                const auto first = buffer.bytes.begin() + offset(head * capacity_ * size);
                for (std::size_t i = 0; i < rows.size(); ++i) {
                    std::copy_n(first + offset(rows[i] * size), size,
                                first + offset((first_row + i) * size));
                }
            }
        }
    }

private:
    static std::ptrdiff_t offset(std::size_t num_bytes) {
        return static_cast<std::ptrdiff_t>(num_bytes);
    }

    std::size_t capacity_;
    std::vector<CacheBuffer> buffers_;
};

}  // namespace dsbd
