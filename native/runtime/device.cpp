// Where the library of a provider is, and its devices, their sessions and memory.
#include "runtime/device.hpp"

#include <cstdlib>
#include <set>
#include <unordered_map>

#include <dlfcn.h>

#include "runtime/ort_graph.hpp"

namespace dsbd {

namespace {

namespace fs = std::filesystem;

/// ONNX Runtime's environment as long as the process lives: without it a registered library would
/// be unloaded, which plug-ins do not survive.
Ort::Env& lasting_environment() {
    static auto* const env = new Ort::Env(ort_environment());
    return *env;
}

/// The folder of the library or program that has an address.
fs::path folder_with(const void* address) {
    Dl_info info{};
    std::error_code error;
    if (!dladdr(address, &info) || !info.dli_fname) return {};
    return fs::canonical(info.dli_fname, error).parent_path();
}

fs::path library_of(const Provider& provider, const std::string& setting) {
    const char* const variable = std::getenv("DSBD_PROVIDER_LIBRARY");
    const std::string given = !setting.empty() ? setting : variable ? variable : "";
    const std::string begin = "provider '" + std::string(provider.name) + "' needs the library " +
                              std::string(provider.library);
    if (!given.empty()) {
        const fs::path file =
            fs::is_directory(given) ? fs::path(given) / provider.library : fs::path(given);
        if (fs::is_regular_file(file)) return file;
        throw Error(begin + ", provider_library is " + given +
                    ", expected that file or its folder; copy it there, or use provider 'cpu'");
    }
    const fs::path of_runtime = folder_with(reinterpret_cast<const void*>(&OrtGetApiBase));
    std::vector<fs::path> folders{of_runtime,
                                  folder_with(reinterpret_cast<const void*>(&library_of))};
    if (!provider.package.empty()) {  // of the wheels: PACKAGES/onnxruntime/capi
        folders.push_back(of_runtime.parent_path().parent_path() / provider.package);
    }
    for (const fs::path& folder : folders) {
        if (fs::is_regular_file(folder / provider.library)) return folder / provider.library;
    }
    throw Error(begin + ", which is not in " + of_runtime.string() +
                "; copy it there, name it in the setting provider_library or in the variable "
                "DSBD_PROVIDER_LIBRARY, or use provider 'cpu'");
}

std::vector<Ort::ConstEpDevice> known_devices(const Provider& provider) {
    std::vector<Ort::ConstEpDevice> found;
    for (const Ort::ConstEpDevice& device : lasting_environment().GetEpDevices()) {
        if (device.EpName() == provider.ort_name) found.push_back(device);
    }
    return found;
}

/// The devices of a provider, whose library is registered unless the program has done so.
std::vector<Ort::ConstEpDevice> devices_of(const Provider& provider, const std::string& setting) {
    static std::set<std::string_view> registered;
    const auto turn = Device::turn();
    std::vector<Ort::ConstEpDevice> found = known_devices(provider);
    if (!found.empty()) return found;
    const std::string name(provider.name);
    if (!registered.contains(provider.name)) {
        const fs::path library = library_of(provider, setting);
        try {
            lasting_environment().RegisterExecutionProviderLibrary(name.c_str(), library.native());
        } catch (const Ort::Exception& error) {
            throw Error("provider '" + name + "' needs the library " + library.string() +
                        ", which cannot be loaded (" + in_one_line(error.what()) + "); install " +
                        std::string(provider.driver) + ", or use provider 'cpu'");
        }
        registered.insert(provider.name);
        found = known_devices(provider);
    }
    if (found.empty()) {
        throw Error("provider '" + name + "' finds no GPU; install " +
                    std::string(provider.driver) + ", or use provider 'cpu'");
    }
    return found;
}

[[noreturn]] void throw_open_error(const Provider& provider, const fs::path& file,
                                   const std::string& reason) {
    const std::string name = "provider '" + std::string(provider.name) + "'";
    const auto says = [&](const char* sign) { return reason.find(sign) != std::string::npos; };
    if (says("fallback to CPU EP has been explicitly disabled") ||
        says("all compute graph nodes have not been partitioned")) {
        throw Error(std::string(provider.ort_name) + " does not run every node of " +
                    file.string() + " (" + reason +
                    "); use provider 'cpu', or export with another --dtype or --quantize");
    }
    if (says("Failed to get a WebGPU adapter")) {
        throw Error(name + " finds no adapter that it can use (" + reason + "); install " +
                    std::string(provider.driver) + ", or use provider 'cpu'");
    }
    if (is_out_of_memory(reason)) {
        throw CapacityError("no memory on " + std::string(provider.name) + " for " + file.string() +
                            " (" + reason +
                            "); close other programs that use the device, or export with "
                            "--quantize or a shorter --dtype");
    }
    throw Error("ONNX Runtime cannot load " + file.string() + " on " + std::string(provider.name) +
                " (" + reason + "); copy the bundle or export again");
}

}  // namespace

std::unique_lock<std::recursive_mutex> Device::turn() {
    static auto* const turns = new std::recursive_mutex;
    return std::unique_lock(*turns);
}

Device::Device(const Placement& placement, const std::string& library)
    : placement_(placement), name_(placement.name()) {
    const auto turn = Device::turn();
    const std::vector<Ort::ConstEpDevice> devices = devices_of(*placement.provider, library);
    const std::string provider(placement.provider->name);
    if (placement.device_id >= devices.size()) {
        const std::string last = std::to_string(devices.size() - 1);
        throw Error("there is no device " + name_ + ", this machine has " +
                    std::to_string(devices.size()) + "; choose " + provider + ":0" +
                    (devices.size() > 1 ? " to " + provider + ":" + last : ""));
    }
    device_ = devices[placement.device_id];
    const auto memory = device_.GetMemoryInfo(OrtDeviceMemoryType_DEFAULT);
    Ort::ThrowOnError(Ort::GetApi().GetSharedAllocator(lasting_environment(), memory, &allocator_));
    if (!allocator_) {
        throw Error(name_ + " has no allocator for its memory; use another version of " +
                    std::string(placement.provider->library) + ", or provider 'cpu'");
    }
}

Ort::Session Device::open(const fs::path& file, bool captures, OrtLoggingLevel log_level) {
    const Provider& provider = *placement_.provider;
    Ort::SessionOptions options;
    options.SetLogSeverityLevel(log_level);
    // A memory pattern would allocate at the second call of a size, which is recorded.
    options.DisableMemPattern();
    options.AddConfigEntry("session.disable_cpu_ep_fallback", "1");
    std::unordered_map<std::string, std::string> of_provider;
    for (const auto& [key, value] : provider.options) {
        of_provider[std::string(key)] = value;
    }
    if (captures) of_provider[std::string(provider.capture_option)] = "1";
    const auto turn = Device::turn();
    try {
        options.AppendExecutionProvider_V2(lasting_environment(), {device_}, of_provider);
        return Ort::Session(lasting_environment(), file.c_str(), options);
    } catch (const Ort::Exception& error) {
        throw_open_error(provider, file, in_one_line(error.what()));
    }
}

void Device::run(Ort::Session& session, const Ort::RunOptions& options,
                 const Ort::IoBinding& binding) {
    ++counts_.num_runs;
    session.Run(options, binding);
}

Ort::Value Device::created(ONNXTensorElementDataType type, const Shape& shape) {
    return Ort::Value::CreateTensor(allocator_, shape.data(), shape.size(), type);
}

Ort::Value Device::allocate(ONNXTensorElementDataType type, const Shape& shape) {
    const auto turn = Device::turn();
    try {
        Ort::Value value = created(type, shape);
        fill_zero(value);
        // A value without memory is only found when it is read.
        std::vector<std::byte> numbers(num_bytes_of(type, shape));
        Ort::Value on_host = host_value(numbers.data(), type, shape);
        copy({{value, on_host}});
        return value;
    } catch (const Ort::Exception& error) {
        throw CapacityError(name_ + " has no memory for " +
                            std::to_string(num_bytes_of(type, shape)) + " bytes (" +
                            in_one_line(error.what()) +
                            "); ask for fewer beams, a shorter prompt or fewer requests");
    }
}

void Device::fill_zero(Ort::Value& value) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    const Shape shape = info.GetShape();
    std::vector<std::byte> zeros(num_bytes_of(info.GetElementType(), shape));
    const Ort::Value on_host = host_value(zeros.data(), info.GetElementType(), shape);
    copy({{on_host, value}});
}

void Device::upload(const std::vector<Copy>& copies) {
    counts_.num_uploads += copies.size();
    copy(copies);
}

void Device::download(const std::vector<Copy>& copies) {
    counts_.num_downloads += copies.size();
    try {
        copy(copies);
    } catch (const Ort::Exception& error) {
        throw Error(name_ + " has failed: " + in_one_line(error.what()) +
                    "; open the bundle again");
    }
}

/// A copy to the host waits for everything before it.
void Device::wait() noexcept {
    try {
        allocate(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {1});
    } catch (const std::exception&) {  // it is lost
    }
}

void Device::copy(const std::vector<Copy>& copies) {
    if (copies.empty()) return;
    std::vector<const OrtValue*> from;
    std::vector<OrtValue*> to;
    for (const Copy& each : copies) {
        from.push_back(each.from);
        to.push_back(each.to);
    }
    const auto turn = Device::turn();
    Ort::ThrowOnError(Ort::GetApi().CopyTensors(lasting_environment(), from.data(), to.data(),
                                                nullptr, copies.size()));
}

}  // namespace dsbd
