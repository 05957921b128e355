// Recent rows: those that convolutions and recurrences keep, and the states of checkpoints
// (recent_rows.py has the table of tensors).
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "runtime/recent_paths.hpp"

namespace dsbd {

/// Bytes of a path that is kept by itself, in addition to its attention rows.
std::size_t path_bytes(const ModelEntry& entry);

/// The recent rows of an engine, and the checkpoints before them.
class RecentRows final : public Part {
public:
    RecentRows(const Ort::Env& env, const std::filesystem::path& folder, const ModelEntry& entry,
               const EngineSettings& settings);

    std::size_t num_bytes() const { return memory_.num_bytes(); }
    std::vector<const BoundTensor*> tensors() const override;
    void bind(const Call& call, Binding& binding) override;
    void keep(std::span<const std::int64_t> rows) override { paths_.keep(rows); }

    /// The most new rows of one call.
    std::size_t most_new_rows() const { return most_new_rows_; }
    /// Make a call, after calls that compute rows again.
    void run(const Call& call, const std::function<void(const Call&)>& run_call);

private:
    std::size_t num_ancestors_, most_new_rows_;
    RecentMemory memory_;
    RecentPaths paths_;
    BoundTensor write_indices_, ancestors_, mask_, checkpoint_rows_, row_places_;
    Ints first_row_;
    std::vector<std::uint8_t> mask_bytes_;  // (S, capacity)
};

}  // namespace dsbd
