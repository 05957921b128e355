// Tensors of a graph, and the memory that its calls read and write (host_binder.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include <onnxruntime_cxx_api.h>

namespace dsbd {

class Binding;
using Shape = std::vector<std::int64_t>;

/// Bytes of one number of a type.
std::size_t element_bytes(ONNXTensorElementDataType type);
/// Bytes of a tensor.
std::size_t num_bytes_of(ONNXTensorElementDataType type, const Shape& shape);
/// A value on memory of the host.
Ort::Value host_value(void* memory, ONNXTensorElementDataType type, const Shape& shape);

/// An input or an output of a graph, and the memory of the host that is bound to it now.
class BoundTensor {
public:
    enum class Way { input, output };
    // Dimensions that calls choose. On a device the numbers of rows are rounded up, so that few
    // sizes of calls exist.
    static constexpr std::int64_t ANY = -1;         // rounded to a power of two
    static constexpr std::int64_t NEW_ROWS = -2;    // rows of the call
    static constexpr std::int64_t LOGIT_ROWS = -3;  // rows whose logits it returns
    static constexpr std::int64_t EXACT = -4;       // not rounded

    /// padding: the number in the rows that a device adds, if they are whole numbers.
    BoundTensor(Way way, std::string name, ONNXTensorElementDataType type, Shape dims,
                std::int64_t padding = 0)
        : way_(way),
          name_(std::move(name)),
          type_(type),
          dims_(std::move(dims)),
          padding_(padding) {}

    /// Let the next calls use this memory; `sizes`: of the dimensions that calls choose, in order.
    void bind(Binding& binding, void* memory, std::initializer_list<std::size_t> sizes);
    /// Whether memory or shape differ from those of the last question.
    bool has_changed(void* memory, const Shape& shape);

    /// The same as a value that is not bound.
    Ort::Value value_on(void* memory, std::initializer_list<std::size_t> sizes) const;
    Shape shape_of(std::initializer_list<std::size_t> sizes) const;

    Way way() const { return way_; }
    const std::string& name() const { return name_; }
    ONNXTensorElementDataType type() const { return type_; }
    const Shape& dims() const { return dims_; }
    std::int64_t padding() const { return padding_; }

private:
    Way way_;
    std::string name_;
    ONNXTensorElementDataType type_;
    Shape dims_;
    std::int64_t padding_;
    Shape shape_;  // as it is bound
    void* memory_ = nullptr;
};

/// The tensors of the calls of one graph: in memory of the host, or on a device.
class Binding {
public:
    virtual ~Binding() = default;
    /// The next call has so many rows, which the caches have room for from `first_row` on.
    virtual void begin(std::size_t /*num_new*/, std::size_t /*first_row*/,
                       std::size_t /*capacity*/) {}
    virtual void bind(BoundTensor& tensor, void* memory, Shape shape) = 0;
    /// Let the next call use a value of the device.
    virtual void bind(const BoundTensor& tensor, const Ort::Value& value) = 0;
    /// Leave an output of the next call where it is computed, until `fetch`.
    virtual void leave(const BoundTensor&) {}
    /// Write an output that was left, of the last call, to its memory.
    virtual void fetch(const BoundTensor&) {}
    /// The size that a dimension ANY gets.
    virtual std::size_t rounded(std::size_t size) const { return size; }
    /// Run the graph. gives_up_memory: free memory of intermediate results that it does not need.
    /// Ort::Exception: it failed; CapacityError: a device has no memory.
    virtual void run(bool gives_up_memory) = 0;
    /// Whether the last call was bound or recorded, which later ones of its sizes are not.
    virtual bool has_set_up() const { return false; }
};

/// Memory of the host, which the graph reads and writes in place. A tensor is bound again only when
/// its memory or a size has changed.
class HostBinding final : public Binding {
public:
    explicit HostBinding(Ort::Session& session) : session_(session), binding_(session) {}

    void bind(BoundTensor& tensor, void* memory, Shape shape) override;
    void bind(const BoundTensor& tensor, const Ort::Value& value) override;
    void run(bool gives_up_memory) override;

private:
    Ort::Session& session_;
    Ort::IoBinding binding_;
};

/// Bind a value as an input or an output.
void bind_value(Ort::IoBinding& binding, const BoundTensor& tensor, const Ort::Value& value);

}  // namespace dsbd
