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

/// Shape of the key/value cache: num_layers pairs of [1, num_heads, capacity, head_dim].
struct KvGeometry {
    std::size_t num_layers;
    std::size_t num_heads;
    std::size_t head_dim;
    std::string dtype;
};

/// Return the capacity for `num_rows` rows: 128, 256, 384, 512, 640, ..., 1024, 1280, ...
inline std::size_t bucket_capacity(std::size_t num_rows) {
    std::size_t power = 128;
    while (power < num_rows) {
        power *= 2;
    }
    if (power <= 256) {
        return power;
    }
    const std::size_t step = std::max<std::size_t>(128, power / 8);
    return (num_rows + step - 1) / step * step;
}

/// Buffers [1, num_heads, capacity, head_dim] that an engine updates in place.
///
/// Rows that nobody wrote are zero: masked rows still enter a product with weight 0.
class KvCache {
public:
    explicit KvCache(const KvGeometry& geometry)
        : geometry_(geometry), capacity_(bucket_capacity(0)), buffers_(2 * geometry.num_layers) {
        if (geometry.dtype != "fp32" && geometry.dtype != "fp16") {
            throw Error("the caches are " + geometry.dtype +
                        ", this host runs fp32 and fp16; export with --dtype fp32");
        }
        row_bytes_ = geometry.head_dim * (geometry.dtype == "fp32" ? 4 : 2);
        resize(capacity_, 0);
    }

    std::size_t capacity() const { return capacity_; }

    /// Return the shape of every buffer.
    std::vector<std::int64_t> shape() const {
        return {1, static_cast<std::int64_t>(geometry_.num_heads),
                static_cast<std::int64_t>(capacity_),
                static_cast<std::int64_t>(geometry_.head_dim)};
    }

    /// Return the key of every layer at 2 * layer, the value behind it; replaced by `resize`.
    std::vector<std::vector<std::uint8_t>>& buffers() { return buffers_; }

    /// Give every buffer `capacity` rows, keep the first `num_used`; the rest is zero.
    void resize(std::size_t capacity, std::size_t num_used) {
        for (std::vector<std::uint8_t>& buffer : buffers_) {
            std::vector<std::uint8_t> larger(geometry_.num_heads * capacity * row_bytes_);
            for (std::size_t head = 0; num_used > 0 && head < geometry_.num_heads; ++head) {
                std::copy_n(buffer.begin() + offset(head * capacity_), num_used * row_bytes_,
                            larger.begin() + offset(head * capacity));
            }
            buffer = std::move(larger);
        }
        capacity_ = capacity;
    }

    /// Copy the rows `rows` (increasing, none below first_row) to first_row and behind.
    void move_rows(const std::vector<std::size_t>& rows, std::size_t first_row) {
        for (std::vector<std::uint8_t>& buffer : buffers_) {
            for (std::size_t head = 0; head < geometry_.num_heads; ++head) {
                const auto first = buffer.begin() + offset(head * capacity_);
                for (std::size_t i = 0; i < rows.size(); ++i) {
                    std::copy_n(first + offset(rows[i]), row_bytes_,
                                first + offset(first_row + i));
                }
            }
        }
    }

private:
    std::ptrdiff_t offset(std::size_t row) const {
        return static_cast<std::ptrdiff_t>(row * row_bytes_);
    }

    KvGeometry geometry_;
    std::size_t capacity_;
    std::size_t row_bytes_ = 0;    // of one head
    std::vector<std::vector<std::uint8_t>> buffers_;
};

}  // namespace dsbd
