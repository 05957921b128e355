// Features: hidden states of rows, which a feature draft reads (features.py, feature_memory.py).
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "runtime/part.hpp"

namespace dsbd {

/// Features in host memory, those of one forward: (num_rows, row_bytes).
struct HostFeatures final : Features {
    HostFeatures(bool is_of_target, std::size_t count, std::size_t bytes_of_row)
        : is_target(is_of_target),
          num_rows(count),
          row_bytes(bytes_of_row),
          memory(count ? count * bytes_of_row : 1) {}

    std::shared_ptr<const Features> copied(std::size_t row) const override {
        auto copy = std::make_shared<HostFeatures>(is_target, 1, row_bytes);
        std::copy_n(memory.begin() + static_cast<std::ptrdiff_t>(row * row_bytes), row_bytes,
                    copy->memory.begin());
        return copy;
    }

    bool is_target;
    std::size_t num_rows, row_bytes;
    std::vector<std::byte> memory;
};

/// The features that a target's engine returns of the rows that a forward names.
class FeaturesOfTarget final : public Part {
public:
    explicit FeaturesOfTarget(const ModelEntry& entry);

    std::vector<const BoundTensor*> tensors() const override;
    void begin(const Forward& forward) override;
    void bind(const Call& call, Binding& binding) override;
    void finish(ForwardResult& result) override { result.features = std::move(kept_); }

private:
    std::size_t row_bytes_;
    BoundTensor feature_rows_, features_;
    Ints rows_of_call_;
    std::shared_ptr<HostFeatures> kept_;
    std::size_t num_written_ = 0;  // of their rows, in the calls so far
};

/// The features that a feature draft's engine reads of parents, and returns of all rows.
class FeaturesOfDraft final : public Part {
public:
    explicit FeaturesOfDraft(const ModelEntry& entry);

    std::vector<const BoundTensor*> tensors() const override;
    void begin(const Forward& forward) override;
    void bind(const Call& call, Binding& binding) override;
    void finish(ForwardResult& result) override { result.features = std::move(kept_); }

private:
    std::size_t gather(const Call& call, bool is_target, std::size_t row_bytes,
                       std::size_t first_index, std::vector<std::byte>& rows);

    std::size_t target_bytes_, own_bytes_;  // of a row
    BoundTensor target_features_, own_features_, feature_index_, features_;
    std::vector<std::byte> target_rows_, own_rows_;  // read by a call
    Ints index_;  // (S,) which of them each row reads, the target's first; -1: zeros
    std::shared_ptr<HostFeatures> kept_;
};

}  // namespace dsbd
