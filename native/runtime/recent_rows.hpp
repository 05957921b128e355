// Recent rows: those that convolutions and recurrences keep, and the states of checkpoints
// (recent_rows.py has the table of tensors).
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/recent_paths.hpp"
#include "runtime/row_buffers.hpp"

namespace dsbd {

/// Bytes of a path that is kept by itself, in addition to its attention rows.
std::size_t path_bytes(const ModelEntry& entry);

/// Recent rows of one engine, and the states of checkpoints, (B, H, Dk, Dv); the first is 0.
class HostRecentMemory final : public RecentMemory {
public:
    HostRecentMemory(const Ort::Env& env, const std::filesystem::path& folder,
                     const ModelEntry& entry, const EngineSettings& settings);

    std::vector<const BoundTensor*> tensors() const;
    void bind(const NewRows& call, Ort::IoBinding& binding);
    std::size_t capacity() const { return rows_.capacity(); }
    std::size_t num_bytes() const;
    bool has_states() const { return !states_.empty(); }

    void reserve(std::size_t num_rows, std::size_t num_used) override;
    void shrink(std::size_t num_used) override;
    void move_rows(std::span<const std::int64_t> rows, std::size_t first_row) override {
        rows_.move_rows(rows, first_row);
    }
    void reserve_checkpoints(std::size_t number) override;
    void fold(const Ints& rows, std::size_t source, std::size_t target) override;

private:
    /// A state of each checkpoint, one after the other.
    struct State {
        BoundTensor tensor;
        std::size_t size;  // numbers of one
        std::vector<float> values;
    };
    void add_state(const std::string& name, std::vector<std::size_t> shape);

    std::filesystem::path fold_file_;
    std::optional<Ort::Session> fold_;  // of an engine with recurrences
    std::size_t row_bytes_;
    RowBuffers rows_;
    std::vector<State> states_;
    std::size_t num_checkpoints_ = 1;
};

/// The recent rows of an engine, and the checkpoints before them.
class RecentRows final : public Part {
public:
    RecentRows(const Ort::Env& env, const std::filesystem::path& folder, const ModelEntry& entry,
               const EngineSettings& settings);

    std::size_t num_bytes() const { return memory_.num_bytes(); }
    std::vector<const BoundTensor*> tensors() const override;
    void bind(const Call& call, Ort::IoBinding& binding) override;
    void keep(std::span<const std::int64_t> rows) override { paths_.keep(rows); }

    /// The most new rows of one call.
    std::size_t most_new_rows() const { return most_new_rows_; }
    /// Make a call, after calls that compute rows again.
    void run(const Call& call, const std::function<void(const Call&)>& run_call);

private:
    std::size_t num_ancestors_, most_new_rows_;
    HostRecentMemory memory_;
    RecentPaths paths_;
    BoundTensor write_indices_, ancestors_, mask_, checkpoint_rows_, row_places_;
    Ints first_row_;
    std::vector<std::uint8_t> mask_bytes_;  // (S, capacity)
};

}  // namespace dsbd
