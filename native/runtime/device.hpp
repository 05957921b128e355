// A device of an execution provider: library, graphs, memory, copies (plugin_module, value_device).
#pragma once

#include <cstddef>
#include <filesystem>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/binding.hpp"
#include "runtime/placement.hpp"

namespace dsbd {

/// One device. Its memory is values of ONNX Runtime, which have no addresses. A test may have a
/// stand-in, which overrides the virtual functions.
class Device {
public:
    /// Arrays copied to and from it, and runs of graphs; for tests.
    struct Counts {
        std::size_t num_uploads = 0, num_downloads = 0, num_runs = 0, num_recorded = 0;
    };
    struct Copy {
        const OrtValue* from;
        OrtValue* to;
    };

    /// library: file of the provider, or its folder; empty: the variable DSBD_PROVIDER_LIBRARY,
    /// else it is searched next to ONNX Runtime and next to this library. It is registered once in
    /// a process and stays. Error: library or device is missing.
    Device(const Placement& placement, const std::string& library);
    virtual ~Device() = default;

    const std::string& name() const { return name_; }
    Counts& counts() { return counts_; }
    /// Open a graph of which the device runs every node. captures: its calls can be recorded.
    virtual Ort::Session open(const std::filesystem::path& file, bool captures,
                              OrtLoggingLevel log_level);
    virtual void run(Ort::Session& session, const Ort::RunOptions& options,
                     const Ort::IoBinding& binding);
    /// A tensor of zeros. CapacityError: the device has no memory.
    Ort::Value allocate(ONNXTensorElementDataType type, const Shape& shape);
    void fill_zero(Ort::Value& value);
    void upload(const std::vector<Copy>& copies);
    /// Error: the device has failed.
    void download(const std::vector<Copy>& copies);
    /// Wait until all queued work is done. If it fails, a later call raises the error.
    void wait() noexcept;
    /// Held by whoever uses a device: all sessions of a process share one queue of work.
    static std::unique_lock<std::recursive_mutex> turn();

protected:
    explicit Device(std::string name) : name_(std::move(name)) {}
    virtual Ort::Value created(ONNXTensorElementDataType type, const Shape& shape);
    virtual void copy(const std::vector<Copy>& copies);

private:
    Placement placement_;
    std::string name_;
    Counts counts_;
    Ort::ConstEpDevice device_{nullptr};
    OrtAllocator* allocator_ = nullptr;  // of ONNX Runtime's environment
};

}  // namespace dsbd
