// A bundle, opened: token ids in, sequences out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include <onnxruntime_cxx_api.h>

#include "decode.hpp"
#include "engine.hpp"
#include "manifest.hpp"
#include "options.hpp"

namespace dsbd {

/// Target and, where there is one, draft on the processor; for one thread at a time. Tokens are
/// those of dsbd-run, for the same seed.
class Pipeline {
public:
    /// num_threads: of one call; without a value ONNX Runtime chooses.
    explicit Pipeline(const std::filesystem::path& folder, std::optional<int> num_threads = {})
        : bundle_(open_bundle(folder)),
          target_(env_, bundle_.target, {num_threads}) {
        if (bundle_.draft) {
            draft_.emplace(env_, *bundle_.draft, draft_threads(bundle_, num_threads));
        }
    }

    Result generate(const std::vector<std::int64_t>& prompt_ids, const Options& options) {
        const Request request = checked(options, bundle_.target.eos_token_ids);
        if (!draft_ && !request.layer_widths.empty()) {
            throw Error("this bundle has no draft, but strategy " + options.strategy +
                        " needs one; use sample, beam-sample or greedy, or add one with: "
                        "dsbd-export --bundle BUNDLE --draft DRAFT");
        }
        return decode(target_, draft_ ? &*draft_ : nullptr, prompt_ids, request);
    }

private:
    /// A draft whose calls are over before a second thread has begun, or none.
    static bool has_small_draft(const Bundle& bundle) {
        return !bundle.draft || bundle.draft->weight_bytes <= std::uintmax_t{32} << 20;
    }

    /// A small draft gets one thread and no pool of its own.
    static Threads draft_threads(const Bundle& bundle, std::optional<int> num_threads) {
        return Threads{has_small_draft(bundle) ? std::optional<int>{1} : num_threads};
    }

    Ort::Env env_{ORT_LOGGING_LEVEL_ERROR, "dsbd"};
    Bundle bundle_;
    Engine target_;
    std::optional<Engine> draft_;
};

}  // namespace dsbd
