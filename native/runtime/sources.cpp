// The source of each row in a call, and the sources that an engine has read.
#include "runtime/sources.hpp"

#include <algorithm>

namespace dsbd {

namespace {

constexpr auto INT64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr auto ANY = BoundTensor::ANY;
constexpr auto INPUT = BoundTensor::Way::input;

/// Number of the source of a row among those of a forward.
std::size_t source_of(const Forward& forward, std::size_t row) {
    return forward.source_of_row.empty() ? 0 : at(forward.source_of_row[row]);
}

}  // namespace

RowsOfItems places_of_rows(const Ints& items, std::size_t num_items) {
    std::vector<std::size_t> counts(num_items);
    RowsOfItems found;
    for (const std::int64_t item : items) {
        found.num_places = std::max(found.num_places, ++counts[at(item)]);
    }
    found.rows.resize(num_items * found.num_places);
    std::fill(counts.begin(), counts.end(), 0);
    for (std::size_t s = 0; s < items.size(); ++s) {
        const std::size_t place = at(items[s]) * found.num_places + counts[at(items[s])]++;
        found.rows[place] = static_cast<std::int64_t>(s);
        found.places.push_back(static_cast<std::int64_t>(place));
    }
    return found;
}

Sources::Sources(const Ort::Env& env, const std::filesystem::path& folder, const ModelEntry& entry,
                 const EngineSettings& settings, Sources* target)
    : encoder_(env, folder / "encoder.onnx", entry, settings, target ? &target->encoder_ : nullptr),
      slots_(encoder_, *entry.encoder),
      tensors_(cross_tensors(*entry.encoder)),
      source_rows_(INPUT, "source_rows", INT64, {ANY, ANY}),
      source_places_(INPUT, "source_places", INT64, {ANY}),
      source_lengths_(INPUT, "source_lengths", INT64, {ANY}) {}

std::vector<const BoundTensor*> Sources::tensors() const {
    std::vector<const BoundTensor*> found{&source_rows_, &source_places_, &source_lengths_};
    for (const CrossTensor& each : tensors_) found.push_back(&each.tensor);
    return found;
}

void Sources::begin(const Forward& forward) {
    reading_.reset();
    if (!forward.sources.empty()) return;
    throw Error(
        "a forward has no source, but the engine is an encoder-decoder's: expected the "
        "tokens of its source");
}

std::size_t Sources::end_of_call(const Forward& forward, std::size_t start,
                                 std::size_t stop) const {
    const std::size_t most = slots_.most_together(forward.sources);
    std::vector<char> is_among(forward.sources.size());
    std::size_t number = 0;
    for (std::size_t row = start; row < stop; ++row) {
        char& is_known = is_among[source_of(forward, row)];
        if (!is_known && number++ == most) return row;
        is_known = 1;
    }
    return stop;
}

void Sources::bind(const Call& call, Binding& binding) {
    std::vector<SourcePointer> distinct;  // in the order of their first rows
    Ints items(call.num_new());
    std::vector<std::int64_t> number_of(call.forward.sources.size(), -1);
    for (std::size_t s = 0; s < items.size(); ++s) {
        const std::size_t source = source_of(call.forward, call.start + s);
        if (number_of[source] < 0) {
            number_of[source] = static_cast<std::int64_t>(distinct.size());
            distinct.push_back(call.forward.sources[source]);
        }
        items[s] = number_of[source];
    }
    found_ = slots_.of_call(distinct);
    for (std::int64_t& item : items) item = found_.items[at(item)];
    rows_ = places_of_rows(items, found_.num_sources);
    for (std::size_t i = 0; i < tensors_.size(); ++i) {  // the graph only reads them
        tensors_[i].tensor.bind(binding, const_cast<std::byte*>(found_.memory[i]),
                                {found_.num_sources, found_.length});
    }
    source_rows_.bind(binding, rows_.rows.data(), {found_.num_sources, rows_.num_places});
    source_places_.bind(binding, rows_.places.data(), {items.size()});
    source_lengths_.bind(binding, found_.lengths.data(), {found_.num_sources});
    if (const auto reading = encoder_.take_reading()) reading_ = reading;
}

void Sources::reserve(std::size_t num_rows, std::size_t) {
    if (!num_rows) slots_.forget();
}

void Sources::finish(ForwardResult& result) {
    if (!reading_) return;
    result.source_tokens = reading_->num_tokens;
    result.source_seconds = reading_->seconds;
    result.source_own_seconds = reading_->own_seconds;
}

}  // namespace dsbd
