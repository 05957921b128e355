// Graphs on ONNX Runtime (ort_module.py, host_binder.py): opening, checks, tensors bound in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include <onnxruntime_cxx_api.h>

#include "runtime/manifest.hpp"

namespace dsbd {

/// Settings of engines that do not belong to a bundle.
struct EngineSettings {
    std::optional<int> num_threads;  // of one call; none: ONNX Runtime chooses
    int spin_us = 20;                // an idle thread waits busily for so long, then it sleeps
    std::string engine_cache;        // folder of prepared engines; empty: nothing is stored
};

/// ONNX Runtime without its telemetry, which is on by default, unless the user has set the switch.
Ort::Env ort_environment();

Ort::SessionOptions session_options(const ModelEntry& entry, const EngineSettings& settings);

/// Open a graph; Error: it cannot be loaded.
Ort::Session open_graph(const Ort::Env& env, const std::filesystem::path& file,
                        const ModelEntry& entry, const EngineSettings& settings);

/// An input or an output of a graph whose memory the host owns. It is bound again only when the
/// memory or a size has changed.
class BoundTensor {
public:
    enum class Way { input, output };
    static constexpr std::int64_t ANY = -1;  // a dimension that calls choose

    BoundTensor(Way way, std::string name, ONNXTensorElementDataType type,
                std::vector<std::int64_t> dims)
        : way_(way), name_(std::move(name)), type_(type), dims_(std::move(dims)) {}

    /// Let the next calls use this memory; `sizes`: of the dimensions ANY, in order.
    void bind(Ort::IoBinding& binding, void* memory, std::initializer_list<std::size_t> sizes);

    /// The same as a value that is not bound.
    Ort::Value value_on(void* memory, std::initializer_list<std::size_t> sizes) const;

    Way way() const { return way_; }
    const std::string& name() const { return name_; }
    ONNXTensorElementDataType type() const { return type_; }
    const std::vector<std::int64_t>& dims() const { return dims_; }

private:
    std::vector<std::int64_t> shape_of(std::initializer_list<std::size_t> sizes) const;
    Ort::Value value_of(void* memory, const std::vector<std::int64_t>& shape) const;

    Way way_;
    std::string name_;
    ONNXTensorElementDataType type_;
    std::vector<std::int64_t> dims_;
    std::vector<std::int64_t> shape_;  // as it is bound
    void* memory_ = nullptr;
};

/// Raise Error naming the first input or output of a graph that differs from these.
void check_graph(const std::filesystem::path& file, const Ort::Session& session,
                 const std::vector<const BoundTensor*>& tensors);

/// The error of a failed call: CapacityError without memory, else Error.
[[noreturn]] void throw_call_error(const std::filesystem::path& file, const std::string& sizes,
                                   const std::exception& error);

}  // namespace dsbd
