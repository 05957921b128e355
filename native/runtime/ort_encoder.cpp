// A call of the encoder, and the cross rows that it returns.
#include "runtime/ort_encoder.hpp"

#include <algorithm>

#include "request.hpp"

namespace dsbd {

namespace {

constexpr auto INPUT = BoundTensor::Way::input;
constexpr auto OUTPUT = BoundTensor::Way::output;
constexpr auto ANY = BoundTensor::ANY;
constexpr const char *SOURCE_IDS = "source_ids", *HIDDEN_STATES = "hidden_states";

std::size_t number_bytes(const CacheEntry& rows) { return rows.dtype == "fp32" ? 4 : 2; }

ONNXTensorElementDataType type_of(const CacheEntry& rows) {
    return rows.dtype == "fp32" ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
                                : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
}

BoundTensor hidden_tensor(BoundTensor::Way way, const EncoderEntry& entry) {
    return BoundTensor(way, HIDDEN_STATES, type_of(entry.cross[0]),
                       {1, ANY, static_cast<std::int64_t>(*entry.hidden_width)});
}

}  // namespace

std::vector<CrossTensor> cross_tensors(const EncoderEntry& entry) {
    std::vector<CrossTensor> found;
    for (const CacheEntry& rows : entry.cross) {
        for (const CachePart& part : rows.parts) {
            const std::string name = "cross." + std::to_string(rows.layer) + "." + part.name;
            const std::vector<std::int64_t> dims{ANY, static_cast<std::int64_t>(part.num_heads),
                                                 ANY, static_cast<std::int64_t>(part.width)};
            found.push_back({BoundTensor(INPUT, name, type_of(rows), dims), part.num_heads,
                             part.width * number_bytes(rows)});
        }
    }
    return found;
}

std::size_t token_bytes(const std::vector<CrossTensor>& tensors) {
    std::size_t bytes = 0;
    for (const CrossTensor& each : tensors) bytes += each.num_heads * each.row_bytes;
    return bytes;
}

std::vector<const std::byte*> CrossRows::memory() const {
    std::vector<const std::byte*> found;
    for (const Ort::Value& value : values) {
        found.push_back(static_cast<const std::byte*>(value.GetTensorRawData()));
    }
    return found;
}

OrtEncoder::OrtEncoder(const Ort::Env& env, const std::filesystem::path& file,
                       const ModelEntry& entry, const EngineSettings& settings, OrtEncoder* target)
    : file_(file),
      session_(open_graph(env, file, entry, settings)),
      shared_(entry.encoder->is_shared ? target : nullptr),
      input_(shared_
                 ? hidden_tensor(INPUT, *entry.encoder)
                 : BoundTensor(INPUT, SOURCE_IDS, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, {1, ANY})),
      token_bytes_(token_bytes(cross_tensors(*entry.encoder))) {
    const EncoderEntry& encoder = *entry.encoder;
    std::vector<BoundTensor> outputs;
    for (const CrossTensor& each : cross_tensors(encoder)) {
        std::vector<std::int64_t> dims = each.tensor.dims();
        dims[0] = 1;
        outputs.emplace_back(OUTPUT, each.tensor.name(), each.tensor.type(), dims);
        output_names_.push_back(each.tensor.name());
    }
    if (encoder.hidden_width && !shared_) outputs.push_back(hidden_tensor(OUTPUT, encoder));
    std::vector<const BoundTensor*> tensors{&input_};
    for (const BoundTensor& output : outputs) tensors.push_back(&output);
    check_graph(file, session_, tensors);
    if (!shared_) return;
    shared_->output_names_.push_back(HIDDEN_STATES);
    shared_->token_bytes_ += *encoder.hidden_width * number_bytes(encoder.cross[0]);
}

CrossRowsPointer OrtEncoder::cross_rows(const SourcePointer& source) {
    const auto found =
        std::ranges::find(kept_, source, [](const CrossRowsPointer& each) { return each->source; });
    if (found != kept_.end()) {
        kept_.splice(kept_.end(), kept_, found);
    } else {
        kept_.push_back(read(source));
        num_tokens_ += kept_.back()->num_tokens;
    }
    while (kept_.size() > 1 && (kept_.size() > MOST_SOURCES || num_bytes() > MOST_SOURCE_BYTES)) {
        num_tokens_ -= kept_.front()->num_tokens;
        kept_.pop_front();
    }
    return kept_.back();
}

void OrtEncoder::forget() {
    kept_.clear();
    num_tokens_ = 0;
}

CrossRowsPointer OrtEncoder::read(const SourcePointer& source) {
    const std::span<const std::int64_t> ids = source->token_ids();
    const double began = seconds_now();
    CrossRowsPointer of_target;
    Ort::Value of_ids{nullptr};
    if (shared_) {
        of_target = shared_->cross_rows(source);
        shared_->take_reading();  // it is this one's
    } else {  // it is only read
        of_ids = input_.value_on(const_cast<std::int64_t*>(ids.data()), {ids.size()});
    }
    const double own_began = seconds_now();
    const char* const input_name = input_.name().c_str();
    const Ort::Value& input = of_target ? of_target->values.back() : of_ids;
    std::vector<const char*> names;
    for (const std::string& name : output_names_) names.push_back(name.c_str());
    CrossRows rows{source, ids.size(), {}};
    try {
        rows.values = session_.Run(Ort::RunOptions{nullptr}, &input_name, &input, 1, names.data(),
                                   names.size());
    } catch (const Ort::Exception& error) {
        throw_call_error(file_, std::to_string(ids.size()) + " tokens of a source", error);
    }
    for (const Ort::Value& value : rows.values) {  // [1, H, N, D], or hidden states [1, N, W]
        const auto dims = value.GetTensorTypeAndShapeInfo().GetShape();
        if (at(dims[dims.size() - 2]) == ids.size()) continue;
        throw Error(file_.string() + " does not return a row for each token; export again");
    }
    const double now = seconds_now();
    reading_ = SourceReading{ids.size(), now - began, now - own_began};
    return std::make_shared<CrossRows>(std::move(rows));
}

}  // namespace dsbd
