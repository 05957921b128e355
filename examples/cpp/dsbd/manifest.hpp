// dsbd.json of a bundle: what a host must know of its engines, checked. See docs/bundle.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include <nlohmann/json.hpp>

#include "error.hpp"
#include "kv_cache.hpp"

namespace dsbd {

struct ModelEntry {
    std::filesystem::path model_file;
    std::uintmax_t weight_bytes;                 // of the file next to it, 0 without one
    std::size_t vocab_size;
    std::size_t context_length;
    std::set<std::int64_t> eos_token_ids;
    std::vector<CacheEntry> caches;
    std::string quantization;
    std::size_t num_candidates;                  // K of "topk:K", 0 of "full"
    std::vector<std::string> masks;              // the mask inputs of the graph
    std::optional<std::size_t> sliding_window;
};

struct Bundle {
    ModelEntry target;
    std::optional<ModelEntry> draft;             // not in a bundle for strategies without one
};

constexpr int schema_version = 4;
constexpr int oldest_version = 2;                // 2 and 3 have one `kv` for all layers

inline const std::set<std::string> manifest_fields{"schema_version", "versions", "target",
                                                   "draft", "files"};
inline const std::set<std::string> entry_fields{
    "family", "vocab_size", "bos_token_id", "eos_token_ids", "context_length", "num_layers", "caches", "dtype",
    "quantization", "logits", "full_logits", "bit_exact", "masks", "sliding_window", "parity",
    "unread_inputs",  // text is all that a host has
    "adapter", "native_text"};  // for people, and for hosts that read text

/// Refuse what only a later version knows: a field that is null says that the bundle lacks it.
inline void check_fields(const nlohmann::json& object, const std::set<std::string>& known,
                         const std::string& where) {
    for (const auto& [name, value] : object.items()) {
        if (known.count(name) == 0 && !value.is_null()) {
            throw Error(where + " has " + name + ", which this host does not know; use the host " +
                        "of the version of dsbd-ort that made the bundle");
        }
    }
}

inline std::size_t positive(const nlohmann::json& entry, const char* name,
                            const std::filesystem::path& file) {
    const nlohmann::json& value = entry.at(name);
    constexpr std::uint64_t most = (std::uint64_t{1} << 31) - 1;
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() - 1 >= most) {
        throw Error(file.string() + ": " + name + " is " + value.dump() + ", expected 1 to " +
                    std::to_string(most) + "; export the bundle again");
    }
    return value.get<std::size_t>();
}

inline std::size_t num_candidates_of(const std::string& logits, std::size_t vocab_size,
                                     const std::filesystem::path& file) {
    if (logits == "full") {
        return 0;
    }
    const std::string prefix = "topk:";
    const std::string digits = logits.substr(logits.rfind(prefix, 0) == 0 ? prefix.size() : 0);
    const bool is_number = !digits.empty() && digits.size() < 10 && digits[0] != '0' &&
                           digits.find_first_not_of("0123456789") == std::string::npos;
    if (digits.size() == logits.size() || !is_number || std::stoul(digits) > vocab_size) {
        throw Error(file.string() + ": logits is '" + logits +
                    "', expected full or topk:K with K from 1 to " + std::to_string(vocab_size) +
                    "; export the bundle again");
    }
    return std::stoul(digits);
}

inline void check_masks(const ModelEntry& entry, const std::filesystem::path& file) {
    const std::set<std::string> names(entry.masks.begin(), entry.masks.end());
    const std::set<std::string> known{"attention_mask", "attention_mask_sliding"};
    bool is_known = !names.empty() && names.size() == entry.masks.size();
    for (const std::string& name : names) {
        is_known = is_known && known.count(name) != 0;
    }
    if (!is_known ||
        (names.count("attention_mask_sliding") != 0) != entry.sliding_window.has_value()) {
        throw Error(file.string() + ": masks and sliding_window contradict each other or name an " +
                    "unknown mask; export the bundle again");
    }
}

inline CacheEntry cache_of(const nlohmann::json& json, const std::filesystem::path& file) {
    const nlohmann::json kind = json.contains("kind") ? json.at("kind") : nlohmann::json();
    if (kind != "attention rows") {
        throw Error(file.string() + " has a cache of kind " + kind.dump() +
                    ": the model does not attend in all layers, which this host does not run; " +
                    "use dsbd-run or the C library");
    }
    check_fields(json, {"kind", "layer", "num_heads", "key_width", "value_width", "dtype"},
                 file.string() + ": a cache");
    return {json.at("layer").get<std::size_t>(), positive(json, "num_heads", file),
            positive(json, "key_width", file), positive(json, "value_width", file),
            json.at("dtype").get<std::string>()};
}

/// Return the caches of an entry, which versions 2 and 3 describe by one shape for all layers.
inline std::vector<CacheEntry> caches_of(const nlohmann::json& entry, int version,
                                         const std::filesystem::path& file) {
    std::vector<CacheEntry> caches;
    if (version >= 4) {
        for (const nlohmann::json& cache : entry.at("caches")) {
            caches.push_back(cache_of(cache, file));
        }
        return caches;
    }
    const nlohmann::json& kv = entry.at("kv");
    const std::size_t width = positive(kv, "head_dim", file);
    const std::size_t num_layers = positive(kv, "num_layers", file);
    for (std::size_t layer = 0; layer < num_layers; ++layer) {
        caches.push_back({layer, positive(kv, "num_heads", file), width, width,
                          kv.at("dtype").get<std::string>()});
    }
    return caches;
}

inline ModelEntry entry_of(const nlohmann::json& manifest, const std::string& role,
                           const std::filesystem::path& folder) {
    const std::filesystem::path file = folder / "dsbd.json";
    const nlohmann::json& json = manifest.at(role);
    const int version = manifest.at("schema_version").get<int>();
    std::set<std::string> known = entry_fields;
    if (version < 4) {
        known.insert("kv");
    }
    check_fields(json, known, file.string() + ": " + role);
    const nlohmann::json& files = manifest.at("files");
    const std::string weights = role + "/model.onnx.data";
    ModelEntry entry;
    entry.model_file = folder / role / "model.onnx";
    entry.weight_bytes =
        files.contains(weights) ? files.at(weights).at("size").get<std::uintmax_t>() : 0;
    entry.vocab_size = positive(json, "vocab_size", file);
    entry.context_length = positive(json, "context_length", file);
    entry.eos_token_ids = json.at("eos_token_ids").get<std::set<std::int64_t>>();
    entry.caches = caches_of(json, version, file);
    entry.quantization = json.at("quantization").get<std::string>();
    entry.num_candidates =
        num_candidates_of(json.at("logits").get<std::string>(), entry.vocab_size, file);
    entry.masks = json.at("masks").get<std::vector<std::string>>();
    if (!json.at("sliding_window").is_null()) {
        entry.sliding_window = positive(json, "sliding_window", file);
    }
    check_masks(entry, file);
    return entry;
}

/// Refuse files that are missing, cut or outside of the bundle.
inline void check_files(const nlohmann::json& files, const std::filesystem::path& folder,
                        bool has_draft) {
    std::vector<std::string> needed{"target/model.onnx"};
    if (has_draft) {
        needed.push_back("draft/model.onnx");
    }
    for (const std::string& name : needed) {
        if (!files.contains(name)) {
            throw Error("dsbd.json of " + folder.string() + " lists no " + name +
                        "; export the bundle again");
        }
    }
    for (const auto& [name, file] : files.items()) {
        const std::filesystem::path path(name);
        for (const std::filesystem::path& part : path) {
            if (path.is_absolute() || part == "..") {
                throw Error("dsbd.json of " + folder.string() + " names " + name +
                            ", a file outside the bundle; refused");
            }
        }
        std::error_code error;
        const std::uintmax_t size = std::filesystem::file_size(folder / path, error);
        const auto expected = file.at("size").get<std::uintmax_t>();
        if (error || size != expected) {
            throw Error((folder / path).string() + " has " +
                        (error ? "no" : std::to_string(size)) + " bytes, the manifest says " +
                        std::to_string(expected) + "; copy the whole bundle or export again");
        }
    }
}

inline Bundle bundle_of(const nlohmann::json& manifest, const std::filesystem::path& folder) {
    const std::string file = (folder / "dsbd.json").string();
    const nlohmann::json& found = manifest.at("schema_version");
    if (!found.is_number_integer() || found < oldest_version || found > schema_version) {
        throw Error(file + " has schema_version " + found.dump() + ", this host reads " +
                    std::to_string(oldest_version) + " to " + std::to_string(schema_version) +
                    "; export again with the version of dsbd-ort that it came with");
    }
    check_fields(manifest, manifest_fields, file);
    const bool has_draft = !manifest.at("draft").is_null();
    check_files(manifest.at("files"), folder, has_draft);
    if (!has_draft) {
        return {entry_of(manifest, "target", folder), std::nullopt};
    }
    for (const char* field : {"vocab_size", "bos_token_id", "eos_token_ids"}) {
        const nlohmann::json& target = manifest.at("target").at(field);
        const nlohmann::json& draft = manifest.at("draft").at(field);
        if (target != draft) {
            throw Error(std::string("target and draft differ in ") + field + ": " + target.dump() +
                        " and " + draft.dump() + "; export a pair that shares its tokenizer");
        }
    }
    return {entry_of(manifest, "target", folder), entry_of(manifest, "draft", folder)};
}

/// Read and check the bundle in `folder`.
inline Bundle open_bundle(const std::filesystem::path& folder) {
    const std::filesystem::path path = folder / "dsbd.json";
    std::ifstream file(path);
    if (!file) {
        throw Error("cannot read " + path.string() + "; make a bundle with dsbd-export");
    }
    try {
        return bundle_of(nlohmann::json::parse(file), folder);
    } catch (const nlohmann::json::exception& error) {
        throw Error(path.string() + " is not what dsbd-export writes (" + error.what() +
                    "); copy the bundle or export again");
    }
}

}  // namespace dsbd
