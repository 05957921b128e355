// Graphs on ONNX Runtime (ort_module.py, graph_check.py): opening, checks, errors of calls.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <onnxruntime_cxx_api.h>

#include "runtime/binding.hpp"
#include "runtime/manifest.hpp"
#include "runtime/placement.hpp"

namespace dsbd {

class Device;

/// Settings of engines that do not belong to a bundle.
struct EngineSettings {
    std::optional<int> num_threads;  // of one call; none: ONNX Runtime chooses
    int spin_us = 20;                // an idle thread waits busily for so long, then it sleeps
    std::string engine_cache;        // folder of prepared engines; empty: nothing is stored
    Placement placement;             // where the engine runs
    std::shared_ptr<Device> device;  // of a test; null: that of the placement
    std::string provider_library;    // file or folder of its provider; empty: it is searched
    std::optional<bool> captures;    // whether its calls are recorded; none: if the provider can
    bool packs = true;               // whether weights are packed, in memory of their own
    OrtLoggingLevel log_level = ORT_LOGGING_LEVEL_ERROR;
};

/// ONNX Runtime without its telemetry, which is on by default, unless the user has set the switch.
Ort::Env ort_environment();

Ort::SessionOptions session_options(const ModelEntry& entry, const EngineSettings& settings);

/// Open a graph; Error: it cannot be loaded.
Ort::Session open_graph(const Ort::Env& env, const std::filesystem::path& file,
                        const ModelEntry& entry, const EngineSettings& settings);

/// Raise Error naming the first input or output of a graph that differs from these.
void check_graph(const std::filesystem::path& file, const Ort::Session& session,
                 const std::vector<const BoundTensor*>& tensors);

/// A message of ONNX Runtime without line breaks.
std::string in_one_line(const std::string& text);
/// Whether a message of ONNX Runtime says that there is no memory.
bool is_out_of_memory(const std::string& reason);
/// The error of a failed call: CapacityError without memory, else Error.
[[noreturn]] void throw_call_error(const std::filesystem::path& file, const std::string& sizes,
                                   const std::exception& error);

}  // namespace dsbd
