#include "runtime/cross_slots.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

namespace dsbd {

namespace {

constexpr std::size_t STEP = 16;  // tokens: a slightly longer source needs no other buffers

std::size_t rounded(std::size_t length) { return (length + STEP - 1) / STEP * STEP; }

std::size_t longest_of(std::span<const SourcePointer> sources) {
    std::size_t longest = 1;
    for (const auto& each : sources) longest = std::max(longest, each->token_ids().size());
    return rounded(longest);
}

}  // namespace

CrossSlots::CrossSlots(OrtEncoder& encoder, const EncoderEntry& entry)
    : encoder_(encoder), tensors_(cross_tensors(entry)), token_bytes_(token_bytes(tensors_)) {}

std::size_t CrossSlots::most_together(std::span<const SourcePointer> sources) const {
    const std::size_t most = MOST_SOURCE_BYTES / (longest_of(sources) * token_bytes_);
    return std::clamp<std::size_t>(most, 1, MOST_SOURCES);
}

CallSources CrossSlots::of_call(std::span<const SourcePointer> sources) {
    CallSources found;
    if (sources.size() == 1 && slot_of(sources[0]) == slots_.size()) {
        found.alone = encoder_.cross_rows(sources[0]);
        found.memory = found.alone->memory();
        found.length = found.alone->num_tokens;
        found.lengths = {static_cast<std::int64_t>(found.length)};
        found.items = {0};
        return found;
    }
    const bool lacks_one = std::ranges::any_of(sources, [&](const SourcePointer& source) {
        return slot_of(source) == slots_.size();
    });
    const std::size_t num_released = static_cast<std::size_t>(
        std::count(slots_.begin(), slots_.end(), nullptr));
    if (lacks_one || 2 * num_released > slots_.size()) arrange(sources);
    std::size_t first = slots_.size(), stop = 0;
    for (const SourcePointer& source : sources) {
        const std::size_t slot = slot_of(source);
        found.items.push_back(static_cast<std::int64_t>(slot));
        first = std::min(first, slot);
        stop = std::max(stop, slot + 1);
    }
    for (std::int64_t& item : found.items) item -= static_cast<std::int64_t>(first);
    found.num_sources = stop - first;
    found.length = length_;
    found.lengths.assign(lengths_.begin() + static_cast<std::ptrdiff_t>(first),
                         lengths_.begin() + static_cast<std::ptrdiff_t>(stop));
    found.memory = rows_in(first).memory;
    return found;
}

void CrossSlots::release(const Source& source) {
    for (SourcePointer& slot : slots_) {
        if (slot.get() == &source) slot = nullptr;
    }
}

void CrossSlots::forget() {
    buffers_.clear();
    lengths_.clear();
    slots_.clear();
    encoder_.forget();
}

/// Return the slot of a source, the number of slots without one.
std::size_t CrossSlots::slot_of(const SourcePointer& source) const {
    return static_cast<std::size_t>(std::find(slots_.begin(), slots_.end(), source) -
                                    slots_.begin());
}

CrossSlots::Rows CrossSlots::rows_in(std::size_t slot) const {
    Rows found{at(lengths_[slot]), length_, {}};
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
        const std::size_t size = tensors_[i].num_heads * length_ * tensors_[i].row_bytes;
        found.memory.push_back(buffers_[i].data() + slot * size);
    }
    return found;
}

/// Make slots for the sources of a call and for all live ones, if the memory suffices.
void CrossSlots::arrange(std::span<const SourcePointer> sources) {
    std::vector<SourcePointer> live;
    std::ranges::copy_if(slots_, std::back_inserter(live), [](auto& each) { return each != nullptr; });
    for (const SourcePointer& source : sources) {
        if (slot_of(source) == slots_.size()) live.push_back(source);
    }
    if (live.size() > most_together(live)) live.assign(sources.begin(), sources.end());
    const std::size_t length = longest_of(live);
    std::vector<std::vector<std::byte>> buffers;
    Ints lengths;
    try {
        for (const CrossTensor& each : tensors_) {  // padding is finite numbers too
            buffers.emplace_back(live.size() * each.num_heads * length * each.row_bytes);
        }
    } catch (const std::bad_alloc&) {
        throw CapacityError("no memory for the rows of " + std::to_string(live.size()) +
                            " sources of up to " + std::to_string(length) +
                            " tokens; run fewer requests at a time");
    }
    for (std::size_t slot = 0; slot < live.size(); ++slot) {
        CrossRowsPointer read;  // holds the memory
        Rows rows;
        if (const std::size_t old = slot_of(live[slot]); old < slots_.size()) {
            rows = rows_in(old);
        } else {
            read = encoder_.cross_rows(live[slot]);
            rows = {read->num_tokens, read->num_tokens, read->memory()};
        }
        lengths.push_back(static_cast<std::int64_t>(rows.num_tokens));
        for (std::size_t i = 0; i < tensors_.size(); ++i) {
            const std::size_t num_heads = tensors_[i].num_heads, bytes = tensors_[i].row_bytes;
            for (std::size_t head = 0; head < num_heads; ++head) {
                std::memcpy(buffers[i].data() + (slot * num_heads + head) * length * bytes,
                            rows.memory[i] + head * rows.stride * bytes, rows.num_tokens * bytes);
            }
        }
    }
    buffers_ = std::move(buffers);
    lengths_ = std::move(lengths);
    slots_ = std::move(live);
    length_ = length;
}

}  // namespace dsbd
