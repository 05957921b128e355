// Sources: encoder outputs of texts, which the rows of a decoder read (sources.py, and
// encoder_entry.py has the table of tensors).
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "runtime/cross_slots.hpp"
#include "runtime/part.hpp"

namespace dsbd {

/// The rows of each of the B items of a call, (B, P), and where each row is in them, (S,).
struct RowsOfItems {
    Ints rows, places;
    std::size_t num_places = 0;  // P
};

/// With items [1, 0, 1] of two: rows [[1, 0], [0, 2]], the second of which is padding, and places
/// [2, 0, 3].
RowsOfItems places_of_rows(const Ints& items, std::size_t num_items);

/// The sources that an engine's calls read. The encoder runs once a source.
class Sources final : public Part {
public:
    /// target: the part of the target, for a draft that shares its encoder; else null.
    Sources(const Ort::Env& env, const std::filesystem::path& folder, const ModelEntry& entry,
            const EngineSettings& settings, Sources* target);

    std::vector<const BoundTensor*> tensors() const override;
    void begin(const Forward& forward) override;
    void bind(const Call& call, Binding& binding) override;
    void reserve(std::size_t num_rows, std::size_t num_used) override;
    void finish(ForwardResult& result) override;

    /// Return where a call from row `start` on ends, so that its sources fit the memory.
    std::size_t end_of_call(const Forward& forward, std::size_t start, std::size_t stop) const;
    CrossSlots& slots() { return slots_; }
    std::size_t num_bytes() const { return encoder_.num_bytes() + slots_.num_bytes(); }

private:
    OrtEncoder encoder_;
    CrossSlots slots_;
    std::vector<CrossTensor> tensors_;
    BoundTensor source_rows_, source_places_, source_lengths_;
    CallSources found_;  // of the call
    RowsOfItems rows_;
    std::optional<SourceReading> reading_;  // of the forward
};

}  // namespace dsbd
