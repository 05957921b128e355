// An opened bundle: its engines, its text, and requests to it (pipeline.py, bundle_requests.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "constraints/token_trie.hpp"
#include "drafting/acceptance.hpp"
#include "drafting/cost_curve.hpp"
#include "drafting/ngram.hpp"
#include "option_defaults.hpp"
#include "request.hpp"
#include "runtime/huge_pages.hpp"
#include "runtime/ort_engine.hpp"
#include "runtime/prompts.hpp"
#include "runtime/text.hpp"

namespace dsbd {

/// How a bundle is opened, and the limits of a service on it: the settings of dsbd_open.
struct PipelineSettings {
    EngineSettings engines;  // of the target, and what the draft's share with them
    std::optional<Placement> draft_placement;  // none: the target's
    bool prefix_cache = true, generation_config = true, chat_defaults = false;
    std::size_t ngram_pool = 16'384;  // tokens of earlier texts that the n-gram drafter searches
    std::size_t max_requests = 8;     // that run together
    std::size_t max_queued = 64;      // that wait beyond those
    std::optional<std::size_t> kv_bytes;  // of the caches of both engines; none: by max_requests

    /// Read a JSON object; Error: a setting is unknown, invalid, or not native.
    static PipelineSettings of(std::string_view json);
};

/// The text, token ids, or messages of a chat as JSON that a request continues.
struct ChatMessages {
    std::string_view json;
};
using Prompt = std::variant<std::string_view, TokenSpan, ChatMessages>;

/// A request and the text after its prompt.
struct PreparedRequest {
    DecodingRequest request;
    std::shared_ptr<const TextRun> start;  // null: the bundle has no native text
};

/// The engines of target and draft, each on the device that the settings name for it. `prepare` may
/// be called by any thread; the engines are for one thread.
class Pipeline {
public:
    /// Error: the bundle is damaged, or not for this library.
    Pipeline(const std::filesystem::path& folder, const PipelineSettings& settings);

    /// Return a checked request. Error: prompt or options are invalid; CapacityError: they do not
    /// fit the context.
    PreparedRequest prepare(const Prompt& prompt, std::string_view options);
    /// Use callbacks of the program for text from now on.
    void set_text(TextCallbacks callbacks);

    const Bundle& bundle() const { return bundle_; }
    const PipelineSettings& settings() const { return settings_; }
    const ModelDefaults& defaults() const { return *defaults_; }
    OrtEngine& target() { return *target_; }
    OrtEngine* draft() { return draft_.get(); }
    const std::shared_ptr<Costs>& costs() const { return costs_; }
    std::size_t kv_bytes() const;
    std::size_t kv_bytes_peak() const;

private:
    Ints prompt_ids(const Text& text, const Prompt& prompt) const;
    void check_context(std::size_t num_prompt_tokens, std::size_t max_new_tokens) const;
    void bind_constraint(DecodingConfig& config);
    std::shared_ptr<AcceptanceEstimator> estimator(const DecodingConfig& config);

    PipelineSettings settings_;
    Bundle bundle_;
    PromptReader prompts_;
    Ort::Env env_;
    HugePages huge_pages_;  // for the engines
    std::unique_ptr<OrtEngine> target_, draft_;
    std::shared_ptr<Costs> costs_;
    std::shared_ptr<NGramPool> ngram_pool_;
    std::unique_ptr<ModelDefaults> defaults_;

    std::mutex mutex_;  // guards what follows
    std::shared_ptr<const Text> text_;
    // The latest used, last; of tries by file, of estimators by options.
    std::list<std::pair<std::string, std::shared_ptr<TokenTrie>>> tries_;
    std::list<std::pair<std::string, std::shared_ptr<AcceptanceEstimator>>> estimators_;
};

}  // namespace dsbd
