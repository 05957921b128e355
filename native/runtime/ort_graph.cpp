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

std::string in_one_line(const std::string& text) {
    std::istringstream words(text);
    std::string line;
    for (std::string word; words >> word;) line += (line.empty() ? "" : " ") + word;
    return line;
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

Ort::Env ort_environment() {
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    return Ort::Env(ORT_LOGGING_LEVEL_ERROR, "dsbd");
}

Ort::SessionOptions session_options(const ModelEntry& entry, const EngineSettings& settings) {
    Ort::SessionOptions options;
    options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_ERROR);
    if (settings.num_threads) options.SetIntraOpNumThreads(*settings.num_threads);
    if (settings.spin_us > 0) {
        options.AddConfigEntry("session.intra_op.spin_duration_us",
                               std::to_string(settings.spin_us).c_str());
    } else {
        options.AddConfigEntry("session.intra_op.allow_spinning", "0");
    }
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

void BoundTensor::bind(Ort::IoBinding& binding, void* memory,
                       std::initializer_list<std::size_t> sizes) {
    std::vector<std::int64_t> shape = shape_of(sizes);
    if (memory == memory_ && shape == shape_) return;
    memory_ = memory;
    shape_ = std::move(shape);
    if (way_ == Way::input) {
        binding.BindInput(name_.c_str(), value_of(memory, shape_));
    } else {
        binding.BindOutput(name_.c_str(), value_of(memory, shape_));
    }
}

Ort::Value BoundTensor::value_on(void* memory, std::initializer_list<std::size_t> sizes) const {
    return value_of(memory, shape_of(sizes));
}

std::vector<std::int64_t> BoundTensor::shape_of(std::initializer_list<std::size_t> sizes) const {
    std::vector<std::int64_t> shape = dims_;
    auto size = sizes.begin();
    for (std::int64_t& dim : shape) {
        if (dim == ANY) dim = static_cast<std::int64_t>(*size++);
    }
    return shape;
}

Ort::Value BoundTensor::value_of(void* memory, const std::vector<std::int64_t>& shape) const {
    std::size_t num_bytes = type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64     ? 8
                            : type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT   ? 4
                            : type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? 2
                                                                             : 1;
    for (const std::int64_t dim : shape) num_bytes *= static_cast<std::size_t>(dim);
    static const auto host = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    return Ort::Value::CreateTensor(host, memory, num_bytes, shape.data(), shape.size(), type_);
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
    for (const char* sign : {"Failed to allocate memory", "bad allocation", "bad_alloc"}) {
        if (reason.find(sign) != std::string::npos) {
            throw CapacityError("no memory for a call of " + file.string() + " (" + sizes +
                                "): " + reason +
                                "; shorten the prompt, ask for fewer beams or a shorter "
                                "draft");
        }
    }
    throw Error("ONNX Runtime failed in a call of " + file.string() + " (" + sizes +
                "): " + reason + "; copy the bundle or export again");
}

}  // namespace dsbd
