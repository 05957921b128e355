// Execution providers that the native library runs, and where an engine runs (providers.py).
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/manifest.hpp"

namespace dsbd {

/// One execution provider; all that differs between them, except the processor, which is no device.
struct Provider {
    std::string_view name;     // in settings
    std::string_view ort_name;  // in ONNX Runtime
    std::string_view library;  // file of the provider; empty: it is in ONNX Runtime itself
    std::string_view package;  // folder of the Python package that the file is in, next to ONNX
                               // Runtime's; empty: next to ONNX Runtime's library
    std::string_view driver;  // what a machine without its device needs
    std::span<const std::string_view> forms, dtypes, quantizations;  // of bundles, usual ones first
    std::span<const std::pair<std::string_view, std::string_view>> options;  // of ONNX Runtime's
    std::string_view capture_option;  // with which calls of a size are recorded; empty: they cannot

    bool is_device() const { return !library.empty(); }
};

/// A provider, and the number of its device; 0 for the processor.
struct Placement {
    const Provider* provider;
    std::size_t device_id = 0;

    Placement();  // on the processor
    explicit Placement(const Provider& given, std::size_t number = 0)
        : provider(&given), device_id(number) {}
    bool operator==(const Placement&) const = default;
    bool is_device() const { return provider->is_device(); }
    /// Such as "webgpu:0".
    std::string name() const;
};

/// Return the placement that a setting names: "cpu", "webgpu" (the first device) or
/// "webgpu:1". Error: the provider is unknown, or not native.
Placement placement_of(const std::string& setting, const std::string& text);

/// Error unless a provider runs an engine of a bundle: its form, types, caches, quantization.
void check_runnable(const Provider& provider, const ModelEntry& entry,
                    const std::filesystem::path& file);

}  // namespace dsbd
