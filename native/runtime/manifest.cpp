// Reading dsbd.json: every field checked, older versions converted.
#include <algorithm>
#include <set>
#include <system_error>

#include "runtime/encoder_entry.hpp"

namespace dsbd {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t MOST_LAYERS = 10'000, MOST_ENTRIES = 10'000, MOST_POINTER_BYTES = 1024;
constexpr const char* USE_PYTHON = "; use dsbd-run, or libdsbd with Python (docs/embedding.md)";

CacheEntry cache_of(const JsonObject& entry, std::size_t num_layers, const Json& made_by) {
    CacheEntry cache;
    cache.kind = entry.one_of("kind", {"attention rows", "convolution rows", "recurrent rows"});
    cache.layer = entry.number("layer", num_layers - 1);
    cache.dtype = entry.one_of("dtype", {"fp32", "fp16"});
    if (cache.kind == "attention rows") {
        entry.check_known({"kind", "layer", "dtype", "num_heads", "key_width", "value_width"},
                          made_by);
        const std::size_t num_heads = entry.count("num_heads");
        cache.parts = {{"key", num_heads, entry.count("key_width")},
                       {"value", num_heads, entry.count("value_width")}};
    } else if (cache.kind == "convolution rows") {
        entry.check_known({"kind", "layer", "dtype", "width", "num_ancestors"}, made_by);
        cache.parts = {{"convolution", 1, entry.count("width")}};
        cache.num_ancestors = entry.count("num_ancestors");
    } else {
        entry.check_known({"kind", "layer", "dtype", "num_heads", "value_width", "num_key_heads",
                           "key_width", "most_new_rows"},
                          made_by);
        const std::size_t num_heads = entry.count("num_heads");
        cache.parts = {{"recurrent_key", entry.count("num_key_heads"), entry.count("key_width")},
                       {"recurrent_delta", num_heads, entry.count("value_width")},
                       {"recurrent_decay", num_heads, 2}};
        cache.most_new_rows = entry.count("most_new_rows");
    }
    return cache;
}

/// The caches of an entry, which versions 2 and 3 describe by one shape for all layers.
std::vector<CacheEntry> caches_of(const JsonObject& entry, bool is_older, const Json& made_by) {
    if (is_older) {
        std::vector<CacheEntry> caches;
        const JsonObject kv = entry.object("kv");
        const std::size_t num_heads = kv.count("num_heads"), width = kv.count("head_dim");
        for (std::size_t layer = 0; layer < kv.count("num_layers", MOST_LAYERS); ++layer) {
            caches.push_back({layer,
                              kv.one_of("dtype", {"fp32", "fp16"}),
                              "attention rows",
                              {{"key", num_heads, width}, {"value", num_heads, width}}});
        }
        return caches;
    }
    return cache_list_of(entry, "caches", entry.count("num_layers", MOST_LAYERS), made_by);
}

/// K of "topk:K", 0 of "full".
std::size_t num_top_logits_of(const JsonObject& entry, std::size_t vocab_size) {
    const std::string kind = entry.text("logits"),
                      digits = kind.substr(std::min(kind.find(':'), kind.size() - 1) + 1);
    if (kind == "full") return 0;
    if (kind == "gather") {
        throw Error(entry.where() +
                    " has a gather head, which this version no longer runs; export "
                    "the bundle again with --logits topk:64");
    }
    const bool is_number = kind.rfind("topk:", 0) == 0 && !digits.empty() && digits.size() < 10 &&
                           digits[0] != '0' &&
                           digits.find_first_not_of("0123456789") == std::string::npos;
    if (!is_number || std::stoul(digits) > vocab_size) {
        throw mismatch_error("full or topk:K with K from 1 to " + std::to_string(vocab_size), kind,
                             entry.where() + ": logits");
    }
    return std::stoul(digits);
}

void read_masks(const JsonObject& json, ModelEntry& entry) {
    const Json& masks = json.value("masks");
    std::set<std::string> names;
    for (const Json& name : masks) names.insert(name.is_string() ? name.get<std::string>() : "");
    entry.has_mask = names.erase(ATTENTION_MASK) > 0;
    entry.has_sliding_mask = names.erase(ATTENTION_MASK_SLIDING) > 0;
    if (!names.empty() || !(entry.has_mask || entry.has_sliding_mask)) {
        throw mismatch_error("attention_mask, attention_mask_sliding, or both", masks,
                             json.where() + ": masks");
    }
    if (entry.has_sliding_mask != json.has("sliding_window")) {
        throw mismatch_error("a number exactly when masks has attention_mask_sliding",
                             json.value("sliding_window"), json.where() + ": sliding_window");
    }
    if (entry.has_sliding_mask) entry.sliding_window = json.count("sliding_window");
}

std::optional<FeatureEntry> features_of(const JsonObject& json, bool is_draft) {
    if (!json.has("features")) return {};
    const JsonObject features = json.object("features");
    FeatureEntry found;
    found.width = features.count("width");
    if (features.has("layers")) found.layers = features.numbers("layers", MOST_LAYERS);
    if (features.has("own_width")) found.own_width = features.count("own_width");
    if (is_draft != found.own_width.has_value()) {
        throw mismatch_error(is_draft ? "a number" : "null: it is a draft's",
                             features.value("own_width"), features.where() + ": own_width");
    }
    return found;
}

std::optional<TextVerdict> native_text_of(const JsonObject& json, const Json& made_by) {
    if (!json.has("native_text")) return {};
    const JsonObject text = json.object("native_text");
    text.check_known({"encodes", "decodes", "renders", "reason"}, made_by);
    return TextVerdict{
        text.boolean("encodes"), text.boolean("decodes"),
        text.has("renders") && text.boolean("renders"),
        text.has("reason") ? text.text("reason") : "the checkpoint has no chat template"};
}

ModelEntry entry_of(const JsonObject& json, bool is_older, bool is_draft, const Json& made_by) {
    json.check_known({"family",         "vocab_size",  "bos_token_id", "eos_token_ids",
                      "context_length", "num_layers",  "caches",       "dtype",
                      "quantization",   "logits",      "full_logits",  "masks",
                      "sliding_window", "parity",      "bit_exact",    "features",
                      "unread_inputs",  "adapter",     "encoder",      "given",
                      "form",           "native_text", "agreement",    is_older ? "kv" : "caches"},
                     made_by);
    if (json.has("given")) refuse(json.where(), "has given rows (sound or pictures in prompts)");
    ModelEntry entry;
    entry.family = json.text("family");
    entry.dtype = json.one_of("dtype", {"fp32", "fp16"});
    entry.quantization =
        json.one_of("quantization", {"none", "int8-dynamic", "int8", "int4", "int4-symmetric"});
    if (json.has("form")) entry.form = json.one_of("form", {"portable", "cuda", "webgpu"});
    entry.vocab_size = json.count("vocab_size");
    entry.context_length = json.count("context_length");
    if (!json.value("bos_token_id").is_null()) {
        entry.bos_token_id =
            static_cast<std::int64_t>(json.number("bos_token_id", entry.vocab_size - 1));
    }
    entry.eos_token_ids = json.numbers("eos_token_ids", entry.vocab_size - 1);
    entry.caches = caches_of(json, is_older, made_by);
    entry.num_top_logits = num_top_logits_of(json, entry.vocab_size);
    // version 2 lacks the field, and has full logits only without a top-k head
    const bool says_full = json.has("full_logits") || !is_older;
    entry.full_logits = says_full ? json.boolean("full_logits") : entry.num_top_logits == 0;
    if (!entry.num_top_logits && !entry.full_logits) {
        throw mismatch_error("true with logits full", false, json.where() + ": full_logits");
    }
    read_masks(json, entry);
    entry.features = features_of(json, is_draft);
    entry.encoder = encoder_of(json, entry.vocab_size, made_by);
    entry.native_text = native_text_of(json, made_by);
    if (json.has("agreement")) entry.agreement = json.object("agreement").share("best");
    return entry;
}

/// Refuse links that leave the bundle, and too many files.
void check_folder(const fs::path& folder) {
    const std::string root = fs::canonical(folder).string() + "/";
    std::size_t num_entries = 0;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
        const bool is_inside = fs::weakly_canonical(entry.path()).string().rfind(root, 0) == 0;
        if (entry.is_symlink() && !is_inside) {
            throw Error(entry.path().string() +
                        " is a link out of the bundle; copy the file itself into it");
        }
        if (++num_entries > MOST_ENTRIES) {
            throw Error(folder.string() + " has more than " + std::to_string(MOST_ENTRIES) +
                        " files; a bundle is a folder of its own");
        }
    }
}

std::map<std::string, std::uintmax_t> sizes_of(const JsonObject& manifest, const fs::path& folder) {
    std::map<std::string, std::uintmax_t> sizes;
    const JsonObject files = manifest.object("files");
    for (const auto& item : manifest.value("files").items()) {
        const std::string& name = item.key();
        const fs::path path(name);
        const bool leaves = std::find(path.begin(), path.end(), "..") != path.end();
        if (name.empty() || path.is_absolute() || leaves || name.find('\\') != std::string::npos ||
            name.find('\0') != std::string::npos) {
            throw Error(manifest.where() + " names " + in_short(name) +
                        ", a file outside the bundle; refused");
        }
        const std::size_t expected = files.object(name.c_str()).number("size", MOST_COUNT << 20);
        std::error_code error;
        const std::uintmax_t size = fs::file_size(folder / path, error);
        if (!error && size != expected && size < MOST_POINTER_BYTES) text_from_file(folder / path);
        if (error || size != expected) {
            throw Error((folder / path).string() +
                        (error ? " is missing"
                               : " has " + std::to_string(size) + " bytes, the manifest says " +
                                     std::to_string(expected)) +
                        "; copy the whole bundle or export again");
        }
        sizes[name] = size;
    }
    return sizes;
}

void check_listed(const Bundle& bundle) {
    std::vector<std::string> needed{"target/model.onnx", "tokenizer.json"};
    if (bundle.draft) needed.push_back("draft/model.onnx");
    if (bundle.target.encoder) needed.push_back("target/encoder.onnx");
    if (bundle.draft && bundle.draft->encoder) needed.push_back("draft/encoder.onnx");
    const auto folds = [](const CacheEntry& cache) { return cache.is_recurrent(); };
    for (const char* role : {"target", "draft"}) {
        if (role == std::string("draft") && !bundle.draft) continue;
        const std::vector<CacheEntry>& caches =
            role == std::string("target") ? bundle.target.caches : bundle.draft->caches;
        if (std::any_of(caches.begin(), caches.end(), folds)) {
            needed.push_back(std::string(role) + "/fold.onnx");
        }
    }
    for (const std::string& name : needed) {
        if (!bundle.size_by_file.count(name)) {
            throw Error((bundle.path / "dsbd.json").string() + " lists no " + name +
                        "; export again");
        }
    }
    for (const char* name :
         {"tokenizer_config.json", "chat_template.jinja", TEXT_CHECKS_FILE,
          "target/model.onnx.data", "draft/model.onnx.data", "target/fold.onnx", "draft/fold.onnx",
          "source_tokenizer.json", "target/encoder.onnx.data", "draft/encoder.onnx.data"}) {
        const bool is_there =
            fs::symlink_status(bundle.path / name).type() != fs::file_type::not_found;
        if (is_there && !bundle.size_by_file.count(name)) {
            throw Error((bundle.path / name).string() +
                        " is there, but the manifest does not list "
                        "it; remove it, or export again");
        }
    }
}

void check_agreement(const Bundle& bundle) {
    check_encoders(bundle);
    if (!bundle.draft) return;
    const Json &target = bundle.content.at("target"), &draft = bundle.content.at("draft");
    for (const char* field : {"vocab_size", "bos_token_id", "eos_token_ids"}) {
        if (target.at(field) != draft.at(field)) {
            throw Error("target and draft of " + bundle.path.string() + " differ in " + field +
                        ": " + in_short(target.at(field)) + " and " + in_short(draft.at(field)) +
                        "; export a pair that shares its tokenizer");
        }
    }
    const std::optional<FeatureEntry>&returned = bundle.target.features,
          &read = bundle.draft->features;
    if (read && (!returned || returned->width != read->width)) {
        throw Error("the draft of " + bundle.path.string() + " reads features of width " +
                    std::to_string(read->width) +
                    ", which its target does not return; export "
                    "target and draft again, both with dsbd-export --target --draft");
    }
}

}  // namespace

void refuse(const std::string& where, const std::string& reason) {
    throw Error(where + " " + reason + ", which the native library does not run yet" + USE_PYTHON);
}

std::vector<CacheEntry> cache_list_of(const JsonObject& entry, const char* name,
                                      std::size_t num_layers, const Json& made_by) {
    std::vector<CacheEntry> caches;
    std::set<std::pair<std::size_t, std::string>> known;
    for (const JsonObject& each : entry.objects(name)) {
        caches.push_back(cache_of(each, num_layers, made_by));
        const CacheEntry& last = caches.back();
        const bool is_new = known.emplace(last.layer, last.kind).second;
        if (!is_new ||
            last.layer < caches[caches.size() - std::min<std::size_t>(2, caches.size())].layer) {
            throw mismatch_error("increasing layers, one entry for each kind", last.layer,
                                 each.where() + ": layer");
        }
    }
    if (caches.empty()) {
        throw mismatch_error("at least one", Json::array(), entry.where() + ": " + name);
    }
    return caches;
}

EngineSpec ModelEntry::spec() const {
    EngineSpec spec;
    spec.vocab_size = vocab_size;
    spec.context_length = context_length;
    spec.num_top_logits = num_top_logits;
    spec.keeps_full_logits = num_top_logits && full_logits;
    spec.returns_features = features && !features->own_width;
    spec.reads_features = features && features->own_width;
    spec.folds_rows = keeps_recent_rows();
    spec.reads_source = spec.joins_sources = encoder.has_value();
    return spec;
}

std::size_t CacheEntry::row_bytes() const {
    std::size_t numbers = 0;
    for (const CachePart& part : parts) numbers += part.num_heads * part.width;
    return numbers * (dtype == "fp32" ? 4 : 2);
}

std::size_t ModelEntry::row_bytes() const {
    std::size_t bytes = 0;
    for (const CacheEntry& cache : caches) bytes += cache.is_recent() ? 0 : cache.row_bytes();
    return bytes;
}

std::size_t ModelEntry::num_ancestors() const {
    std::size_t most = 0;
    for (const CacheEntry& cache : caches) most = std::max(most, cache.num_ancestors);
    return most;
}

bool ModelEntry::keeps_recent_rows() const {
    return std::any_of(caches.begin(), caches.end(), [](auto& cache) { return cache.is_recent(); });
}

std::size_t Bundle::context_length() const {
    const bool reads_all = draft && (draft->features || draft->encoder);
    return reads_all ? std::min(target.context_length, draft->context_length)
                     : target.context_length;
}

Bundle open_bundle(const fs::path& folder) {
    const fs::path file = folder / "dsbd.json";
    std::error_code error;
    if (!fs::is_directory(folder, error)) {
        throw Error("no bundle at " + folder.string() +
                    ": no such folder; make one with dsbd-export");
    }
    if (!fs::is_regular_file(file, error)) {
        throw Error(folder.string() +
                    " is not a bundle: it has no dsbd.json; make one with "
                    "dsbd-export");
    }
    check_folder(folder);
    Bundle bundle;
    bundle.path = folder;
    bundle.content = json_from_file(file);
    const JsonObject manifest(bundle.content, file.string());
    const std::size_t version = manifest.number("schema_version", 4, 2);
    const JsonObject versions = manifest.object("versions");
    const Json made_by = versions.has("dsbd-ort") ? versions.value("dsbd-ort") : Json();
    manifest.check_known({"schema_version", "versions", "target", "draft", "files"}, made_by);
    bundle.target = entry_of(manifest.object("target"), version < 4, false, made_by);
    if (!manifest.value("draft").is_null()) {
        bundle.draft = entry_of(manifest.object("draft"), version < 4, true, made_by);
    }
    bundle.size_by_file = sizes_of(manifest, folder);
    check_listed(bundle);
    check_agreement(bundle);
    return bundle;
}

}  // namespace dsbd
