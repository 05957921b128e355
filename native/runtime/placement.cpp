// The table of providers, and what each of them does not run.
#include "runtime/placement.hpp"

#include <algorithm>
#include <array>

namespace dsbd {

namespace {

using Words = std::span<const std::string_view>;

constexpr std::array<std::string_view, 3> ALL_FORMS{"portable", "cuda", "webgpu"};
constexpr std::array<std::string_view, 1> WEBGPU_FORMS{"webgpu"};
constexpr std::array<std::string_view, 2> FLOATS{"fp32", "fp16"};
constexpr std::array<std::string_view, 2> FLOATS_OF_CUDA{"fp16", "fp32"};
constexpr std::array<std::string_view, 5> ALL_QUANTIZATIONS{"none", "int8-dynamic", "int8", "int4",
                                                            "int4-symmetric"};
constexpr std::array<std::string_view, 4> BLOCKS{"none", "int8", "int4", "int4-symmetric"};

using Option = std::pair<std::string_view, std::string_view>;
// As in Python (cuda_options): without TF32, which has 10 bits of mantissa, and without attention
// that copies shared heads. Its graphs are off: each belongs to one thread and one size.
constexpr std::array<Option, 4> CUDA_OPTIONS{Option{"arena_extend_strategy", "kSameAsRequested"},
                                             {"enable_cuda_graph", "0"},
                                             {"use_tf32", "0"},
                                             {"sdpa_kernel", "16"}};
constexpr std::array<Option, 1> WEBGPU_OPTIONS{Option{"enableInt64", "1"}};

constexpr std::array PROVIDERS{
    Provider{
        "cpu", "CPUExecutionProvider", "", "", "", ALL_FORMS, FLOATS, ALL_QUANTIZATIONS, {}, ""},
    Provider{"cuda", "CUDAExecutionProvider", "libonnxruntime_providers_cuda.so", "",
             "NVIDIA's driver and CUDA's libraries", ALL_FORMS, FLOATS_OF_CUDA, BLOCKS,
             CUDA_OPTIONS, ""},
    Provider{"webgpu", "WebGpuExecutionProvider", "libonnxruntime_providers_webgpu.so",
             "onnxruntime_ep_webgpu", "the GPU's driver (on Linux with Vulkan)", WEBGPU_FORMS,
             FLOATS, BLOCKS, WEBGPU_OPTIONS, "enableGraphCapture"}};
constexpr std::array<std::string_view, 6> OF_PYTHON{"tensorrt", "tensorrt-rtx", "nv-tensorrt-rtx",
                                                    "openvino", "qnn",          "mlx"};

std::string joined(Words words) {
    std::string text;
    for (const std::string_view word : words) text.append(text.empty() ? "" : ", ").append(word);
    return text;
}

bool has(Words words, std::string_view word) {
    return std::find(words.begin(), words.end(), word) != words.end();
}

/// The value of dsbd-export --quantize that gives a quantization of a manifest.
std::string_view quantize_option(std::string_view quantization) {
    if (quantization == "int8-dynamic") return "int8";
    if (quantization == "int8") return "int8-blocks";
    return quantization == "int4-symmetric" ? "int4" : quantization;
}

}  // namespace

Placement::Placement() : Placement(PROVIDERS[0]) {}

std::string Placement::name() const {
    return std::string(provider->name) + ":" + std::to_string(device_id);
}

Placement placement_of(const std::string& setting, const std::string& text) {
    const std::size_t colon = text.find(':');
    const std::string name = text.substr(0, colon);
    const auto found = std::find_if(PROVIDERS.begin(), PROVIDERS.end(),
                                    [&](const Provider& each) { return each.name == name; });
    if (found == PROVIDERS.end()) {
        const bool is_of_python = has(OF_PYTHON, name);
        throw Error(setting + " is " + in_short(text) + ", " +
                    (is_of_python ? "which the native library does not run"
                                  : "which is no execution provider in this version") +
                    "; choose one of: cpu, cuda, webgpu" +
                    (is_of_python ? ", or use libdsbd with Python (docs/embedding.md)" : ""));
    }
    if (colon == std::string::npos) return Placement(*found);
    const std::string begin = setting + " is " + in_short(text);
    if (!found->is_device()) {
        throw Error(begin + ", but " + name + " has no numbered devices; write \"" + name + "\"");
    }
    const std::string number = text.substr(colon + 1);
    if (number.empty() || number.size() > 6 ||
        number.find_first_not_of("0123456789") != std::string::npos) {
        throw Error(begin + ", which names the device " + in_short(number) +
                    ", expected a number: \"" + name + ":0\"");
    }
    return Placement(*found, std::stoul(number));
}

void check_runnable(const Provider& provider, const ModelEntry& entry,
                    const std::filesystem::path& file) {
    const std::string begin = file.string(), name = "provider '" + std::string(provider.name) + "'";
    if (entry.encoder && provider.is_device()) {
        throw Error(begin + " is the engine of an encoder-decoder, which " + name +
                    " does not run; use 'cpu'");
    }
    if (!has(provider.forms, entry.form)) {
        throw Error(begin + " has the form " + entry.form + ", " + name + " runs " +
                    joined(provider.forms) + "; export with --form " +
                    std::string(provider.forms[0]));
    }
    if (!has(provider.quantizations, entry.quantization)) {
        std::vector<std::string_view> options;
        for (const std::string_view each : provider.quantizations) {
            const std::string_view option = quantize_option(each);
            if (!has(options, option)) options.push_back(option);
        }
        throw Error(begin + " is quantized as " + std::string(quantize_option(entry.quantization)) +
                    ", for which " + name + " has no kernels; it runs " + joined(options) +
                    ": export with --quantize " + std::string(options.back()) + " --dtype " +
                    std::string(provider.dtypes[0]));
    }
    if (provider.is_device() && entry.keeps_recent_rows()) {
        throw Error(begin + " (family " + entry.family +
                    ") has convolutions or recurrences, whose rows " + name +
                    " cannot fold yet; use provider 'cpu'");
    }
    const auto check_dtype = [&](const std::string& dtype) {
        if (has(provider.dtypes, dtype)) return;
        throw Error(begin + " is in " + dtype + ", " + name + " runs " + joined(provider.dtypes) +
                    "; export with --dtype " + std::string(provider.dtypes[0]));
    };
    check_dtype(entry.dtype);
    for (const CacheEntry& cache : entry.caches) check_dtype(cache.dtype);
}

}  // namespace dsbd
