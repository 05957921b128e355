// One engine of a bundle on ONNX Runtime with its caches, bound in place by IoBinding.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <onnxruntime_cxx_api.h>

#include "error.hpp"
#include "kv_cache.hpp"
#include "manifest.hpp"
#include "step_model.hpp"

namespace dsbd {

/// How an engine runs.
struct Threads {
    std::optional<int> count;    // of one call; without a value ONNX Runtime chooses
    int spin_us = 20;            // an idle thread waits busily for so long, then it sleeps
};

/// The target or the draft. Each cache is one buffer bound to both `past` and `present`, so that
/// the engine writes its new rows in place and nothing is handed back.
class Engine final : public StepModel {
public:
    Engine(Ort::Env& env, const ModelEntry& entry, const Threads& threads)
        : entry_(entry),
          session_(open_session(env, entry, threads)),
          binding_(session_),
          cache_(entry.caches),
          row_positions_(cache_.capacity()) {
        bind_caches();
    }

    std::size_t vocab_size() const override { return entry_.vocab_size; }
    std::size_t context_length() const override { return entry_.context_length; }
    std::size_t num_candidates() const override { return entry_.num_candidates; }
    std::size_t num_rows() const override { return num_rows_; }

    HeadOutput step(const StepInput& input) override {
        const std::size_t num_new = input.token_ids.size();
        reserve(num_rows_ + num_new);
        std::copy(input.positions.begin(), input.positions.end(),
                  row_positions_.begin() + static_cast<std::ptrdiff_t>(num_rows_));
        try {
            HeadOutput output = run(input);
            num_rows_ += num_new;
            return output;
        } catch (const Ort::Exception& error) {
            throw Error("ONNX Runtime failed in a call of " + entry_.model_file.string() + " (" +
                        std::to_string(num_new) + " rows from row " + std::to_string(num_rows_) +
                        " on): " + error.what() + "; copy the bundle or export again");
        }
    }

    void keep(const std::vector<std::size_t>& rows) override {
        std::size_t num_in_place = 0;
        while (num_in_place < rows.size() && rows[num_in_place] == num_in_place) {
            ++num_in_place;
        }
        const std::vector<std::size_t> moved(
            rows.begin() + static_cast<std::ptrdiff_t>(num_in_place), rows.end());
        cache_.move_rows(moved, num_in_place);
        for (std::size_t i = 0; i < moved.size(); ++i) {
            row_positions_[num_in_place + i] = row_positions_[moved[i]];
        }
        num_rows_ = rows.size();
    }

private:
    static Ort::Session open_session(Ort::Env& env, const ModelEntry& entry,
                                     const Threads& threads) {
        Ort::SessionOptions options;
        options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_ERROR);
        if (threads.count) {
            options.SetIntraOpNumThreads(*threads.count);
        }
        if (threads.spin_us > 0) {
            options.AddConfigEntry("session.intra_op.spin_duration_us",
                                   std::to_string(threads.spin_us).c_str());
        } else {
            options.AddConfigEntry("session.intra_op.allow_spinning", "0");
        }
        if (entry.quantization == "int8-dynamic") {  // else sums saturate on x86 without VNNI
            options.AddConfigEntry("session.x64quantprecision", "1");
        }
        try {
            return Ort::Session(env, entry.model_file.c_str(), options);
        } catch (const Ort::Exception& error) {
            throw Error("ONNX Runtime cannot load " + entry.model_file.string() + " (" +
                        error.what() + "); copy the bundle or export again");
        }
    }

    /// Give the caches room; growth copies the rows in use, a first row starts from zeros.
    void reserve(std::size_t num_rows) {
        const std::size_t capacity = bucket_capacity(num_rows);
        if (num_rows_ > 0 && capacity <= cache_.capacity()) {
            return;
        }
        binding_.ClearBoundInputs();
        binding_.ClearBoundOutputs();
        cache_.resize(capacity, num_rows_);
        row_positions_.resize(capacity);
        bind_caches();
    }

    void bind_caches() {
        for (CacheBuffer& buffer : cache_.buffers()) {
            const ONNXTensorElementDataType type = buffer.is_fp32
                                                       ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
                                                       : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
            const std::vector<std::int64_t> shape = buffer.shape(cache_.capacity());
            const Ort::Value value =
                Ort::Value::CreateTensor(memory_, buffer.bytes.data(), buffer.bytes.size(),
                                         shape.data(), shape.size(), type);
            binding_.BindInput(("past_key_values" + buffer.name).c_str(), value);
            binding_.BindOutput(("present" + buffer.name).c_str(), value);
        }
    }

    HeadOutput run(const StepInput& input) {
        const auto num_new = static_cast<std::int64_t>(input.token_ids.size());
        const auto num_asked = static_cast<std::int64_t>(input.logit_rows.size());
        std::vector<std::int64_t> tokens = input.token_ids, positions = input.positions,
                                  logit_rows = input.logit_rows,
                                  first_row{static_cast<std::int64_t>(num_rows_)};
        bind_input("input_ids", tokens, {1, num_new});
        bind_input("position_ids", positions, {1, num_new});
        bind_input("logit_rows", logit_rows, {num_asked});
        bind_input("write_indices", first_row, {1});
        std::vector<std::vector<std::uint8_t>> masks;
        for (const std::string& name : entry_.masks) {
            masks.push_back(padded_mask(input, name == "attention_mask_sliding"));
            const std::array<std::int64_t, 4> shape{1, 1, num_new,
                                                    static_cast<std::int64_t>(cache_.capacity())};
            binding_.BindInput(name.c_str(),
                               Ort::Value::CreateTensor(memory_, masks.back().data(),
                                                        masks.back().size(), shape.data(),
                                                        shape.size(),
                                                        ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL));
        }
        HeadOutput output = bound_output(input.logit_rows.size());
        session_.Run(Ort::RunOptions{}, binding_);
        return output;
    }

    void bind_input(const char* name, std::vector<std::int64_t>& values,
                    const std::vector<std::int64_t>& shape) {
        binding_.BindInput(name, Ort::Value::CreateTensor<std::int64_t>(
                                     memory_, values.data(), values.size(), shape.data(),
                                     shape.size()));
    }

    /// Return buffers of the head's outputs, bound to them.
    HeadOutput bound_output(std::size_t num_asked) {
        const bool has_candidates = entry_.num_candidates != 0;
        HeadOutput output;
        output.row_size = has_candidates ? entry_.num_candidates : entry_.vocab_size;
        output.logits.resize(num_asked * output.row_size);
        const std::vector<std::int64_t> shape{static_cast<std::int64_t>(num_asked),
                                              static_cast<std::int64_t>(output.row_size)};
        bind_output(has_candidates ? "top_logits" : "logits", output.logits, shape);
        if (has_candidates) {
            output.ids.resize(output.logits.size());
            output.logsumexp.resize(num_asked);
            bind_output("top_ids", output.ids, shape);
            bind_output("logsumexp", output.logsumexp, {shape[0]});
        }
        return output;
    }

    template <typename Element>
    void bind_output(const char* name, std::vector<Element>& values,
                     const std::vector<std::int64_t>& shape) {
        binding_.BindOutput(name, Ort::Value::CreateTensor<Element>(memory_, values.data(),
                                                                    values.size(), shape.data(),
                                                                    shape.size()));
    }

    /// Return the mask [S, capacity]; a sliding one is cut to the window by position.
    std::vector<std::uint8_t> padded_mask(const StepInput& input, bool is_sliding) const {
        const std::size_t num_new = input.token_ids.size();
        const std::size_t num_rows = num_rows_ + num_new;
        std::vector<std::uint8_t> padded(num_new * cache_.capacity());
        for (std::size_t node = 0; node < num_new; ++node) {
            for (std::size_t row = 0; row < num_rows; ++row) {
                const bool is_near =
                    !is_sliding || input.positions[node] - row_positions_[row] <
                                       static_cast<std::int64_t>(*entry_.sliding_window);
                padded[node * cache_.capacity() + row] =
                    is_near ? input.mask[node * num_rows + row] : std::uint8_t{0};
            }
        }
        return padded;
    }

    ModelEntry entry_;
    Ort::Session session_;
    Ort::IoBinding binding_;
    Ort::MemoryInfo memory_ = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    KvCache cache_;
    std::vector<std::int64_t> row_positions_;    // (capacity,); the first num_rows_ are valid
    std::size_t num_rows_ = 0;
};

}  // namespace dsbd
