// Rounding of sizes, copies to and from the device, recording of calls.
#include "runtime/device_binding.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "runtime/ort_graph.hpp"
#include "runtime/part.hpp"

namespace dsbd {

namespace {

constexpr std::size_t FORWARD_ROWS[] = {1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256};
constexpr int MOST_TRIES = 3;
constexpr float UNWRITTEN = -1.5e38F;  // in an output before a call, and no model's number

bool is_output(const BoundTensor& tensor) { return tensor.way() == BoundTensor::Way::output; }

}  // namespace

std::size_t row_bucket(std::size_t num_rows) {
    return std::bit_ceil(std::max<std::size_t>(num_rows, 1));
}

std::size_t forward_bucket(std::size_t num_rows) {
    const auto* const found =
        std::lower_bound(std::begin(FORWARD_ROWS), std::end(FORWARD_ROWS), num_rows);
    return found == std::end(FORWARD_ROWS) ? row_bucket(num_rows) : *found;
}

DeviceBinding::DeviceBinding(std::shared_ptr<Device> device, Ort::Session& session, bool runs_again,
                             Recording* recording)
    : device_(std::move(device)),
      session_(session),
      runs_again_(runs_again),
      recording_(recording) {}

DeviceBinding::~DeviceBinding() { clear(); }

void DeviceBinding::begin(std::size_t num_new, std::size_t first_row, std::size_t capacity) {
    staged_.clear();
    values_.clear();
    num_new_ = num_new;
    first_row_ = first_row;
    capacity_ = capacity;
}

std::size_t DeviceBinding::rounded(std::size_t size) const { return row_bucket(size); }

void DeviceBinding::bind(BoundTensor& tensor, void* memory, Shape shape) {
    const std::size_t num_bytes = num_bytes_of(tensor.type(), shape);
    for (std::size_t i = 0; i < shape.size(); ++i) {
        const auto size = static_cast<std::size_t>(shape[i]);
        std::size_t whole = size;
        switch (tensor.dims()[i]) {
            case BoundTensor::ANY:
                whole = row_bucket(size);
                break;
            case BoundTensor::LOGIT_ROWS:
                whole = forward_bucket(size);
                break;
            case BoundTensor::NEW_ROWS:  // the caches may have no room for padding
                whole = std::min(forward_bucket(num_new_), MAX_FORWARD_ROWS);
                if (first_row_ + whole > capacity_) whole = num_new_;
                break;
        }
        shape[i] = static_cast<std::int64_t>(whole);
    }
    staged_.push_back({&tensor, static_cast<std::byte*>(memory), num_bytes, std::move(shape)});
}

void DeviceBinding::bind(const BoundTensor& tensor, const Ort::Value& value) {
    values_.emplace_back(&tensor, &value);
}

DeviceBinding::Staged& DeviceBinding::staged_of(const BoundTensor& tensor) {
    return *std::find_if(staged_.begin(), staged_.end(),
                         [&](const Staged& each) { return each.tensor == &tensor; });
}

void DeviceBinding::leave(const BoundTensor& tensor) { staged_of(tensor).is_left = true; }

void DeviceBinding::fetch(const BoundTensor& tensor) {
    const Staged& staged = staged_of(tensor);
    device_->download({{staged.array->on_device, staged.array->on_host}});
    std::memcpy(staged.memory, staged.array->numbers.data(), staged.num_bytes);
}

void DeviceBinding::run(bool) {
    const auto turn = Device::turn();
    BoundCall& call = *(last_ = &bound_call());
    has_set_up_ = call.num_runs == 0;
    upload_inputs(call);
    execute(call);
    if (runs_again_ && is_due(call)) {
        has_set_up_ = true;
        record();
    }
    download_outputs(call);
}

DeviceBinding::BoundCall& DeviceBinding::bound_call() {
    Shape sizes;
    for (const Staged& each : staged_) {
        sizes.insert(sizes.end(), each.shape.begin(), each.shape.end());
    }
    BoundCall& call = calls_[sizes];
    if (!call.binding) {
        Ort::IoBinding binding(session_);
        std::vector<Array*> arrays;
        for (const Staged& each : staged_) {
            Array& array = array_of(*each.tensor, each.shape);
            bind_value(binding, *each.tensor, array.on_device);
            arrays.push_back(&array);
            const bool can_show = is_output(*each.tensor) && !each.is_left &&
                                  each.tensor->type() == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
            if (can_show &&
                (!call.checked || array.numbers.size() < call.checked->numbers.size())) {
                call.checked = &array;
                call.mark_numbers.assign(array.numbers.size() / sizeof(float), UNWRITTEN);
                call.mark = host_value(call.mark_numbers.data(), each.tensor->type(), each.shape);
            }
        }
        for (const auto& [tensor, value] : values_) bind_value(binding, *tensor, *value);
        call.arrays = std::move(arrays);
        call.binding = std::move(binding);
    }
    for (std::size_t i = 0; i < staged_.size(); ++i) staged_[i].array = call.arrays[i];
    return call;
}

DeviceBinding::Array& DeviceBinding::array_of(const BoundTensor& tensor, const Shape& shape) {
    Array& array = arrays_[{tensor.name(), shape}];
    if (!array.on_device) {
        array.on_device = device_->allocate(tensor.type(), shape);
        array.numbers.resize(num_bytes_of(tensor.type(), shape));
        array.on_host = host_value(array.numbers.data(), tensor.type(), shape);
    }
    return array;
}

/// Copy what a call reads, and fill the rows that it is padded with. Padding rows of a mask see
/// themselves and the first row, so that none becomes NaN: a NaN in the cache reaches every row.
void DeviceBinding::fill(const Staged& staged) const {
    std::vector<std::byte>& numbers = staged.array->numbers;
    std::memcpy(numbers.data(), staged.memory, staged.num_bytes);
    std::byte* const rest = numbers.data() + staged.num_bytes;
    const std::size_t num_bytes = numbers.size() - staged.num_bytes;
    if (staged.tensor->type() == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64) {
        std::fill_n(reinterpret_cast<std::int64_t*>(rest), num_bytes / sizeof(std::int64_t),
                    staged.tensor->padding());
        return;
    }
    std::memset(rest, 0, num_bytes);
    if (staged.tensor->type() != ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL) return;
    for (std::size_t s = num_new_; s * capacity_ < numbers.size(); ++s) {
        numbers[s * capacity_] = numbers[s * capacity_ + first_row_ + s] = std::byte{1};
    }
}

void DeviceBinding::upload_inputs(const BoundCall& call) {
    std::vector<Device::Copy> copies;
    for (const Staged& each : staged_) {
        if (is_output(*each.tensor)) continue;
        fill(each);
        copies.push_back({each.array->on_host, each.array->on_device});
    }
    if (call.checked) copies.push_back({call.mark, call.checked->on_device});
    device_->upload(copies);
}

void DeviceBinding::execute(BoundCall& call) {
    Ort::RunOptions options;
    options.AddConfigEntry("gpu_graph_id", call.graph_id.c_str());
    ++call.num_runs;
    device_->run(session_, options, call.binding);
}

bool DeviceBinding::is_due(const BoundCall& call) const {
    return recording_ && recording_->is_on && recording_->num_recorded < Recording::MOST &&
           call.num_runs > 1 && call.num_tries < MOST_TRIES && call.graph_id == "-1";
}

/// ONNX Runtime records a call when it first runs with a number, and replays it later.
void DeviceBinding::record() {
    const auto turn = Device::turn();
    BoundCall& call = bound_call();
    ++call.num_tries;
    if (!runs_again_) upload_inputs(call);
    call.graph_id = std::to_string(++recording_->num_recorded);
    try {
        execute(call);
        ++device_->counts().num_recorded;
    } catch (const Ort::Exception&) {  // the calls go on without a recording
        call.graph_id = "-1";
    }
}

void DeviceBinding::download_outputs(const BoundCall& call) {
    std::vector<Device::Copy> copies;
    for (const Staged& each : staged_) {
        if (!is_output(*each.tensor) || each.is_left || !each.num_bytes) continue;
        copies.push_back({each.array->on_device, each.array->on_host});
    }
    device_->download(copies);
    for (const Staged& each : staged_) {
        if (!is_output(*each.tensor) || each.is_left || !each.num_bytes) continue;
        std::memcpy(each.memory, each.array->numbers.data(), each.num_bytes);
        if (each.array == call.checked) check_written(each);
    }
}

/// If the device has no memory for a call, or is lost, ONNX Runtime (0.4.0 of the WebGPU plug-in)
/// drops the work and says so only in its log.
void DeviceBinding::check_written(const Staged& output) const {
    const auto* const numbers = reinterpret_cast<const float*>(output.memory);
    if (std::any_of(numbers, numbers + output.num_bytes / sizeof(float),
                    [](float number) { return number != UNWRITTEN; })) {
        return;
    }
    throw CapacityError(device_->name() +
                        " dropped a call, ONNX Runtime's lines on stderr say why; without memory "
                        "for it: ask for fewer beams, a shorter prompt or fewer requests; if the "
                        "device is lost: open the bundle again");
}

void DeviceBinding::clear() {
    const auto turn = Device::turn();
    last_ = nullptr;
    calls_.clear();
    arrays_.clear();
}

}  // namespace dsbd
