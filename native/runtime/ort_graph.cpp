// Sessions of ONNX Runtime: how they are opened, and tensors bound to them.
#include "runtime/ort_graph.hpp"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

namespace dsbd {

namespace {

/// Whether products of uint8 and int8 may saturate at 16 bits: on x86 without VNNI. Slower is
/// better than wrong, so true where it is unknown.
bool saturates_int8_products() {
#if defined(__x86_64__) || defined(__i386__)
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        if (line.rfind("flags", 0) != 0) continue;
        std::istringstream words(line);
        for (std::string word; words >> word;) {
            if (word == "avx512_vnni" || word == "avx_vnni") return false;
        }
        break;
    }
    return true;
#else
    return false;
#endif
}

std::string shown(const std::vector<std::int64_t>& dims) {
    std::string text;
    for (const std::int64_t dim : dims) {
        text += (text.empty() ? "" : ", ") + (dim < 0 ? "any" : std::to_string(dim));
    }
    return "[" + text + "]";
}

void check_tensor(const std::filesystem::path& file, const BoundTensor& expected,
                  const Ort::TypeInfo& info) {
    const std::string name = file.string() + " has " + expected.name();
    if (info.GetONNXType() != ONNX_TYPE_TENSOR) {
        throw Error(name + ", which is no tensor; export the bundle again");
    }
    const auto found = info.GetTensorTypeAndShapeInfo();
    const std::vector<std::int64_t> dims = found.GetShape();
    const bool has_type = found.GetElementType() == expected.type();
    bool fits = dims.size() == expected.dims().size();
    for (std::size_t i = 0; fits && i < dims.size(); ++i) {
        fits = dims[i] < 0 || dims[i] == expected.dims()[i];
    }
    if (!has_type || !fits) {
        throw Error(name + " of type " + std::to_string(found.GetElementType()) + " and shape " +
                    shown(dims) + ", expected " + std::to_string(expected.type()) + " and " +
                    shown(expected.dims()) + " from the manifest; export the bundle again");
    }
}

}  // namespace

std::string in_one_line(const std::string& text) {
    std::istringstream words(text);
    std::string line;
    for (std::string word; words >> word;) line += (line.empty() ? "" : " ") + word;
    return line;
}

bool is_out_of_memory(const std::string& reason) {
    for (const char* sign : {"Failed to allocate memory", "bad allocation", "bad_alloc",
                             "out of memory", "smaller than requested bytes"}) {
        if (reason.find(sign) != std::string::npos) return true;
    }
    return false;
}

Ort::Env ort_environment() {
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    return Ort::Env(ORT_LOGGING_LEVEL_ERROR, "dsbd");
}

Ort::SessionOptions session_options(const ModelEntry& entry, const EngineSettings& settings) {
    Ort::SessionOptions options;
    options.SetLogSeverityLevel(settings.log_level);
    if (settings.num_threads) options.SetIntraOpNumThreads(*settings.num_threads);
    if (settings.spin_us > 0) {
        options.AddConfigEntry("session.intra_op.spin_duration_us",
                               std::to_string(settings.spin_us).c_str());
    } else {
        options.AddConfigEntry("session.intra_op.allow_spinning", "0");
    }
    // Weights in blocks are packed in any case: unpacked ones compute in another precision.
    const bool has_blocks = entry.quantization != "none" && entry.quantization != "int8-dynamic";
    if (!settings.packs && !has_blocks) options.AddConfigEntry("session.disable_prepacking", "1");
    if (entry.quantization == "int8-dynamic" && saturates_int8_products()) {
        options.AddConfigEntry("session.x64quantprecision", "1");
    }
    return options;
}

Ort::Session open_graph(const Ort::Env& env, const std::filesystem::path& file,
                        const ModelEntry& entry, const EngineSettings& settings) {
    try {
        return Ort::Session(env, file.c_str(), session_options(entry, settings));
    } catch (const Ort::Exception& error) {
        throw Error("ONNX Runtime cannot load " + file.string() + " (" + in_one_line(error.what()) +
                    "); copy the bundle or export again");
    }
}

void check_graph(const std::filesystem::path& file, const Ort::Session& session,
                 const std::vector<const BoundTensor*>& tensors) {
    Ort::AllocatorWithDefaultOptions allocator;
    for (const BoundTensor::Way way : {BoundTensor::Way::input, BoundTensor::Way::output}) {
        const bool is_input = way == BoundTensor::Way::input;
        std::map<std::string, std::size_t> found;
        const std::size_t count = is_input ? session.GetInputCount() : session.GetOutputCount();
        for (std::size_t i = 0; i < count; ++i) {
            const auto name = is_input ? session.GetInputNameAllocated(i, allocator)
                                       : session.GetOutputNameAllocated(i, allocator);
            found[name.get()] = i;
        }
        for (const BoundTensor* tensor : tensors) {
            if (tensor->way() != way) continue;
            const auto place = found.find(tensor->name());
            if (place == found.end()) {
                throw Error(file.string() + " lacks the " + (is_input ? "input " : "output ") +
                            tensor->name() + "; export the bundle again");
            }
            check_tensor(file, *tensor,
                         is_input ? session.GetInputTypeInfo(place->second)
                                  : session.GetOutputTypeInfo(place->second));
            found.erase(place);
        }
        if (!found.empty()) {
            throw Error(file.string() + " has an " + (is_input ? "input " : "output ") +
                        found.begin()->first +
                        " that the manifest excludes; export the bundle again");
        }
    }
}

void throw_call_error(const std::filesystem::path& file, const std::string& sizes,
                      const std::exception& error) {
    const std::string reason = in_one_line(error.what());
    if (is_out_of_memory(reason)) {
        throw CapacityError("no memory for a call of " + file.string() + " (" + sizes +
                            "): " + reason +
                            "; shorten the prompt, ask for fewer beams or a shorter "
                            "draft");
    }
    throw Error("ONNX Runtime failed in a call of " + file.string() + " (" + sizes +
                "): " + reason + "; copy the bundle or export again");
}

}  // namespace dsbd
