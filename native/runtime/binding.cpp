// Memory of the host bound to a graph.
#include "runtime/binding.hpp"

namespace dsbd {

std::size_t element_bytes(ONNXTensorElementDataType type) {
    switch (type) {
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
            return 8;
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
            return 4;
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
            return 2;
        default:
            return 1;
    }
}

std::size_t num_bytes_of(ONNXTensorElementDataType type, const Shape& shape) {
    std::size_t num_bytes = element_bytes(type);
    for (const std::int64_t dim : shape) num_bytes *= static_cast<std::size_t>(dim);
    return num_bytes;
}

Ort::Value host_value(void* memory, ONNXTensorElementDataType type, const Shape& shape) {
    static const auto host = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    return Ort::Value::CreateTensor(host, memory, num_bytes_of(type, shape), shape.data(),
                                    shape.size(), type);
}

void BoundTensor::bind(Binding& binding, void* memory, std::initializer_list<std::size_t> sizes) {
    binding.bind(*this, memory, shape_of(sizes));
}

bool BoundTensor::has_changed(void* memory, const Shape& shape) {
    if (memory == memory_ && shape == shape_) return false;
    memory_ = memory;
    shape_ = shape;
    return true;
}

Ort::Value BoundTensor::value_on(void* memory, std::initializer_list<std::size_t> sizes) const {
    return host_value(memory, type_, shape_of(sizes));
}

Shape BoundTensor::shape_of(std::initializer_list<std::size_t> sizes) const {
    Shape shape = dims_;
    auto size = sizes.begin();
    for (std::int64_t& dim : shape) {
        if (dim < 0) dim = static_cast<std::int64_t>(*size++);
    }
    return shape;
}

void HostBinding::bind(BoundTensor& tensor, void* memory, Shape shape) {
    if (!tensor.has_changed(memory, shape)) return;
    bind_value(binding_, tensor, host_value(memory, tensor.type(), shape));
}

void HostBinding::bind(const BoundTensor& tensor, const Ort::Value& value) {
    bind_value(binding_, tensor, value);
}

void HostBinding::run(bool gives_up_memory) {
    Ort::RunOptions options{nullptr};
    if (gives_up_memory) {
        options = Ort::RunOptions();
        options.AddConfigEntry("memory.enable_memory_arena_shrinkage", "cpu:0");
    }
    session_.Run(options, binding_);
}

void bind_value(Ort::IoBinding& binding, const BoundTensor& tensor, const Ort::Value& value) {
    if (tensor.way() == BoundTensor::Way::input) {
        binding.BindInput(tensor.name().c_str(), value);
    } else {
        binding.BindOutput(tensor.name().c_str(), value);
    }
}

}  // namespace dsbd
