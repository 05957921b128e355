// Key/value caches on a device, moved and grown by the prune graph (device_session.DeviceRows).
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "runtime/device_binding.hpp"
#include "runtime/row_buffers.hpp"

namespace dsbd {

/// The caches of an engine as values of a device. No row of them is copied to the host, except when
/// caches grow whose prune graph reads no other caches (CUDA).
class DeviceRows final : public RowMemory {
public:
    /// model: of the engine, which is cleared when the caches are replaced.
    DeviceRows(std::shared_ptr<Device> device, const ModelEntry& entry, Ort::Session prune,
               DeviceBinding& model, Recording& recording);
    ~DeviceRows() override;

    std::size_t capacity() const override { return capacity_; }
    std::vector<const BoundTensor*> tensors() const override;
    void bind(Binding& binding) override;
    /// Has room for the padding of forwards. With recorded calls it never shrinks.
    std::size_t capacity_for(std::size_t num_rows, std::size_t num_used) const override;
    void resize(std::size_t capacity, std::size_t num_used) override;
    void move_rows(std::span<const std::int64_t> rows, std::size_t first_row) override;

private:
    struct Cache {
        BoundTensor past, present, source;
    };
    using Values = std::vector<Ort::Value>;

    Values allocated(std::size_t capacity) const;
    void move(DeviceBinding& moves, std::size_t num_rows, std::span<const std::int64_t> rows,
              std::size_t first_row, const Values& source, const Values& target);
    void copy_by_host(const Values& target, std::size_t from, std::size_t to, std::size_t num_used);

    std::shared_ptr<Device> device_;
    DeviceBinding& model_;
    Recording& recording_;
    std::vector<Cache> caches_;
    Ort::Session prune_;
    bool reads_sources_;  // whether the prune graph copies rows of other caches
    BoundTensor write_indices_, src_rows_;
    Values values_;  // of each cache
    std::size_t capacity_ = 0;
    std::unique_ptr<DeviceBinding> moves_;
};

}  // namespace dsbd
