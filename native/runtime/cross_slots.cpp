// Slots of sources in one buffer: filled, freed and moved.
#include "runtime/cross_slots.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

namespace dsbd {

namespace {

constexpr std::size_t STEP = 16;  // tokens: a slightly longer source needs no other buffers

std::size_t rounded(std::size_t length) { return (length + STEP - 1) / STEP * STEP; }

}  // namespace

std::size_t CrossSlots::most_together(std::span<const SourcePointer> sources) const {
    std::size_t longest = 1;
    for (const auto& each : sources) longest = std::max(longest, each->token_ids().size());
    return std::clamp<std::size_t>(MOST_SOURCE_BYTES / (rounded(longest) * token_bytes_), 1,
                                   MOST_SOURCES);
}

CallSources CrossSlots::of_call(std::span<const SourcePointer> sources) {
    CallSources found;
    const auto has_no_slot = [&](auto& source) { return slot_of(source) == slots_.size(); };
    if (sources.size() == 1 && has_no_slot(sources[0])) {
        found.alone = encoder_.cross_rows(sources[0]);
        found.memory = found.alone->memory();
        found.length = found.alone->num_tokens;
        found.lengths = {static_cast<std::int64_t>(found.length)};
        found.items = {0};
        return found;
    }
    const auto num_unused = std::count(slots_.begin(), slots_.end(), nullptr);
    const bool are_wasteful = 2 * static_cast<std::size_t>(num_unused) > slots_.size();
    if (are_wasteful || std::ranges::any_of(sources, has_no_slot)) arrange(sources);
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
    for (std::size_t slot = first; slot < stop; ++slot) {
        const std::size_t length = slots_[slot] ? slots_[slot]->num_tokens : 1;
        found.lengths.push_back(static_cast<std::int64_t>(length));
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
        const std::size_t size = tensors_[i].num_heads * length_ * tensors_[i].row_bytes;
        found.memory.push_back(buffers_[i].data() + first * size);
    }
    return found;
}

void CrossSlots::release(const Source& source) {
    for (auto& slot : slots_) {
        if (slot && slot->source.get() == &source) slot = nullptr;
    }
}

void CrossSlots::forget() {
    buffers_.clear();
    slots_.clear();
    encoder_.forget();
}

/// Return the slot of a source, the number of slots without one.
std::size_t CrossSlots::slot_of(const SourcePointer& source) const {
    const auto is_it = [&](auto& slot) { return slot && slot->source == source; };
    return static_cast<std::size_t>(std::ranges::find_if(slots_, is_it) - slots_.begin());
}

/// Make slots for the sources of a call and for all live ones, if the memory suffices.
void CrossSlots::arrange(std::span<const SourcePointer> sources) {
    std::vector<CrossRowsPointer> of_call, live;
    for (const SourcePointer& source : sources) {
        const std::size_t slot = slot_of(source);
        of_call.push_back(slot < slots_.size() ? slots_[slot] : encoder_.cross_rows(source));
    }
    std::ranges::copy_if(slots_, std::back_inserter(live),
                         [](auto& each) { return each != nullptr; });
    for (const CrossRowsPointer& rows : of_call) {
        if (slot_of(rows->source) == slots_.size()) live.push_back(rows);
    }
    const auto length_for = [](const std::vector<CrossRowsPointer>& all) {
        std::size_t longest = 0;
        for (const auto& rows : all) longest = std::max(longest, rows->num_tokens);
        return rounded(longest);
    };
    const std::size_t num_bytes = live.size() * length_for(live) * token_bytes_;
    if (live.size() > MOST_SOURCES || num_bytes > MOST_SOURCE_BYTES) live = std::move(of_call);
    const std::size_t length = length_for(live);
    std::vector<std::vector<std::byte>> buffers;
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
        const std::vector<const std::byte*> memory = live[slot]->memory();
        for (std::size_t i = 0; i < tensors_.size(); ++i) {
            const std::size_t num_heads = tensors_[i].num_heads, bytes = tensors_[i].row_bytes;
            const std::size_t used = live[slot]->num_tokens * bytes;
            for (std::size_t head = 0; head < num_heads; ++head) {
                std::memcpy(buffers[i].data() + (slot * num_heads + head) * length * bytes,
                            memory[i] + head * used, used);
            }
        }
    }
    buffers_ = std::move(buffers);
    slots_ = std::move(live);
    length_ = length;
}

}  // namespace dsbd
