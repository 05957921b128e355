// A language model over a forest on ONNX Runtime (causal_lm.py, ort_session.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine.hpp"
#include "runtime/attention_rows.hpp"
#include "runtime/device_binding.hpp"
#include "runtime/part.hpp"
#include "runtime/recent_rows.hpp"
#include "runtime/sources.hpp"

namespace dsbd {

/// The target or the draft of a bundle, on the processor or on a device; for one thread at a time.
class OrtEngine final : public Engine {
public:
    /// role: "target" or "draft". target: the engine of the pair, whose encoder a draft may share.
    /// Error: the engine cannot be loaded, or contradicts the manifest.
    OrtEngine(const Ort::Env& env, const Bundle& bundle, const std::string& role,
              const EngineSettings& settings, const OrtEngine* target = nullptr);
    ~OrtEngine() override;

    const EngineSpec& spec() const override { return spec_; }
    std::size_t num_rows() const override { return num_rows_; }
    std::size_t num_free_rows() const override { return rows_->capacity() - num_rows_; }
    /// Grow now if calls are recorded, which growth releases. Otherwise do nothing: growth costs
    /// one copy, but room that is not used costs time in every call.
    void expect(std::size_t num_rows) override;
    /// Error: a size or value is wrong; CapacityError: a position beyond the context, or no memory.
    ForwardResult forward(const Forward& forward) override;
    void keep(std::span<const std::int64_t> rows) override;
    void read_source(const SourcePointer& source) override {
        if (sources_) sources_->slots().read(source);
    }
    void release_source(const Source& source) override {
        if (sources_) sources_->slots().release(source);
    }

    /// How many of these distinct sources it keeps at a time; all without an encoder.
    std::size_t most_sources(std::span<const SourcePointer> sources) const {
        return sources_ ? sources_->slots().most_together(sources) : sources.size();
    }
    /// Bytes of the caches and sources, now and at most since `reset_peak`.
    std::size_t kv_bytes() const {
        return rows_->capacity() * row_bytes_ + (recent_ ? recent_->num_bytes() : 0) +
               (sources_ ? sources_->num_bytes() : 0);
    }
    std::size_t kv_bytes_peak() const { return kv_bytes_peak_; }
    void reset_peak() { kv_bytes_peak_ = kv_bytes(); }
    /// The device that it runs on; null: the processor.
    Device* device() { return device_.get(); }

private:
    Ort::Session open(const Ort::Env& env, const Bundle& bundle, const std::string& role,
                      const EngineSettings& settings) const;
    std::unique_ptr<RowMemory> row_memory(const Bundle& bundle, const std::string& role,
                                          const EngineSettings& settings);
    void check(const Forward& forward) const;
    void reserve(std::size_t num_rows, std::size_t num_used);
    void run(const Call& call);

    std::filesystem::path file_;
    std::shared_ptr<Device> device_;  // null: the processor
    Recording recording_;
    Ort::Session session_;
    std::unique_ptr<Binding> binding_;
    EngineSpec spec_;
    std::size_t row_bytes_;
    std::vector<std::unique_ptr<Part>> parts_;  // in the order in which a call binds them
    Rows* rows_ = nullptr;                      // of the parts
    RecentRows* recent_ = nullptr;              // of the parts; null: none
    Sources* sources_ = nullptr;                // of the parts; null: none
    std::size_t num_rows_ = 0, kv_bytes_peak_ = 0;
    double run_s_ = 0.0;  // of the forward
    bool sets_up_ = false;  // of the forward
};

}  // namespace dsbd
