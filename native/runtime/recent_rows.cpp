// The states of recent rows in a call: bound, kept and grown.
#include "runtime/recent_rows.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace dsbd {

namespace {

constexpr auto INT64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr auto ANY = BoundTensor::ANY;
constexpr auto INPUT = BoundTensor::Way::input;
constexpr std::size_t STEP = 32;  // rows; a recurrent layer looks at all of them in every call
constexpr std::size_t USUALLY = 16 + 32 + 1;  // recent rows of a path

/// The capacity for so many recent rows: 32, 64, 96, ...
std::size_t recent_capacity(std::size_t num_rows) {
    return std::max<std::size_t>(1, (num_rows + STEP - 1) / STEP) * STEP;
}

/// Shapes of the states of a recurrent layer by the beginning of their names.
std::vector<std::pair<const char*, std::vector<std::size_t>>> states_of(const CacheEntry& entry) {
    const CachePart &key = entry.parts[0], &delta = entry.parts[1];
    return {{"state.", {delta.num_heads, key.width, delta.width}},
            {"state_decay.", {delta.num_heads, 2}}};
}

std::size_t product(const std::vector<std::size_t>& shape) {
    return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>());
}

}  // namespace

std::size_t path_bytes(const ModelEntry& entry) {
    std::size_t bytes = 0;
    for (const CacheEntry& cache : entry.caches) {
        if (cache.is_recent()) bytes += recent_capacity(USUALLY) * cache.row_bytes();
        if (!cache.is_recurrent()) continue;
        for (const auto& [name, shape] : states_of(cache)) bytes += 4 * product(shape);
    }
    return bytes;
}

RecentMemory::RecentMemory(const Ort::Env& env, const std::filesystem::path& folder,
                           const ModelEntry& entry, const EngineSettings& settings)
    : fold_file_(folder / "fold.onnx"), row_bytes_(0) {
    for (const CacheEntry& cache : entry.caches) {
        if (!cache.is_recent()) continue;
        row_bytes_ += cache.row_bytes();
        for (const CachePart& part : cache.parts) rows_.add(cache, part);
        if (!cache.is_recurrent()) continue;
        for (const auto& [name, shape] : states_of(cache)) {
            add_state(name + std::to_string(cache.layer), shape);
        }
    }
    rows_.resize(recent_capacity(0), 0);
    if (has_states()) fold_ = open_graph(env, fold_file_, entry, settings);
}

void RecentMemory::add_state(const std::string& name, std::vector<std::size_t> shape) {
    std::vector<std::int64_t> dims{ANY};
    dims.insert(dims.end(), shape.begin(), shape.end());
    const std::size_t size = product(shape);
    states_.push_back({BoundTensor(INPUT, name, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, dims), size,
                       std::vector<float>(size)});
}

std::vector<const BoundTensor*> RecentMemory::tensors() const {
    std::vector<const BoundTensor*> found = rows_.tensors();
    for (const State& state : states_) found.push_back(&state.tensor);
    return found;
}

void RecentMemory::bind(const NewRows& call, Binding& binding) {
    rows_.bind(binding);
    for (State& state : states_) {
        state.tensor.bind(binding, state.values.data() + call.first_checkpoint * state.size,
                          {call.num_checkpoints});
    }
}

std::size_t RecentMemory::num_bytes() const {
    std::size_t bytes = rows_.capacity() * row_bytes_;
    for (const State& state : states_) bytes += 4 * state.values.size();
    return bytes;
}

void RecentMemory::reserve(std::size_t num_rows, std::size_t num_used) {
    const std::size_t capacity = recent_capacity(num_rows);
    if (num_used == 0 || capacity > rows_.capacity()) rows_.resize(capacity, num_used);
}

/// A little room is left, so that it is not allocated again at once.
void RecentMemory::shrink(std::size_t num_used) {
    const std::size_t capacity = recent_capacity(num_used + 2 * STEP);
    if (num_used && capacity < rows_.capacity()) rows_.resize(capacity, num_used);
}

void RecentMemory::reserve_checkpoints(std::size_t number) {
    if (number == num_checkpoints_) return;
    try {
        for (State& state : states_) state.values.resize(number * state.size);
    } catch (const std::bad_alloc&) {
        throw CapacityError("no memory for the states of " + std::to_string(number) +
                            " paths; ask for fewer beams or fewer requests at a time");
    }
    num_checkpoints_ = number;
}

void RecentMemory::fold(const Ints& rows, std::size_t source, std::size_t target) {
    if (!fold_) return;  // convolutions alone have no state
    std::vector<std::string> names{"folded_rows"}, outputs;
    std::vector<Ort::Value> values;
    Ints folded = rows;
    BoundTensor folded_rows(INPUT, "folded_rows", INT64, {ANY});
    values.push_back(folded_rows.value_on(folded.data(), {folded.size()}));
    for (auto& [name, value] : rows_.inputs("recurrent_")) {
        names.push_back(name);
        values.push_back(std::move(value));
    }
    for (State& state : states_) {
        names.push_back(state.tensor.name());
        outputs.push_back("folded_" + state.tensor.name());
        values.push_back(state.tensor.value_on(state.values.data() + source * state.size, {1}));
    }
    std::vector<const char*> input_names, output_names;
    for (const std::string& name : names) input_names.push_back(name.c_str());
    for (const std::string& name : outputs) output_names.push_back(name.c_str());
    try {
        const auto found = fold_->Run(Ort::RunOptions{nullptr}, input_names.data(), values.data(),
                                      values.size(), output_names.data(), output_names.size());
        for (std::size_t i = 0; i < states_.size(); ++i) {
            State& state = states_[i];
            if (found[i].GetTensorTypeAndShapeInfo().GetElementCount() != state.size) {
                throw Error(fold_file_.string() + " returns a state of another size; export again");
            }
            std::copy_n(found[i].GetTensorData<float>(), state.size,
                        state.values.begin() + static_cast<std::ptrdiff_t>(target * state.size));
        }
    } catch (const Ort::Exception& error) {
        throw_call_error(fold_file_, std::to_string(rows.size()) + " rows", error);
    }
}

RecentRows::RecentRows(const Ort::Env& env, const std::filesystem::path& folder,
                       const ModelEntry& entry, const EngineSettings& settings)
    : num_ancestors_(entry.num_ancestors()),
      most_new_rows_(MAX_FORWARD_ROWS),
      memory_(env, folder, entry, settings),
      paths_(memory_, num_ancestors_),
      write_indices_(INPUT, "recent_write_indices", INT64, {1}),
      ancestors_(INPUT, "ancestors", INT64, {ANY, static_cast<std::int64_t>(num_ancestors_)}),
      mask_(INPUT, "recent_mask", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, {1, 1, ANY, ANY}),
      checkpoint_rows_(INPUT, "checkpoint_rows", INT64, {ANY, ANY}),
      row_places_(INPUT, "row_places", INT64, {ANY}),
      first_row_(1) {
    for (const CacheEntry& cache : entry.caches) {
        if (cache.is_recurrent()) most_new_rows_ = std::min(most_new_rows_, cache.most_new_rows);
    }
}

std::vector<const BoundTensor*> RecentRows::tensors() const {
    std::vector<const BoundTensor*> found = memory_.tensors();
    found.push_back(&write_indices_);
    if (num_ancestors_) found.push_back(&ancestors_);
    if (memory_.has_states()) {
        found.insert(found.end(), {&mask_, &checkpoint_rows_, &row_places_});
    }
    return found;
}

void RecentRows::run(const Call& call, const std::function<void(const Call&)>& run_call) {
    if (call.start == 0) paths_.truncate(call.first_row);
    paths_.prepare(call);
    paths_.compute_again(call, most_new_rows_, run_call);
    paths_.set_next(call);
    run_call(call);
    paths_.append_next(call);
}

void RecentRows::bind(const Call& call, Binding& binding) {
    NewRows& next = paths_.next;
    const std::size_t num_new = call.num_new(), capacity = memory_.capacity();
    memory_.bind(next, binding);
    first_row_[0] = static_cast<std::int64_t>(next.first_row);
    write_indices_.bind(binding, first_row_.data(), {});
    if (num_ancestors_) ancestors_.bind(binding, next.ancestors.data(), {num_new});
    if (!memory_.has_states()) return;
    mask_bytes_.assign(num_new * capacity, 0);
    for (std::size_t s = 0; s < num_new; ++s) {
        paths_.fill_mask(call, s, mask_bytes_.data() + s * capacity);
    }
    mask_.bind(binding, mask_bytes_.data(), {num_new, capacity});
    checkpoint_rows_.bind(
        binding, next.checkpoint_rows.data(),
        {next.num_checkpoints, next.checkpoint_rows.size() / next.num_checkpoints});
    row_places_.bind(binding, next.row_places.data(), {num_new});
}

}  // namespace dsbd
