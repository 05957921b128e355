// Opening a bundle, and its requests: options, defaults and refusals.
#include "runtime/pipeline.hpp"

#include <algorithm>
#include <sstream>
#include <system_error>

#include "runtime/number_check.hpp"
#include "set_up.hpp"

namespace dsbd {

namespace {

constexpr std::uintmax_t SMALL_DRAFT_BYTES = std::uintmax_t{32} << 20;
constexpr std::size_t MOST_TRIES = 8, MOST_ESTIMATORS = 64;

/// Refuse what only the library with Python does.
void check_native(const JsonObject& settings, const std::string& name) {
    if (!settings.has(name)) return;
    const Json& value = settings.value(name);
    if (value == false) return;
    if (name == "loop" && (value == "auto" || value == "native")) return;
    throw Error("settings has " + name + " " + in_short(value) +
                ", which the native library does not do; leave it out, or use libdsbd with Python "
                "(docs/embedding.md)");
}

/// Read where the engines run, and refuse settings of engines that no provider has.
void read_placements(const JsonObject& given, PipelineSettings& found) {
    EngineSettings& engines = found.engines;
    const std::string provider = given.text_or_null("provider").value_or("cpu");
    engines.placement = placement_of("provider", provider);
    if (const auto text = given.text_or_null("draft_provider")) {
        found.draft_placement = placement_of("draft_provider", *text);
    }
    engines.provider_library = given.text_or_null("provider_library").value_or("");
    if (given.has("cuda_graphs")) engines.captures = given.boolean("cuda_graphs");
    const Provider& of_target = *engines.placement.provider;
    const Provider& of_draft = *found.draft_placement.value_or(engines.placement).provider;
    std::string names = "'" + std::string(of_target.name) + "'";
    if (of_draft.name != of_target.name) names += " and '" + std::string(of_draft.name) + "'";
    if (of_target.is_device() && of_draft.is_device()) {
        for (const char* name : {"num_threads", "spin_us", "engine_cache"}) {
            if (!given.has(name)) continue;
            throw Error(std::string(name) + " is " + in_short(given.value(name)) +
                        ", but provider " + names + " runs on a GPU; leave it out");
        }
    }
    if (engines.captures.value_or(false) && of_target.capture_option.empty() &&
        of_draft.capture_option.empty()) {
        throw Error("cuda_graphs is set, but the native library records no calls of provider " +
                    names + "; use 'webgpu', or leave it out");
    }
}

/// The latest used of a list by key, made if it is missing; the list holds at most `most`.
template <class List, class Make>
auto recent(List& list, const std::string& key, std::size_t most, Make make) {
    auto found =
        std::find_if(list.begin(), list.end(), [&](auto& each) { return each.first == key; });
    if (found == list.end()) found = list.insert(list.end(), {key, make()});
    list.splice(list.end(), list, found);
    if (list.size() > most) list.pop_front();
    return list.back().second;
}

/// Bytes of the files whose paths begin so.
double num_bytes(const Bundle& bundle, const std::string& begin) {
    double bytes = 0.0;
    for (const auto& [file, size] : bundle.size_by_file) {
        if (file.starts_with(begin)) bytes += static_cast<double>(size);
    }
    return bytes;
}

/// Bytes of an engine, without its encoder, which no call of it reads.
double engine_bytes(const Bundle& bundle, const std::string& folder) {
    return num_bytes(bundle, folder) - num_bytes(bundle, folder + "encoder.onnx");
}

/// The settings of the draft. A small one, whose calls are over before a second thread has begun,
/// gets one thread if it shares the processor with the target.
EngineSettings draft_settings(const Bundle& bundle, const PipelineSettings& given) {
    EngineSettings settings = given.engines;
    const bool target_is_on_device = settings.placement.is_device();
    settings.placement = given.draft_placement.value_or(settings.placement);
    if (target_is_on_device || settings.placement.is_device()) return settings;
    const auto weights = bundle.size_by_file.find("draft/model.onnx.data");
    const bool is_small =
        weights == bundle.size_by_file.end() || weights->second <= SMALL_DRAFT_BYTES;
    if (is_small) settings.num_threads = 1;
    return settings;
}

BundleFacts facts_of(const Bundle& bundle, const PipelineSettings& settings) {
    BundleFacts facts;
    facts.eos_token_ids = bundle.target.eos_token_ids;
    facts.context_length = bundle.context_length();
    facts.num_top_logits = bundle.target.full_logits ? 0 : bundle.target.num_top_logits;
    facts.reads_source = bundle.target.encoder.has_value();
    facts.has_draft = bundle.draft.has_value();
    facts.is_for_chats = settings.chat_defaults;
    const std::filesystem::path file = bundle.path / "generation_config.json";
    if (settings.generation_config && bundle.size_by_file.count("generation_config.json")) {
        facts.generation_config = text_from_file(file).value_or("");
    }
    facts.generation_config_file = file.string();
    return facts;
}

}  // namespace

PipelineSettings PipelineSettings::of(std::string_view json) {
    const Json content = json_from_text(json, "settings");
    const JsonObject given(content, "settings", "dsbd_native.h has the settings of dsbd_open");
    for (const char* name : {"verify", "loop"}) check_native(given, name);
    PipelineSettings found;
    read_placements(given, found);
    const auto num_threads = given.number_or_null("num_threads", 1024, 1);
    if (num_threads) found.engines.num_threads = static_cast<int>(*num_threads);
    const auto spin_us = given.number_or_null("spin_us", 10'000);
    if (spin_us) found.engines.spin_us = static_cast<int>(*spin_us);
    found.engines.engine_cache = given.text_or_null("engine_cache").value_or("");
    found.prefix_cache = given.boolean("prefix_cache", found.prefix_cache);
    found.generation_config = given.boolean("generation_config", found.generation_config);
    found.chat_defaults = given.boolean("chat_defaults", found.chat_defaults);
    found.ngram_pool = given.number_or_null("ngram_pool").value_or(found.ngram_pool);
    found.max_requests =
        given.number_or_null("max_requests", MOST_COUNT, 1).value_or(found.max_requests);
    found.max_queued = given.number_or_null("max_queued").value_or(found.max_queued);
    found.kv_bytes = given.number_or_null("kv_bytes", std::uint64_t{1} << 53, 1);
    given.check_all_read();
    return found;
}

Pipeline::Pipeline(const std::filesystem::path& folder, const PipelineSettings& settings)
    : settings_(settings),
      bundle_(open_bundle(folder)),
      prompts_(bundle_),
      env_(ort_environment()) {
    if (!bundle_.draft && settings.draft_placement) {
        throw Error("draft_provider is '" + std::string(settings.draft_placement->provider->name) +
                    "', but the bundle " + bundle_.path.string() + " has no draft; leave it out");
    }
    target_ = checked_engine(env_, bundle_, "target", settings.engines);
    if (bundle_.draft) {
        draft_ = checked_engine(env_, bundle_, "draft", draft_settings(bundle_, settings),
                                target_.get());
    }
    costs_ = std::make_shared<LearnedCosts>(engine_bytes(bundle_, "target/"),
                                            engine_bytes(bundle_, "draft/"),
                                            num_bytes(bundle_, "draft/encoder.onnx"));
    SourcePointer source;
    if (prompts_.reads_source()) source = std::make_shared<TextSource>(Ints{0});
    if (draft_) learn_from_first_calls(*costs_, *draft_, seconds_now, source);
    huge_pages_.gather();  // calls take longer meanwhile
    if (settings.ngram_pool) ngram_pool_ = std::make_shared<NGramPool>(settings.ngram_pool);
    defaults_ = std::make_unique<ModelDefaults>(facts_of(bundle_, settings));
    text_ = text_of(bundle_);
}

void Pipeline::set_text(TextCallbacks callbacks) {
    std::shared_ptr<const Text> text = text_by(std::move(callbacks));
    const std::lock_guard lock(mutex_);
    text_ = std::move(text);
}

PreparedRequest Pipeline::prepare(const Prompt& prompt, std::string_view options) {
    std::shared_ptr<const Text> text;
    {
        const std::lock_guard lock(mutex_);
        text = text_;
    }
    const LanguageOptions given = prompts_.with_language(options);
    const bool is_text = std::holds_alternative<std::string_view>(prompt);
    RequestInputs inputs = prompts_.read(prompt_ids(*text, prompt), is_text, given.src_lang);
    const Ints& ids = inputs.prompt_ids;
    const auto encode = [&](const std::string& predicted) {
        Ints encoded = text->encode(predicted);
        const auto size = static_cast<std::int64_t>(bundle_.target.vocab_size);
        std::erase_if(encoded, [&](std::int64_t token) { return token >= size; });
        return encoded;
    };
    DecodingConfig config = defaults_->config(given.options, ids.size(), encode);
    if (config.prompt_logprobs && inputs.source) {
        throw Error(
            "prompt_logprobs is true, but the prompt of an encoder-decoder is its source, "
            "of which it predicts no token; leave it out");
    }
    check_context(ids.size(), config.max_new_tokens);
    bind_constraint(config);
    std::shared_ptr<const TextRun> start = text->after(ids, config.skip_special_tokens);
    if (!config.stop_strings.empty() && !start) {
        throw Error(
            "stop_strings are given, but the text of this bundle is not read by the native "
            "library; use eos_token_id, or callbacks by dsbd_set_text");
    }
    DecodingRequest request{ids, config, RandomGenerator(*config.seed)};
    if (!ids.empty() && bundle_.target.bos_token_id == ids[0]) request.begin_token = ids[0];
    request.source = std::move(inputs.source);
    request.copied_ids = std::move(inputs.copied_ids);
    if (start) request.stop = stop_state(*start, config);
    if (config.has_ngram_drafter()) request.ngram_pool = ngram_pool_;
    if (config.draft_policy == PolicyKind::throughput) {
        request.costs = costs_;
        request.estimator = estimator(config);
    }
    check_decodable(request, target_->spec(), draft_ ? &draft_->spec() : nullptr);
    return {std::move(request), std::move(start)};
}

Ints Pipeline::prompt_ids(const Text& text, const Prompt& prompt) const {
    if (const auto* ids = std::get_if<TokenSpan>(&prompt)) {
        if (prompts_.reads_source()) {  // before they are read
            prompts_.check_length(ids->size());
        } else {
            check_context(ids->size(), 0);
        }
        return {ids->begin(), ids->end()};
    }
    if (const auto* messages = std::get_if<ChatMessages>(&prompt)) {
        if (prompts_.reads_source()) {
            throw Error("the model of " + bundle_.path.string() +
                        " is an encoder-decoder, which "
                        "has no chats; give the text itself as the prompt: it is the source");
        }
        const Json given = json_from_text(messages->json, "messages");
        if (!given.is_array()) {
            throw Error("messages is " + std::string(messages->json.substr(0, 40)) +
                        "; expected a JSON array such as "
                        "[{\"role\": \"user\", \"content\": \"Hello\"}]");
        }
        return text.chat(given);
    }
    return text.prompt(std::get<std::string_view>(prompt));
}

void Pipeline::check_context(std::size_t num_prompt_tokens, std::size_t max_new_tokens) const {
    const std::size_t limit = bundle_.context_length();
    const std::string context = "this model's maximum context length is " + std::to_string(limit) +
                                " tokens, the prompt has " + std::to_string(num_prompt_tokens);
    const std::string begin = "the prompt is too long";
    if (num_prompt_tokens >= limit) {
        throw CapacityError(begin + ": " + context + "; shorten the prompt");
    }
    if (num_prompt_tokens + max_new_tokens > limit) {
        throw CapacityError(begin + " for max_new_tokens " + std::to_string(max_new_tokens) + ": " +
                            context + "; use max_new_tokens " +
                            std::to_string(limit - num_prompt_tokens) +
                            " or less, or a shorter prompt");
    }
}

/// Open the request's trie, unless it is open already and its file the same.
void Pipeline::bind_constraint(DecodingConfig& config) {
    if (config.trie_file.empty()) return;
    std::error_code error;
    const auto time = std::filesystem::last_write_time(config.trie_file, error);
    std::ostringstream key;
    key << config.trie_file << '\n'
        << config.trie_end << '\n'
        << (error ? 0 : time.time_since_epoch().count());
    const auto load = [&]() -> std::shared_ptr<TokenTrie> {
        std::optional<TokenTrie::End> end;
        if (!config.trie_end.empty()) {
            end = config.trie_end == "eos" ? TokenTrie::End::eos : TokenTrie::End::leaf;
        }
        TokenTrie trie = TokenTrie::load(config.trie_file, end);
        if (trie.highest_token() >= static_cast<std::int64_t>(bundle_.target.vocab_size)) {
            throw Error(trie.name() + " has the token id " + std::to_string(trie.highest_token()) +
                        "; expected 0 to " + std::to_string(bundle_.target.vocab_size - 1) +
                        ", the target's vocabulary: build it with the bundle's tokenizer");
        }
        return std::make_shared<TokenTrie>(std::move(trie));
    };
    const std::lock_guard lock(mutex_);
    const auto trie = recent(tries_, key.str(), MOST_TRIES, load);
    trie->check_ends(config.eos_token_id.value_or(Ints()));
    config.constraint = trie;
    if (const auto most = config.constraint->most_tokens()) config.end_after(*most);
}

/// The estimator of requests whose drafts are accepted alike.
std::shared_ptr<AcceptanceEstimator> Pipeline::estimator(const DecodingConfig& config) {
    std::ostringstream key;
    key << config.row->name << ' ' << config.num_beams << ' ' << static_cast<int>(config.drafter)
        << ' ' << config.has_constraint() << ' ' << config.predicted_token_ids.empty() << ' '
        << config.temperature << ' ' << config.top_k << ' ' << config.top_p;
    const std::lock_guard lock(mutex_);
    return recent(estimators_, key.str(), MOST_ESTIMATORS, [&] {
        const bool is_model = bundle_.draft && config.has_draft_model();
        return std::make_shared<AcceptanceEstimator>(is_model ? bundle_.draft->agreement
                                                              : std::nullopt);
    });
}

std::size_t Pipeline::kv_bytes() const {
    return target_->kv_bytes() + (draft_ ? draft_->kv_bytes() : 0);
}

std::size_t Pipeline::kv_bytes_peak() const {
    return target_->kv_bytes_peak() + (draft_ ? draft_->kv_bytes_peak() : 0);
}

}  // namespace dsbd
