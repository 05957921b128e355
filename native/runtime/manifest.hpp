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
#include "text/json_fields.hpp"
#include "text/text_checks.hpp"

namespace dsbd {

inline constexpr const char* ATTENTION_MASK = "attention_mask";
inline constexpr const char* ATTENTION_MASK_SLIDING = "attention_mask_sliding";

/// One tensor of a layer's cache: heads, and the numbers of each.
struct CachePart {
    std::string name;
    std::size_t num_heads, width;
};

/// The rows of one kind that a layer keeps (cache_entries.py).
struct CacheEntry {
    std::size_t layer = 0;
    std::string dtype, kind;  // fp32 or fp16; such as "attention rows"
    std::vector<CachePart> parts;
    std::size_t num_ancestors = 0;  // rows that a convolution reads besides a node's own
    std::size_t most_new_rows = 0;  // of one call, of a recurrence

    bool is_recent() const { return kind != "attention rows"; }
    bool is_recurrent() const { return kind == "recurrent rows"; }
    /// Bytes of one row.
    std::size_t row_bytes() const;
};

/// Hidden states that an engine returns, or that a feature draft reads.
struct FeatureEntry {
    std::size_t width = 0;  // of the target's
    std::vector<std::int64_t> layers;  // of a target: whose inputs they are
    std::optional<std::size_t> own_width;  // of a feature draft's own; none: a target's entry
};

/// Encoder of an encoder-decoder, whose other fields are for its decoder.
struct EncoderEntry {
    std::size_t vocab_size = 0, context_length = 0;  // of sources: their tokens, the most of one
    std::int64_t start_token_id = 0;  // that every target begins with
    std::vector<CacheEntry> cross;  // rows of the decoder layers that read the source
    bool reads_positions = false;  // whether the decoder's graph has the input `row_positions`
    std::map<std::string, std::int64_t> languages;  // token by name; empty: it has no languages
    std::optional<std::int64_t> unknown_token_id;  // for tokens of sources beyond `vocab_size`
    std::optional<std::size_t> hidden_width;  // of hidden states that its graph returns or reads
    bool is_shared = false;  // a draft's, which reads those of the target's
};

/// Manifest entry of one engine.
struct ModelEntry {
    std::string family, dtype, quantization;
    std::string form = "portable";  // operators of the graphs
    std::size_t vocab_size = 0, context_length = 0;
    std::optional<std::int64_t> bos_token_id;
    std::vector<std::int64_t> eos_token_ids;
    std::vector<CacheEntry> caches;
    std::size_t num_top_logits = 0;  // K of a top-k head, 0: all logits
    bool full_logits = true;  // whether the graph has the output `logits`
    bool has_mask = true, has_sliding_mask = false;
    std::size_t sliding_window = 0;  // positions that it leaves visible
    std::optional<FeatureEntry> features;
    std::optional<EncoderEntry> encoder;  // none: it reads no source
    std::optional<TextVerdict> native_text;  // of the target in bundles without text_checks.json
    std::optional<double> agreement;  // how often a draft's best token is the target's

    EngineSpec spec() const;
    /// Bytes of one row of the caches that keep every row.
    std::size_t row_bytes() const;
    /// Most rows that a convolution reads besides a node's own; 0 without any.
    std::size_t num_ancestors() const;
    /// Whether layers keep recent rows alone: convolutions and recurrences.
    bool keeps_recent_rows() const;
};

/// An opened bundle: its folder and the content of its manifest.
struct Bundle {
    std::filesystem::path path;
    ModelEntry target;
    std::optional<ModelEntry> draft;
    std::map<std::string, std::uintmax_t> size_by_file;
    Json content;  // of dsbd.json

    /// Most tokens of a prompt and its answer: of the target, and of a draft that reads all of
    /// them.
    std::size_t context_length() const;
    std::filesystem::path model_path(const char* role) const { return path / role / "model.onnx"; }
    std::filesystem::path prune_path(const char* role) const { return path / role / "prune.onnx"; }
    const ModelEntry& entry(const std::string& role) const {
        return role == "target" ? target : *draft;
    }
};

/// Refuse a bundle because of a part that is not native.
[[noreturn]] void refuse(const std::string& where, const std::string& reason);
/// A list of caches, in the order of their layers.
std::vector<CacheEntry> cache_list_of(const JsonObject& entry, const char* name,
                                      std::size_t num_layers, const Json& made_by);

/// Read and check the bundle in `folder`, as Python's `open_bundle`: that every file is there with
/// its size, that no other would be read, and that draft and target agree. Error names the problem
/// and its fix; a bundle with parts that the native library does not run is refused by their name.
Bundle open_bundle(const std::filesystem::path& folder);

}  // namespace dsbd
