// Growth of caches on a device, and rows moved in them.
#include "runtime/device_rows.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "runtime/part.hpp"

namespace dsbd {

namespace {

constexpr auto INT64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr auto INPUT = BoundTensor::Way::input;

bool reads_sources(const Ort::Session& prune) {
    Ort::AllocatorWithDefaultOptions allocator;
    for (std::size_t i = 0; i < prune.GetInputCount(); ++i) {
        const auto name = prune.GetInputNameAllocated(i, allocator);
        if (std::string_view(name.get()).starts_with("source.")) return true;
    }
    return false;
}

Ints numbered(std::size_t count) {
    Ints numbers(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    return numbers;
}

}  // namespace

DeviceRows::DeviceRows(std::shared_ptr<Device> device, const ModelEntry& entry, Ort::Session prune,
                       DeviceBinding& model, Recording& recording)
    : device_(std::move(device)),
      model_(model),
      recording_(recording),
      prune_(std::move(prune)),
      reads_sources_(reads_sources(prune_)),
      write_indices_(INPUT, "write_indices", INT64, {1}),
      src_rows_(INPUT, "src_rows", INT64, {BoundTensor::EXACT}) {
    for (const CacheEntry& cache : entry.caches) {
        for (const CachePart& part : cache.parts) {
            caches_.push_back({cache_tensor(INPUT, "past_key_values", cache, part),
                               cache_tensor(BoundTensor::Way::output, "present", cache, part),
                               cache_tensor(INPUT, "source", cache, part)});
        }
    }
}

DeviceRows::~DeviceRows() {
    const auto turn = Device::turn();
    moves_.reset();
    values_.clear();
    prune_ = Ort::Session(nullptr);
}

std::vector<const BoundTensor*> DeviceRows::tensors() const {
    std::vector<const BoundTensor*> found;
    for (const Cache& cache : caches_) found.insert(found.end(), {&cache.past, &cache.present});
    return found;
}

void DeviceRows::bind(Binding& binding) {
    for (std::size_t i = 0; i < caches_.size(); ++i) {
        binding.bind(caches_[i].past, values_[i]);
        binding.bind(caches_[i].present, values_[i]);
    }
}

std::size_t DeviceRows::capacity_for(std::size_t num_rows, std::size_t num_used) const {
    const std::size_t num_new = num_rows - num_used, rest = num_new % MAX_FORWARD_ROWS;
    const std::size_t padded = num_rows - rest + (rest ? forward_bucket(rest) : 0);
    const std::size_t capacity = bucket_capacity(padded);
    return recording_.is_on ? std::max(capacity, capacity_) : capacity;
}

void DeviceRows::resize(std::size_t capacity, std::size_t num_used) {
    const auto turn = Device::turn();
    if (capacity == capacity_) {  // the addresses that recorded calls have stay
        for (Ort::Value& value : values_) device_->fill_zero(value);
        return;
    }
    Values grown = allocated(capacity);
    if (num_used && reads_sources_) {
        DeviceBinding growth(device_, prune_, false, nullptr);
        const std::size_t most = std::min(capacity, capacity_);
        move(growth, std::min(row_bucket(num_used), most), numbered(num_used), 0, values_, grown);
    } else if (num_used) {
        copy_by_host(grown, capacity_, capacity, num_used);
    }
    model_.clear();
    moves_ = std::make_unique<DeviceBinding>(device_, prune_, false, &recording_);
    values_ = std::move(grown);
    capacity_ = capacity;
}

DeviceRows::Values DeviceRows::allocated(std::size_t capacity) const {
    Values values;
    try {
        for (const Cache& cache : caches_) {
            values.push_back(device_->allocate(cache.past.type(), cache.past.shape_of({capacity})));
        }
    } catch (const CapacityError& error) {
        throw CapacityError(device_->name() + " has no memory for a key/value cache of " +
                            std::to_string(capacity) + " rows (it has " +
                            std::to_string(capacity_) +
                            " rows now, which stay until the new ones are there): " + error.what());
    }
    return values;
}

/// Run the prune graph for `num_rows` rows: row first_row + k becomes the old row rows[k]; padding
/// copies the last one again.
void DeviceRows::move(DeviceBinding& moves, std::size_t num_rows,
                      std::span<const std::int64_t> rows, std::size_t first_row,
                      const Values& source, const Values& target) {
    Ints src(rows.begin(), rows.end()), first{static_cast<std::int64_t>(first_row)};
    src.resize(num_rows, src.back());
    moves.begin(0, 0, 0);
    write_indices_.bind(moves, first.data(), {});
    src_rows_.bind(moves, src.data(), {num_rows});
    for (std::size_t i = 0; i < caches_.size(); ++i) {
        moves.bind(caches_[i].past, target[i]);
        moves.bind(caches_[i].present, target[i]);
        if (reads_sources_) moves.bind(caches_[i].source, source[i]);
    }
    moves.run(false);
    if (!moves.is_due()) return;
    std::iota(src.begin(), src.end(), 0);  // a move that changes nothing
    first[0] = 0;
    moves.record();
}

void DeviceRows::move_rows(std::span<const std::int64_t> rows, std::size_t first_row) {
    if (rows.empty()) return;
    const std::size_t padded = std::min(row_bucket(rows.size()), capacity_);
    move(*moves_, first_row + padded <= capacity_ ? padded : rows.size(), rows, first_row, values_,
         values_);
}

void DeviceRows::copy_by_host(const Values& target, std::size_t from, std::size_t to,
                              std::size_t num_used) {
    for (std::size_t i = 0; i < caches_.size(); ++i) {
        const auto type = caches_[i].past.type();
        const Shape old_shape = caches_[i].past.shape_of({from}),
                    new_shape = caches_[i].past.shape_of({to});
        const std::size_t row_bytes =
            element_bytes(type) * static_cast<std::size_t>(new_shape.back());
        std::vector<std::byte> old_rows(num_bytes_of(type, old_shape)),
            new_rows(num_bytes_of(type, new_shape));
        Ort::Value old_value = host_value(old_rows.data(), type, old_shape),
                   new_value = host_value(new_rows.data(), type, new_shape);
        device_->download({{values_[i], old_value}});
        for (std::size_t head = 0; head < static_cast<std::size_t>(new_shape[1]); ++head) {
            std::memcpy(new_rows.data() + head * to * row_bytes,
                        old_rows.data() + head * from * row_bytes, num_used * row_bytes);
        }
        device_->upload({{new_value, const_cast<Ort::Value&>(target[i])}});
    }
}

}  // namespace dsbd
