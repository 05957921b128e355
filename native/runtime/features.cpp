// Features of the rows in memory, and those that a call reads.
#include "runtime/features.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace dsbd {

namespace {

constexpr auto INT64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr auto ANY = BoundTensor::ANY;
constexpr auto NEW_ROWS = BoundTensor::NEW_ROWS;
constexpr auto INPUT = BoundTensor::Way::input;
constexpr auto OUTPUT = BoundTensor::Way::output;

std::size_t bytes_of(const ModelEntry& entry, std::size_t width) {
    return width * (entry.dtype == "fp32" ? 4 : 2);
}

/// A tensor [rows, width] in the engine's float type.
BoundTensor rows_tensor(BoundTensor::Way way, const char* name, const ModelEntry& entry,
                        std::size_t width, std::int64_t rows = ANY) {
    const auto type = entry.dtype == "fp32" ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
                                            : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    return BoundTensor(way, name, type, {rows, static_cast<std::int64_t>(width)});
}

}  // namespace

FeaturesOfTarget::FeaturesOfTarget(const ModelEntry& entry)
    : row_bytes_(bytes_of(entry, entry.features->width)),
      feature_rows_(INPUT, "feature_rows", INT64, {ANY}),
      features_(rows_tensor(OUTPUT, "features", entry, entry.features->width)) {
    rows_of_call_.reserve(MAX_FORWARD_ROWS);  // its place stays
}

std::vector<const BoundTensor*> FeaturesOfTarget::tensors() const {
    return {&feature_rows_, &features_};
}

void FeaturesOfTarget::begin(const Forward& forward) {
    std::int64_t least = 0;
    for (const std::int64_t row : forward.feature_rows) {
        if (row < least || row >= static_cast<std::int64_t>(forward.num_new())) {
            throw Error("feature_rows has " + std::to_string(row) +
                        ", expected increasing rows "
                        "from 0 to " +
                        std::to_string(forward.num_new() - 1));
        }
        least = row + 1;
    }
    kept_ = std::make_shared<HostFeatures>(true, forward.feature_rows.size(), row_bytes_);
    num_written_ = 0;
}

void FeaturesOfTarget::bind(const Call& call, Binding& binding) {
    rows_of_call_.clear();
    for (const std::int64_t row : call.forward.feature_rows) {
        const auto number = static_cast<std::size_t>(row);
        if (number >= call.start && number < call.stop) {
            rows_of_call_.push_back(row - static_cast<std::int64_t>(call.start));
        }
    }
    feature_rows_.bind(binding, rows_of_call_.data(), {rows_of_call_.size()});
    features_.bind(binding, kept_->memory.data() + num_written_ * row_bytes_,
                   {rows_of_call_.size()});
    num_written_ += rows_of_call_.size();
}

FeaturesOfDraft::FeaturesOfDraft(const ModelEntry& entry)
    : target_bytes_(bytes_of(entry, entry.features->width)),
      own_bytes_(bytes_of(entry, *entry.features->own_width)),
      target_features_(rows_tensor(INPUT, "target_features", entry, entry.features->width)),
      own_features_(rows_tensor(INPUT, "own_features", entry, *entry.features->own_width)),
      feature_index_(INPUT, "feature_index", INT64, {NEW_ROWS}, -1),
      features_(rows_tensor(OUTPUT, "features", entry, *entry.features->own_width, NEW_ROWS)),
      index_(MAX_FORWARD_ROWS) {}

std::vector<const BoundTensor*> FeaturesOfDraft::tensors() const {
    return {&target_features_, &own_features_, &feature_index_, &features_};
}

void FeaturesOfDraft::begin(const Forward& forward) {
    const ParentFeatures& parents = forward.parent_features;
    const std::size_t num_new = forward.num_new();
    if (parents.sources.size() != num_new || parents.rows.size() != num_new) {
        throw Error("the engine is a feature draft's, and each of its " + std::to_string(num_new) +
                    " rows needs the feature of its parent; " +
                    std::to_string(parents.sources.size()) + " are given");
    }
    for (std::size_t s = 0; s < num_new; ++s) {
        const std::int64_t source = parents.sources[s];
        if (source == ParentFeatures::ZEROS) continue;
        const auto number = static_cast<std::size_t>(source);
        const HostFeatures* const found =
            number < parents.forwards.size()
                ? dynamic_cast<const HostFeatures*>(parents.forwards[number].get())
                : nullptr;
        if (!found || static_cast<std::size_t>(parents.rows[s]) >= found->num_rows) {
            throw Error("the parent of row " + std::to_string(s) + " has its feature in row " +
                        std::to_string(parents.rows[s]) + " of forward " + std::to_string(source) +
                        ", expected one of " + std::to_string(parents.forwards.size()) +
                        " forwards");
        }
    }
    kept_ = std::make_shared<HostFeatures>(false, num_new, own_bytes_);
}

void FeaturesOfDraft::bind(const Call& call, Binding& binding) {
    std::fill(index_.begin(), index_.end(), -1);
    const std::size_t num_target = gather(call, true, target_bytes_, 0, target_rows_);
    const std::size_t num_own =
        gather(call, false, own_bytes_, binding.rounded(num_target), own_rows_);
    target_features_.bind(binding, target_rows_.data(), {num_target});
    own_features_.bind(binding, own_rows_.data(), {num_own});
    feature_index_.bind(binding, index_.data(), {call.num_new()});
    features_.bind(binding, kept_->memory.data() + call.start * own_bytes_, {call.num_new()});
}

/// Copy the features of the rows' parents that one engine has computed, by forward; return how
/// many. With forwards of target, draft and target, the sources [2, 1, 2, -1] give the index
/// [0, 2, 1, -1].
std::size_t FeaturesOfDraft::gather(const Call& call, bool is_target, std::size_t row_bytes,
                                    std::size_t first_index, std::vector<std::byte>& rows) {
    const ParentFeatures& parents = call.forward.parent_features;
    rows.resize((MAX_FORWARD_ROWS + 1) * row_bytes);  // its place stays
    std::size_t count = 0;
    for (std::size_t number = 0; number < parents.forwards.size(); ++number) {
        const auto& features = static_cast<const HostFeatures&>(*parents.forwards[number]);
        if (features.is_target != is_target) continue;
        for (std::size_t s = call.start; s < call.stop; ++s) {
            if (parents.sources[s] != static_cast<std::int64_t>(number)) continue;
            const auto row = static_cast<std::size_t>(parents.rows[s]);
            std::memcpy(rows.data() + count * row_bytes, features.memory.data() + row * row_bytes,
                        row_bytes);
            index_[s - call.start] = static_cast<std::int64_t>(first_index + count++);
        }
    }
    return count;
}

}  // namespace dsbd
