// The cross rows of the sources of a call, side by side: a slot of one buffer for each source
// (cross_slots.py).
//
// A call with one source reads its encoder's outputs. Once a call has several, they are copied to
// slots, for as long as their requests run; a call reads the slots from the first to the last of
// its sources without copying them. The slots are as long as the longest source, rounded up; a
// source without a slot makes new buffers.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "runtime/ort_encoder.hpp"

namespace dsbd {

/// Cross rows of the sources that a call of the decoder reads; valid until the next call.
struct CallSources {
    std::vector<const std::byte*> memory;     // (B, H, N, D) in the order of `cross_tensors`
    std::size_t num_sources = 1, length = 0;  // B, N
    Ints lengths;                             // (B,): tokens of each
    Ints items;                               // which of the B each source of the call is
    CrossRowsPointer alone;                   // holds the memory of a source in no slot
};

/// The cross rows of the sources that calls read, those in slots and those kept by themselves.
class CrossSlots {
public:
    CrossSlots(OrtEncoder& encoder, const EncoderEntry& entry)
        : encoder_(encoder), tensors_(cross_tensors(entry)), token_bytes_(token_bytes(tensors_)) {}

    /// Return how many of these sources one call may have; beyond, some are read again.
    std::size_t most_together(std::span<const SourcePointer> sources) const;
    /// Return what a call of these distinct sources reads; throws as OrtEncoder::cross_rows.
    CallSources of_call(std::span<const SourcePointer> sources);
    /// Read a source, unless it is kept.
    void read(const SourcePointer& source) {
        if (slot_of(source) == slots_.size()) encoder_.cross_rows(source);
    }
    /// Let the slot of a source be used for others.
    void release(const Source& source);
    /// Drop the rows of all sources.
    void forget();
    std::size_t num_bytes() const { return slots_.size() * length_ * token_bytes_; }

private:
    std::size_t slot_of(const SourcePointer& source) const;
    void arrange(std::span<const SourcePointer> sources);

    OrtEncoder& encoder_;
    std::vector<CrossTensor> tensors_;
    std::size_t token_bytes_;
    std::vector<std::vector<std::byte>> buffers_;  // (slots, H, length, D) of each tensor
    std::size_t length_ = 0;                       // tokens of a slot
    std::vector<CrossRowsPointer> slots_;          // what was copied; null: released
};

}  // namespace dsbd
