// The entry of an encoder: read and checked.
#include "runtime/encoder_entry.hpp"

#include <algorithm>

namespace dsbd {

namespace {

std::map<std::string, std::int64_t> languages_of(const JsonObject& encoder, std::uint64_t most) {
    std::map<std::string, std::int64_t> found;
    if (!encoder.has("languages")) return found;
    const JsonObject languages = encoder.object("languages");
    for (const auto& item : encoder.value("languages").items()) {
        found[item.key()] = static_cast<std::int64_t>(languages.number(item.key().c_str(), most));
    }
    return found;
}

}  // namespace

std::optional<EncoderEntry> encoder_of(const JsonObject& model, std::size_t vocab_size,
                                       const Json& made_by) {
    if (!model.has("encoder")) return {};
    const JsonObject encoder = model.object("encoder");
    for (const char* kind : {"speech", "picture"}) {
        if (!encoder.has(kind)) continue;
        const bool is_sound = kind == std::string("speech");
        refuse(model.where(), std::string("reads ") + (is_sound ? "sound" : "pictures") +
                                  " as its source (encoder: " + kind + ")");
    }
    encoder.check_known(
        {"vocab_size", "context_length", "start_token_id", "cross", "reads_positions", "languages",
         "unknown_token_id", "hidden_width", "fingerprint", "is_shared"},
        made_by);
    EncoderEntry entry;
    entry.vocab_size = encoder.count("vocab_size");
    entry.context_length = encoder.count("context_length");
    entry.start_token_id =
        static_cast<std::int64_t>(encoder.number("start_token_id", vocab_size - 1));
    entry.cross = cache_list_of(encoder, "cross", model.count("num_layers"), made_by);
    for (const CacheEntry& rows : entry.cross) {
        if (!rows.is_recent()) continue;
        throw mismatch_error("attention rows", rows.kind, encoder.where() + ": cross: kind");
    }
    entry.reads_positions = encoder.has("reads_positions") && encoder.boolean("reads_positions");
    entry.languages = languages_of(encoder, vocab_size - 1);
    if (encoder.has("unknown_token_id")) {
        entry.unknown_token_id =
            static_cast<std::int64_t>(encoder.number("unknown_token_id", entry.vocab_size - 1));
    }
    if (encoder.has("hidden_width")) entry.hidden_width = encoder.count("hidden_width");
    entry.is_shared = encoder.has("is_shared") && encoder.boolean("is_shared");
    if (entry.is_shared && !entry.hidden_width) {
        throw mismatch_error("a number with is_shared true", nullptr,
                             encoder.where() + ": hidden_width");
    }
    return entry;
}

void check_encoders(const Bundle& bundle) {
    const auto& target = bundle.target.encoder;
    const std::string where = (bundle.path / "dsbd.json").string();
    if (target && target->is_shared) {
        throw mismatch_error("null: it is a draft's", true, where + ": target: encoder: is_shared");
    }
    if (!bundle.draft || !bundle.draft->encoder) return;
    const EncoderEntry& draft = *bundle.draft->encoder;
    if (!target) {
        throw Error("the draft of " + bundle.path.string() +
                    " is an encoder-decoder's and reads a "
                    "source, which requests to its target do not have; export a pair that both "
                    "read one");
    }
    if (draft.is_shared && target->hidden_width != draft.hidden_width) {
        throw Error(where +
                    ": draft: encoder is shared with the target, whose encoder returns no "
                    "such hidden states; export target and draft again, both with dsbd-export "
                    "--target --draft");
    }
}

}  // namespace dsbd
