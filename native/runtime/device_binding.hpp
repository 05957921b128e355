// Calls of one graph on a device: few sizes, small copies, recorded calls (bound_calls.py).
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/device.hpp"

namespace dsbd {

/// Recorded calls of one engine. ONNX Runtime keeps the memory of each as long as its session.
struct Recording {
    static constexpr int MOST = 32;
    bool is_on = false;
    int num_recorded = 0;
};

/// The rows that a call of a device has for this many: 1, 2, 4, 8, 16, 24, 32, 40, 48, 64, ...
std::size_t forward_bucket(std::size_t num_rows);
/// The least power of two that holds so many rows, at least 1.
std::size_t row_bucket(std::size_t num_rows);

/// The tensors of a graph's calls on a device. What a call reads is copied to it, and the rows of
/// its outputs are copied back. Sizes are rounded up, so that few exist; each is bound once. From
/// the third call of a size on, calls are replayed if the device records them.
class DeviceBinding final : public Binding {
public:
    /// runs_again: whether a call may be run twice, as a forward, which writes the same rows again.
    DeviceBinding(std::shared_ptr<Device> device, Ort::Session& session, bool runs_again,
                  Recording* recording);
    ~DeviceBinding() override;

    void begin(std::size_t num_new, std::size_t first_row, std::size_t capacity) override;
    void bind(BoundTensor& tensor, void* memory, Shape shape) override;
    void bind(const BoundTensor& tensor, const Ort::Value& value) override;
    void leave(const BoundTensor& tensor) override;
    void fetch(const BoundTensor& tensor) override;
    std::size_t rounded(std::size_t size) const override;
    void run(bool gives_up_memory) override;
    bool has_set_up() const override { return has_set_up_; }
    /// Whether the last call should be recorded now, by `record`, with inputs that change nothing.
    bool is_due() const { return last_ && is_due(*last_); }
    void record();
    /// Release all calls, because memory that is bound to them is freed.
    void clear();

private:
    /// An array of the device, with its numbers on the host.
    struct Array {
        Ort::Value on_device{nullptr}, on_host{nullptr};
        std::vector<std::byte> numbers;
    };
    /// A tensor of the next call, in memory of the host.
    struct Staged {
        const BoundTensor* tensor;
        std::byte* memory;
        std::size_t num_bytes;
        Shape shape;  // rounded
        Array* array = nullptr;
        bool is_left = false;
    };
    /// The graph bound for calls of one size.
    struct BoundCall {
        Ort::IoBinding binding{nullptr};
        std::vector<Array*> arrays;  // of the staged tensors
        Array* checked = nullptr;    // output that shows whether the device has run the call
        Ort::Value mark{nullptr};    // its content before a call
        std::vector<float> mark_numbers;
        int num_runs = 0, num_tries = 0;
        std::string graph_id = "-1";  // -1: it is not recorded
    };

    BoundCall& bound_call();
    Array& array_of(const BoundTensor& tensor, const Shape& shape);
    void fill(const Staged& staged) const;
    void upload_inputs(const BoundCall& call);
    void execute(BoundCall& call);
    bool is_due(const BoundCall& call) const;
    void download_outputs(const BoundCall& call);
    void check_written(const Staged& output) const;
    Staged& staged_of(const BoundTensor& tensor);

    std::shared_ptr<Device> device_;
    Ort::Session& session_;
    bool runs_again_;
    Recording* recording_;
    std::size_t num_new_ = 0, first_row_ = 0, capacity_ = 0;  // of the next call
    std::vector<Staged> staged_;
    std::vector<std::pair<const BoundTensor*, const Ort::Value*>> values_;
    std::map<Shape, BoundCall> calls_;  // by all sizes
    std::map<std::pair<std::string, Shape>, Array> arrays_;
    BoundCall* last_ = nullptr;
    bool has_set_up_ = false;
};

}  // namespace dsbd
