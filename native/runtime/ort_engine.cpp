// A call of a language model: its parts bind, it runs, the head collects.
#include "runtime/ort_engine.hpp"

#include <algorithm>
#include <chrono>

#include "runtime/device_rows.hpp"
#include "runtime/features.hpp"
#include "runtime/head.hpp"
#include "runtime/prepared_engine.hpp"

namespace dsbd {

namespace {

void check_below(const char* name, const Ints& numbers, std::size_t stop) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        if (static_cast<std::uint64_t>(numbers[i]) >= stop) {  // a negative number is a huge one
            throw Error(std::string(name) + "[" + std::to_string(i) + "] is " +
                        std::to_string(numbers[i]) + ", expected 0 to " + std::to_string(stop - 1));
        }
    }
}

/// The device of an engine, null for the processor; Error: it does not run the engine.
std::shared_ptr<Device> device_of(const ModelEntry& entry, const std::filesystem::path& file,
                                  const EngineSettings& settings) {
    if (settings.device) return settings.device;
    check_runnable(*settings.placement.provider, entry, file);
    if (!settings.placement.is_device()) return nullptr;
    return std::make_shared<Device>(settings.placement, settings.provider_library);
}

}  // namespace

OrtEngine::OrtEngine(const Ort::Env& env, const Bundle& bundle, const std::string& role,
                     const EngineSettings& settings, const OrtEngine* target)
    : file_(bundle.model_path(role.c_str())),
      device_(device_of(bundle.entry(role), file_, settings)),
      recording_{settings.captures.value_or(true) &&
                 !settings.placement.provider->capture_option.empty()},
      session_(open(env, bundle, role, settings)) {
    const ModelEntry& entry = bundle.entry(role);
    spec_ = entry.spec();
    row_bytes_ = entry.row_bytes();
    if (spec_.returns_features) parts_.push_back(std::make_unique<FeaturesOfTarget>(entry));
    if (spec_.reads_features) parts_.push_back(std::make_unique<FeaturesOfDraft>(entry));
    if (spec_.reads_source) {
        auto sources = std::make_unique<Sources>(env, file_.parent_path(), entry, settings,
                                                 target ? target->sources_ : nullptr);
        sources_ = sources.get();
        parts_.push_back(std::move(sources));
    }
    auto rows = std::make_unique<Rows>(entry, row_memory(bundle, role, settings));
    rows_ = rows.get();
    parts_.push_back(std::move(rows));
    parts_.push_back(std::make_unique<Head>(entry));
    if (entry.keeps_recent_rows()) {
        auto recent = std::make_unique<RecentRows>(env, file_.parent_path(), entry, settings);
        recent_ = recent.get();
        parts_.push_back(std::move(recent));
    }
    std::vector<const BoundTensor*> tensors;
    for (const auto& part : parts_) {
        for (const BoundTensor* tensor : part->tensors()) tensors.push_back(tensor);
    }
    check_graph(file_, session_, tensors);
    reset_peak();
}

OrtEngine::~OrtEngine() {
    if (!device_) return;
    const auto turn = Device::turn();
    device_->wait();  // a process may end next, and its queue must be empty then
    parts_.clear();  // first, because calls of the binding have the memory of the parts
    binding_.reset();
    session_ = Ort::Session(nullptr);
}

Ort::Session OrtEngine::open(const Ort::Env& env, const Bundle& bundle, const std::string& role,
                             const EngineSettings& settings) const {
    if (device_) return device_->open(file_, recording_.is_on, settings.log_level);
    if (!settings.engine_cache.empty()) return open_prepared(env, bundle, role, settings);
    return open_graph(env, file_, bundle.entry(role), settings);
}

/// Make the binding, and the memory of the caches.
std::unique_ptr<RowMemory> OrtEngine::row_memory(const Bundle& bundle, const std::string& role,
                                                 const EngineSettings& settings) {
    const ModelEntry& entry = bundle.entry(role);
    if (!device_) {
        binding_ = std::make_unique<HostBinding>(session_);
        return host_rows(entry);
    }
    auto binding = std::make_unique<DeviceBinding>(device_, session_, true, &recording_);
    auto rows = std::make_unique<DeviceRows>(
        device_, entry,
        device_->open(bundle.prune_path(role.c_str()), recording_.is_on, settings.log_level),
        *binding, recording_);
    binding_ = std::move(binding);
    return rows;
}

void OrtEngine::expect(std::size_t num_rows) {
    if (!recording_.is_on || num_rows <= rows_->capacity()) return;
    try {
        reserve(num_rows, num_rows_);
    } catch (const CapacityError&) {  // the request may need fewer rows; the caches grow later
    }
}

ForwardResult OrtEngine::forward(const Forward& forward) {
    check(forward);
    const std::size_t stop = num_rows_ + forward.num_new();
    run_s_ = 0.0;
    sets_up_ = false;
    for (const auto& part : parts_) part->begin(forward);
    if (num_rows_ == 0 || stop > rows_->capacity()) reserve(stop, num_rows_);
    const std::size_t most_rows = recent_ ? recent_->most_new_rows() : MAX_FORWARD_ROWS;
    for (std::size_t start = 0, end = 0; start < forward.num_new(); start = end) {
        end = std::min(start + most_rows, forward.num_new());
        if (sources_) end = sources_->end_of_call(forward, start, end);
        const Call call{forward, start, end, num_rows_ + start};
        if (recent_) {
            recent_->run(call, [this](const Call& each) { run(each); });
        } else {
            run(call);
        }
    }
    num_rows_ = stop;
    ForwardResult result;
    result.run_s = run_s_;
    result.sets_up = sets_up_;
    for (const auto& part : parts_) part->finish(result);
    return result;
}

void OrtEngine::keep(std::span<const std::int64_t> rows) {
    std::int64_t least = 0;
    for (const std::int64_t row : rows) {
        if (row < least || row >= static_cast<std::int64_t>(num_rows_)) {
            throw Error("cache row " + std::to_string(row) +
                        " is kept, expected increasing rows "
                        "below " +
                        std::to_string(num_rows_));
        }
        least = row + 1;
    }
    for (const auto& part : parts_) part->keep(rows);
    num_rows_ = rows.size();
    if (!num_rows_) reserve(0, 0);
}

void OrtEngine::check(const Forward& forward) const {
    const std::size_t num_new = forward.num_new();
    if (num_new == 0 || forward.positions.size() != num_new || forward.mask.num_rows() != num_new ||
        forward.mask.num_columns() != num_rows_ + num_new) {
        throw Error("a forward has " + std::to_string(num_new) + " token ids, " +
                    std::to_string(forward.positions.size()) + " positions and a mask of " +
                    std::to_string(forward.mask.num_rows()) + " x " +
                    std::to_string(forward.mask.num_columns()) +
                    "; expected as many, at least "
                    "one, and a column for each of the " +
                    std::to_string(num_rows_) + " cache rows and the new ones");
    }
    check_below("token_ids", forward.token_ids, spec_.vocab_size);
    check_below("logit_rows", forward.logit_rows, num_new);
    const auto highest = *std::max_element(forward.positions.begin(), forward.positions.end());
    if (highest >= static_cast<std::int64_t>(spec_.context_length)) {
        throw CapacityError("position " + std::to_string(highest) +
                            " does not fit, the model was "
                            "made for " +
                            std::to_string(spec_.context_length) +
                            " positions; "
                            "shorten the prompt or ask for fewer new tokens");
    }
    check_below("positions", forward.positions, spec_.context_length);
}

void OrtEngine::reserve(std::size_t num_rows, std::size_t num_used) {
    for (const auto& part : parts_) part->reserve(num_rows, num_used);
    kv_bytes_peak_ = std::max(kv_bytes_peak_, kv_bytes());
}

void OrtEngine::run(const Call& call) {
    const std::size_t stop = call.first_row + call.num_new();
    if (stop > rows_->capacity()) reserve(stop, call.first_row);  // rows that are computed again
    binding_->begin(call.num_new(), call.first_row, rows_->capacity());
    for (const auto& part : parts_) part->bind(call, *binding_);
    if (sources_) kv_bytes_peak_ = std::max(kv_bytes_peak_, kv_bytes());
    const bool gives_up_memory = rows_->has_shrunk();
    const auto began = std::chrono::steady_clock::now();
    try {
        binding_->run(gives_up_memory);
    } catch (const Ort::Exception& error) {
        throw_call_error(file_,
                         std::to_string(call.num_new()) + " rows from row " +
                             std::to_string(call.first_row) + " on, caches of " +
                             std::to_string(rows_->capacity()),
                         error);
    }
    run_s_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    sets_up_ |= binding_->has_set_up();
}

}  // namespace dsbd
