// Content of dsbd.json (bundle_files/manifest.py): entries of engines, checked. See docs/bundle.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine.hpp"
#include "runtime/json_file.hpp"

namespace dsbd {

inline constexpr const char* ATTENTION_MASK = "attention_mask";
inline constexpr const char* ATTENTION_MASK_SLIDING = "attention_mask_sliding";

/// The rows of a layer that attends: a key and a value for each head.
struct AttentionRows {
    std::size_t layer = 0, num_heads = 0, key_width = 0, value_width = 0;
    std::string dtype;  // fp32 or fp16
};

/// Hidden states that an engine returns, or that a feature draft reads.
struct FeatureEntry {
    std::size_t width = 0;                 // of the target's
    std::vector<std::int64_t> layers;      // of a target: whose inputs they are
    std::optional<std::size_t> own_width;  // of a feature draft's own; none: a target's entry
};

/// Manifest entry of one engine.
struct ModelEntry {
    std::string family, dtype, quantization;
    std::size_t vocab_size = 0, context_length = 0;
    std::optional<std::int64_t> bos_token_id;
    std::vector<std::int64_t> eos_token_ids;
    std::vector<AttentionRows> caches;
    std::size_t num_top_logits = 0;  // K of a top-k head, 0: all logits
    bool full_logits = true;         // whether the graph has the output `logits`
    bool has_mask = true, has_sliding_mask = false;
    std::size_t sliding_window = 0;  // positions that it leaves visible
    std::optional<FeatureEntry> features;

    EngineSpec spec() const;
    /// Bytes of one row of the caches of all layers.
    std::size_t row_bytes() const;
};

/// An opened bundle: its folder and the content of its manifest.
struct Bundle {
    std::filesystem::path path;
    ModelEntry target;
    std::optional<ModelEntry> draft;
    std::map<std::string, std::uintmax_t> size_by_file;
    Json content;  // of dsbd.json
    bool has_native_text = false;  // whether native/text reads its tokenizer as Python does

    /// Number of positions that every model supports.
    std::size_t context_length() const;
    std::filesystem::path model_path(const char* role) const { return path / role / "model.onnx"; }
};

/// Read and check the bundle in `folder`, as Python's `open_bundle`: that every file is there with
/// its size, that no other would be read, and that draft and target agree. Error names the problem
/// and its fix; a bundle with parts that the native library does not run is refused by their name.
Bundle open_bundle(const std::filesystem::path& folder);

}  // namespace dsbd
