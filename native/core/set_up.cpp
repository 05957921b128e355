// The parts of a request that begins: forest, rule, draft policy, caches, observers.
#include "set_up.hpp"

#include "drafting/cost_curve.hpp"
#include "drafting/throughput.hpp"
#include "error.hpp"
#include "joint_rule.hpp"
#include "rejection_coupling.hpp"
#include "row_bounds.hpp"
#include "sample_rule.hpp"
#include "search_rule.hpp"

namespace dsbd {
namespace {

std::string_view name_of(DrafterKind drafter) {
    switch (drafter) {
        case DrafterKind::model:
            return "model";
        case DrafterKind::ngram:
            return "ngram";
        case DrafterKind::model_and_ngram:
            return "model+ngram";
        case DrafterKind::none:
            break;
    }
    return "none";
}

NGramDrafter::Settings ngram_settings(const DecodingRequest& request) {
    const DecodingConfig& config = request.config;
    NGramDrafter::Settings settings;
    settings.temperature = config.temperature == 0.0 ? 1.0 : config.temperature;
    settings.only_long_matches = config.has_draft_model();
    settings.num_beams = config.num_beams;
    const bool is_predicted = !config.predicted_token_ids.empty();
    settings.copied_ids = is_predicted ? config.predicted_token_ids : request.copied_ids;
    if (settings.copied_ids.empty()) settings.late_ids = request.late_ids;
    return settings;
}

}  // namespace

void check_decodable(const DecodingRequest& request, const EngineSpec& target,
                     const EngineSpec* draft) {
    check_request(request, target, draft);
    check_top_logprobs(target, request.config);
    check_top_k(target, request.config);
}

LoopParts::LoopParts(DecodingRequest& given, CacheView& target_view, CacheView* draft_view)
    : request(given),
      config(given.config),
      forest(make_forest(target_view.spec(), draft_view ? &draft_view->spec() : nullptr)),
      agreement(hypotheses),
      builder(forest, hypotheses, config.replacement) {
    const std::size_t num_rows = expected_rows(request.prompt_ids.size(), config);
    target_view.row_cache.expect(num_rows - target_view.prefix.tokens.size());
    if (!request.estimator) request.estimator = std::make_shared<AcceptanceEstimator>();
    if (request.costs) {
        const std::size_t most_beams = config.most_draft_beams();
        const std::size_t most_rows = (config.draft_length + 2) * (most_beams + config.num_beams);
        costs_.emplace(
            *request.costs, request.num_sharers,
            DraftLimits{config.num_beams, most_rows, most_beams, config.has_draft_model()});
    }
    rule = make_rule();
    make_runners(target_view, draft_view);
    if (draft_view) {
        const std::size_t num_skipped = late_ ? late_->context.offset() : 0;
        draft_view->row_cache.expect(num_rows - num_skipped - draft_view->prefix.tokens.size());
    }
    policy_ = make_policy();
    stats.emplace(static_cast<std::int64_t>(request.prompt_ids.size()), target->meter(),
                  draft_runner ? draft_runner->meter() : no_draft_, request.clock,
                  name_of(config.drafter),
                  static_cast<std::int64_t>(target_view.prefix.tokens.size()));
    make_drafter();
}

Forest LoopParts::make_forest(const EngineSpec& target_spec, const EngineSpec* draft_spec) {
    check_decodable(request, target_spec, draft_spec);
    if (config.processes_logits()) {
        std::optional<std::span<const std::int64_t>> source;
        if (request.source) source = request.source->token_ids();
        processing_ = std::make_unique<RequestProcessing>(
            config, config.constraint.get(), request.prompt_ids, target_spec.vocab_size, source);
    }
    if (config.has_ngram_drafter()) {
        ngram_ = std::make_unique<NGramDrafter>(request.prompt_ids, request.ngram_pool.get(),
                                                ngram_settings(request));
    }
    std::vector<PathStates*> states;
    if (request.stop) {
        stop_states_ =
            std::make_unique<StopStates>(ExemptStop{request.stop, config.min_new_tokens});
        states.push_back(stop_states_.get());
    }
    if (processing_) {
        const std::vector<PathStates*> more = processing_->path_states();
        states.insert(states.end(), more.begin(), more.end());
    }
    if (ngram_) states.push_back(&ngram_->paths);
    const auto position = static_cast<std::int64_t>(request.prompt_ids.size()) - 1;
    return Forest(request.prompt_ids.back(), position, request.random.next63(),
                  config.eos_token_id.value_or(Ints{}), std::move(states));
}

/// Make each engine's rows of the forest: the target's, and the draft's if a model drafts.
void LoopParts::make_runners(CacheView& target_view, CacheView* draft_view) {
    const EngineSpec& spec = target_view.spec();
    const std::size_t num_top = std::min(config.top_logprobs, spec.vocab_size);
    if (num_top) tops_.emplace(num_top, forest, hypotheses);
    if (config.prompt_logprobs) scorer_.emplace(request.prompt_ids, num_top);
    const Warp warp = Warp::of(config);
    // Without a draft all other logits are read later.
    const bool reads_few = !config.row->has_draft && !spec.num_top_logits;
    of_target_ = std::make_unique<ComputedDistributions>(
        Role::target, spec, forest, reads_few ? warp.narrowed() : warp, processing_.get(),
        tops_ ? &*tops_ : nullptr);
    const bool has_draft = draft_view && config.has_draft_model();
    if (has_draft && draft_view->spec().reads_features) {
        align_prefixes(target_view.prefix, draft_view->prefix);
        target_features_ = std::make_unique<TargetFeatures>(target_view);
    }
    target = std::make_unique<ForestRunner>(Role::target, target_view, forest, *of_target_,
                                            scorer_ ? &*scorer_ : nullptr, target_features_.get());
    runners.push_back(target.get());
    if (has_draft) make_draft_runner(*draft_view, warp);
}

void LoopParts::make_draft_runner(CacheView& view, const Warp& warp) {
    const EngineSpec& spec = view.spec();
    of_draft_ = std::make_unique<ComputedDistributions>(
        Role::draft, spec, forest, warp.within(spec.num_top_logits), processing_.get());
    if (target_features_) {
        draft_features_ = std::make_unique<DraftFeatures>(forest, *target_features_);
        view.own_features = [this](std::size_t slot) { return draft_features_->own_of(slot); };
        draft_runner = std::make_unique<ForestRunner>(Role::draft, view, forest, *of_draft_,
                                                      nullptr, draft_features_.get());
        lockstep.push_back(draft_runner.get());
    } else {
        auto late = std::make_unique<LateRunner>(view, forest, *of_draft_, request.prompt_ids,
                                                 hypotheses, draft_context(spec));
        late_ = late.get();
        draft_runner = std::move(late);
    }
    runners.push_back(draft_runner.get());
}

DraftContext LoopParts::draft_context(const EngineSpec& draft) const {
    ContextSettings settings;
    if (!reads_whole_path(draft, request.source)) {
        const bool is_auto = config.draft_context == AUTO_CONTEXT;
        settings.size = is_auto && config.depends_on_draft() ? WHOLE_CONTEXT : config.draft_context;
        settings.most_tokens = draft.context_length;
        settings.begin_token = request.begin_token;
        settings.costs = costs_ ? &*costs_ : nullptr;
    }
    settings.num_prompt_tokens = request.prompt_ids.size();
    settings.max_new_tokens = config.max_new_tokens;
    settings.most_layers = config.draft_beams.size() + (config.constraint ? MOST_FORCED_LAYERS : 0);
    return DraftContext(settings, *request.estimator);
}

std::unique_ptr<SelectionRule> LoopParts::make_rule() {
    switch (config.row->rule) {
        case Rule::search:
            return search_rule(config, builder);
        case Rule::joint:
            return std::make_unique<JointSpeculativeRule>(config, builder);
        case Rule::joint_greedy:
            return std::make_unique<JointGreedyRule>(config, builder);
        case Rule::sample:
            break;
    }
    std::unique_ptr<DrawCoupling> coupling;
    if (config.coupling == Coupling::rejection) {
        coupling = std::make_unique<RejectionCoupling>(request.random, config.replacement);
    } else {
        coupling = std::make_unique<GumbelCoupling>(forest, config.replacement);
    }
    return sample_rule(config, builder, std::move(coupling));
}

std::unique_ptr<DraftPolicy> LoopParts::make_policy() {
    if (!costs_ || config.draft_policy == PolicyKind::fixed) {
        return fixed_policy(config.draft_beams, [this](JointDistribution& joint, std::size_t number,
                                                       std::size_t depth) {
            return rule->propose(joint, number, depth);
        });
    }
    const Meter& of_target = target->meter();
    const Meter& of_draft = draft_runner ? draft_runner->meter() : no_draft_;
    ThroughputSettings settings;
    settings.most_layers = config.draft_length;
    settings.host_seconds = [this, &of_target, &of_draft] {
        return request.clock() - of_target.waited - of_draft.waited;
    };
    settings.target_seconds = [&of_target] { return of_target.seconds; };
    settings.unread = [this] {
        return late_ ? late_->unread() : std::pair<std::size_t, std::size_t>{0, 0};
    };
    settings.context_size = [this] { return late_ ? late_->context.size() : WHOLE_CONTEXT; };
    settings.may_rest = !config.constraint;
    return throughput_policy(
        *costs_, *request.estimator,
        [this](JointDistribution& joint, std::size_t depth) {
            return rule->draft_scores(joint, depth);
        },
        forest, std::move(settings));
}

/// Choose the drafter: the one that tries a constraint or n-grams before the model, if needed.
void LoopParts::make_drafter() {
    drafter_ = draft_runner.get();
    const bool may_force = config.drafts() && config.row->rule != Rule::joint && processing_ &&
                           processing_->has_constraint();
    if (ngram_ || may_force) {
        chained_ = chained_drafter(forest, processing_.get(), ngram_.get(), draft_runner.get(),
                                   !rule->reads_draft_distributions);
        drafter_ = chained_.get();
    }
    if (drafter_ && rule->keeps_descendants) num_descendants = most_descendants(config);
}

EngineCalls<std::vector<DraftLayer>> LoopParts::draft(const Beams& beams, std::size_t depth) {
    const std::size_t num_to_rest = policy_->rest();
    if (late_ && config.num_beams == 1) late_->rest(num_to_rest, beams);
    if (!drafter_ || num_to_rest) co_return std::vector<DraftLayer>{};
    if (late_ && !late_->can_draft(beams)) co_return std::vector<DraftLayer>{};
    std::size_t num_pending = 0;
    for (auto node : beams.nodes) num_pending += forest.slot(Role::target, node) < 0;
    policy_->begin(num_pending, config.max_new_tokens - depth - 1);
    auto layers = co_await draft_forest(forest, *drafter_, beams, *policy_, depth,
                                        rule->reads_draft_distributions, config.replacement);
    co_return std::move(layers);
}

void LoopParts::observe(const Iteration& iteration) {
    policy_->observe(iteration);
    stats->observe(iteration);
    if (drafter_) drafter_->observe(iteration);
    if (!tops_) return;
    tops_->observe(iteration.roots);
    for (const Beams& beams : iteration.committed) tops_->observe(beams);
}

}  // namespace dsbd
