// The parts of a request that begins: forest, rule, draft policy, caches, observers.
#pragma once

#include "beams.hpp"
#include "cache_view.hpp"
#include "computed_distributions.hpp"
#include "drafting/acceptance.hpp"
#include "drafting/draft.hpp"
#include "drafting/drafters.hpp"
#include "drafting/ngram.hpp"
#include "engine_call.hpp"
#include "forest.hpp"
#include "forest_runner.hpp"
#include "logits_processing/path_states.hpp"
#include "logits_processing/request_processing.hpp"
#include "node_features.hpp"
#include "request.hpp"
#include "rule.hpp"
#include "stats.hpp"
#include "top_tokens.hpp"
#include "warp.hpp"

namespace dsbd {

/// Throw Error for a request that these engines cannot decode; none is called.
void check_decodable(const DecodingRequest& request, const EngineSpec& target,
                     const EngineSpec* draft);

/// The parts that the loop of one request works with; they refer to each other.
class LoopParts {
public:
    /// Throws what `check_decodable` throws. draft: null without a draft model.
    LoopParts(DecodingRequest& request, CacheView& target, CacheView* draft);
    LoopParts(const LoopParts&) = delete;

    /// Return a computation that adds the layers drafted below `beams` to the forest.
    EngineCalls<std::vector<DraftLayer>> draft(const Beams& beams, std::size_t depth);
    void observe(const Iteration& iteration);

    DecodingRequest& request;
    const DecodingConfig& config;

private:
    std::optional<RequestCosts> costs_;
    // State of the paths that does not depend on the engine.
    std::unique_ptr<RequestProcessing> processing_;
    std::unique_ptr<NGramDrafter> ngram_;
    std::unique_ptr<StopStates> stop_states_;

public:
    Forest forest;
    Hypotheses hypotheses;
    Agreement agreement;
    LayerBuilder builder;

private:
    std::optional<TopTokens> tops_;
    std::optional<PromptScorer> scorer_;
    std::unique_ptr<ComputedDistributions> of_target_, of_draft_;
    std::unique_ptr<TargetFeatures> target_features_;
    std::unique_ptr<DraftFeatures> draft_features_;

public:
    std::unique_ptr<ForestRunner> target;
    std::unique_ptr<ForestRunner> draft_runner;  // null without a draft model
    std::vector<ForestRunner*> runners;          // both
    std::vector<ForestRunner*> lockstep;  // compute the prompt part by part, as the target does
    std::unique_ptr<SelectionRule> rule;
    std::optional<StatsRecorder> stats;
    std::size_t num_descendants = 0;  // nodes below the beams that pruning leaves at most

    const TopTokens* tops() const { return tops_ ? &*tops_ : nullptr; }

private:
    Forest make_forest(const EngineSpec& target_spec, const EngineSpec* draft_spec);
    void make_runners(CacheView& target_view, CacheView* draft_view);
    std::unique_ptr<SelectionRule> make_rule();
    std::unique_ptr<DraftPolicy> make_policy();
    void make_draft_runner(CacheView& view, const Warp& warp);
    DraftContext draft_context(const EngineSpec& draft) const;
    void make_drafter();

    Meter no_draft_;
    std::unique_ptr<DraftPolicy> policy_;
    std::unique_ptr<Drafter> chained_;
    Drafter* drafter_ = nullptr;  // the one that is used, if any
    LateRunner* late_ = nullptr;  // the draft's, unless it reads features
};

}  // namespace dsbd
