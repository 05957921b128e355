// Encoder on ONNX Runtime, and the cross rows of the sources that it has read (ort_encoder.py).
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "forward.hpp"
#include "runtime/ort_graph.hpp"

namespace dsbd {

/// Most sources whose cross rows are kept, and most bytes of all but the last: the one that was
/// read longest ago goes, and is computed again if it is needed after all.
inline constexpr std::size_t MOST_SOURCES = 256, MOST_SOURCE_BYTES = std::size_t{1} << 30;

/// A cross tensor, [B, num_heads, N, width], as input of the decoder; bytes of a row of one head.
struct CrossTensor {
    BoundTensor tensor;
    std::size_t num_heads, row_bytes;
};

/// The cross tensors of an engine, in the order of its entry.
std::vector<CrossTensor> cross_tensors(const EncoderEntry& entry);
/// Bytes of all cross rows of a token.
std::size_t token_bytes(const std::vector<CrossTensor>& tensors);

/// The cross rows of one source as the decoder's graph takes them.
struct CrossRows {
    SourcePointer source;
    std::size_t num_tokens;
    std::vector<Ort::Value> values;  // (1, H, N, D) in the order of `cross_tensors`; then, if a
                                     // draft reads them, the hidden states (1, N, W)
    std::vector<const std::byte*> memory() const;
};
using CrossRowsPointer = std::shared_ptr<const CrossRows>;

/// The reading of a source: its tokens, the seconds that it took, and the engine's own of them: a
/// draft that shares the target's encoder may have the target read the source first.
struct SourceReading {
    std::size_t num_tokens;
    double seconds, own_seconds;
};

/// One encoder, which reads every source once as long as its cross rows are kept.
class OrtEncoder {
public:
    /// target: whose hidden states the graph reads, if the entry says that it is shared.
    OrtEncoder(const Ort::Env& env, const std::filesystem::path& file, const ModelEntry& entry,
               const EngineSettings& settings, OrtEncoder* target);

    /// Return the cross rows of a source, whose tokens were checked.
    CrossRowsPointer cross_rows(const SourcePointer& source);
    /// Return the last reading of a source, once.
    std::optional<SourceReading> take_reading() { return std::exchange(reading_, {}); }
    /// Drop all sources.
    void forget();
    std::size_t num_bytes() const { return num_tokens_ * token_bytes_; }

private:
    CrossRowsPointer read(const SourcePointer& source);

    std::filesystem::path file_;
    Ort::Session session_;
    OrtEncoder* shared_;  // null: it reads the source itself
    BoundTensor input_;
    std::vector<std::string> output_names_;
    std::size_t token_bytes_, num_tokens_ = 0;  // bytes of a token, tokens that are kept
    std::list<CrossRowsPointer> kept_;  // the latest used last
    std::optional<SourceReading> reading_;
};

}  // namespace dsbd
