// Head: the logits that an engine returns, all of a row or the largest (head.py, full_logits.py).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/part.hpp"

namespace dsbd {

/// The head of an engine. Its outputs lie in memory of its own; the logits of several calls of a
/// forward one after the other. All logits of a top-k head stay there until rows of them are read.
class Head : public Part {
public:
    explicit Head(const ModelEntry& entry);

    std::vector<const BoundTensor*> tensors() const override;
    void begin(const Forward& forward) override;
    void bind(const Call& call, Binding& binding) override;
    void finish(ForwardResult& result) override;

private:
    /// One output, (R, row_size) numbers.
    struct Output {
        BoundTensor tensor;
        std::size_t row_bytes;
        std::vector<std::byte> memory;    // in the order of the calls
        std::vector<std::byte> gathered;  // in the order of the forward's logit rows

        const void* rows(const std::vector<std::size_t>& place, bool is_in_order);
    };
    /// All logits of one forward; expired by the next.
    struct Kept : FullLogits {
        std::span<const float> row(std::size_t row) override;
        Head* head = nullptr;  // null: expired
    };

    std::size_t num_top_, vocab_size_;
    BoundTensor logit_rows_;
    Ints rows_of_call_;
    std::vector<Output> outputs_;      // logits; or top_logits, top_ids, logsumexp, and logits
    std::vector<std::size_t> place_;   // (R,): of each logit row, its row in the outputs
    std::size_t num_written_ = 0;      // rows of the outputs, in the calls so far
    Binding* left_by_ = nullptr;  // has the full logits of the forward; null: memory has them
    bool is_in_order_ = true;  // place_ is 0, 1, 2, ...
    std::array<Kept, 2> kept_;  // of this forward and of the one before
    std::size_t current_ = 0;
};

}  // namespace dsbd
