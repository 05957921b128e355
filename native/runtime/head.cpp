// The logits that a call asks for, and their rows in the order of the forward.
#include "runtime/head.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace dsbd {

namespace {

constexpr auto INT64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr auto FLOAT = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr auto LOGIT_ROWS = BoundTensor::LOGIT_ROWS;

}  // namespace

Head::Head(const ModelEntry& entry)
    : num_top_(entry.num_top_logits),
      vocab_size_(entry.vocab_size),
      logit_rows_(BoundTensor::Way::input, "logit_rows", INT64, {LOGIT_ROWS}) {
    const auto add = [this](const char* name, ONNXTensorElementDataType type, std::size_t width) {
        std::vector<std::int64_t> dims{LOGIT_ROWS};
        if (width) dims.push_back(static_cast<std::int64_t>(width));
        const std::size_t row_bytes = (type == INT64 ? 8 : 4) * std::max<std::size_t>(width, 1);
        outputs_.push_back(
            {BoundTensor(BoundTensor::Way::output, name, type, dims), row_bytes, {}, {}});
    };
    if (num_top_) {
        add("top_logits", FLOAT, num_top_);
        add("top_ids", INT64, num_top_);
        add("logsumexp", FLOAT, 0);
    }
    if (entry.full_logits) add("logits", FLOAT, vocab_size_);
}

std::vector<const BoundTensor*> Head::tensors() const {
    std::vector<const BoundTensor*> found{&logit_rows_};
    for (const Output& output : outputs_) found.push_back(&output.tensor);
    return found;
}

void Head::begin(const Forward& forward) {
    kept_[current_].head = nullptr;
    left_by_ = nullptr;
    num_written_ = 0;
    is_in_order_ = true;
    place_.resize(forward.logit_rows.size());
    for (Output& output : outputs_) {  // memory that grows is bound anew
        const std::size_t num_bytes = std::max<std::size_t>(place_.size(), 1) * output.row_bytes;
        if (output.memory.size() < num_bytes) output.memory.resize(num_bytes);
    }
}

/// Request the logits of the call's rows in the forward's order; of repeated rows once if they are
/// more than the call has.
void Head::bind(const Call& call, Binding& binding) {
    const Ints& all = call.forward.logit_rows;
    std::vector<std::size_t> places;  // which of all the logit rows are the call's
    rows_of_call_.clear();
    for (std::size_t r = 0; r < all.size(); ++r) {
        const auto row = static_cast<std::size_t>(all[r]);
        if (row < call.start || row >= call.stop) continue;
        places.push_back(r);
        rows_of_call_.push_back(static_cast<std::int64_t>(row - call.start));
    }
    if (places.size() > call.num_new()) {
        std::sort(rows_of_call_.begin(), rows_of_call_.end());
        rows_of_call_.erase(std::unique(rows_of_call_.begin(), rows_of_call_.end()),
                            rows_of_call_.end());
        for (const std::size_t r : places) {
            const auto row = all[r] - static_cast<std::int64_t>(call.start);
            place_[r] =
                num_written_ + static_cast<std::size_t>(std::lower_bound(rows_of_call_.begin(),
                                                                         rows_of_call_.end(), row) -
                                                        rows_of_call_.begin());
        }
    } else {
        for (std::size_t i = 0; i < places.size(); ++i) place_[places[i]] = num_written_ + i;
    }
    for (const std::size_t r : places) is_in_order_ &= place_[r] == r;
    const std::size_t num_rows = rows_of_call_.size();
    rows_of_call_.reserve(MAX_FORWARD_ROWS);  // its place stays
    logit_rows_.bind(binding, rows_of_call_.data(), {num_rows});
    for (Output& output : outputs_) {
        output.tensor.bind(binding, output.memory.data() + num_written_ * output.row_bytes,
                           {num_rows});
    }
    // the full logits of a top-k head, unless further calls overwrite them
    if (outputs_.size() == 4 && call.start == 0 && call.is_last()) {
        binding.leave(outputs_.back().tensor);
        left_by_ = &binding;
    }
    num_written_ += num_rows;
}

const void* Head::Output::rows(const std::vector<std::size_t>& place, bool is_in_order) {
    if (is_in_order) return memory.data();
    gathered.resize(place.size() * row_bytes);
    for (std::size_t r = 0; r < place.size(); ++r) {
        std::memcpy(gathered.data() + r * row_bytes, memory.data() + place[r] * row_bytes,
                    row_bytes);
    }
    return gathered.data();
}

void Head::finish(ForwardResult& result) {
    Logits& logits = result.logits;
    logits.num_rows = place_.size();
    logits.vocab_size = vocab_size_;
    const auto floats = [this](std::size_t i) {
        return static_cast<const float*>(outputs_[i].rows(place_, is_in_order_));
    };
    if (!num_top_) {
        logits.values = floats(0);
        return;
    }
    logits.num_top = num_top_;
    logits.top_logits = floats(0);
    logits.top_ids = static_cast<const std::int64_t*>(outputs_[1].rows(place_, is_in_order_));
    logits.logsumexp = floats(2);
    if (outputs_.size() == 4) {
        current_ = 1 - current_;
        kept_[current_].head = this;
        logits.full = &kept_[current_];
    }
}

std::span<const float> Head::Kept::row(std::size_t row) {
    if (!head) {
        throw ModelError(
            "full logits are read after the model's next forward, which overwrites "
            "them; read those of a forward before the next one");
    }
    if (row >= head->place_.size()) {
        throw ModelError("row " + std::to_string(row) +
                         " of full logits is read, expected one of " +
                         std::to_string(head->place_.size()));
    }
    const Output& output = head->outputs_.back();
    if (head->left_by_) std::exchange(head->left_by_, nullptr)->fetch(output.tensor);
    const std::byte* const found = output.memory.data() + head->place_[row] * output.row_bytes;
    return {reinterpret_cast<const float*>(found), head->vocab_size_};
}

}  // namespace dsbd
