// Several requests on the same engines: their trees are one, verified in one forward.
#include "batched_decoder.hpp"

#include "drafting/cost_curve.hpp"

namespace dsbd {
namespace {

/// Return callers by the forward that they share: one for each source, unless the engine joins.
std::vector<std::vector<std::shared_ptr<LiveRequest>>> forward_groups(
    const std::vector<std::shared_ptr<LiveRequest>>& callers, bool joins_sources) {
    std::vector<std::vector<std::shared_ptr<LiveRequest>>> groups;
    for (const auto& live : callers) {
        auto place = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
            return joins_sources || group[0]->request.source == live->request.source;
        });
        if (place == groups.end()) place = groups.emplace(place);
        place->push_back(live);
    }
    return groups;
}

}  // namespace

EngineCall* LiveRequest::call_of(Role role) const {
    EngineCall* found = call();
    return found && found->role == role ? found : nullptr;
}

std::size_t LiveRequest::num_rows() const {
    std::size_t most = 0;
    for (Role role : ROLES) {
        const PreemptedRows* rows = dropped_rows(role);
        const auto& view = views[at(role)];
        if (view) most = std::max(most, rows ? rows->num_rows() : view->num_rows());
    }
    return most;
}

std::size_t LiveRequest::num_rows_at_end() const {
    std::size_t most = 0;
    for (const auto& view : views) {
        if (view) most = std::max(most, view->num_rows_at_end);
    }
    return most;
}

BatchedDecoder::BatchedDecoder(Engine& target, Engine* draft, BatchedDecoderOptions options)
    : options_(std::move(options)) {
    for (Role role : ROLES) {
        Engine* engine = role == Role::target ? &target : draft;
        if (!engine) continue;
        caches_[at(role)] =
            std::make_unique<SharedKVCache>(*engine, options_.max_rows, options_.shares_prefixes);
    }
}

BatchedDecoder::~BatchedDecoder() {
    for (const Live& live : std::vector<Live>(live_)) leave(*live);
}

std::size_t BatchedDecoder::num_used_rows() const {
    std::size_t most = 0;
    for (const auto& cache : caches_) {
        if (cache) most = std::max(most, cache->num_used());
    }
    return most;
}

void BatchedDecoder::keep_for(const RowIdentity& path) {
    for (const auto& cache : caches_) {
        if (cache) cache->keep_for(path);
    }
}

void BatchedDecoder::forget() {
    for (const auto& cache : caches_) {
        if (cache) cache->forget();
    }
}

BatchedDecoder::Live BatchedDecoder::join(DecodingRequest request) {
    const auto live = std::make_shared<LiveRequest>(std::move(request));
    const SourcePointer& source = live->request.source;
    live->request.num_sharers = [this] { return live_.size(); };
    for (Role role : ROLES) {
        const auto& cache = caches_[at(role)];
        if (!cache) continue;
        PrefixCache prefix;
        prefix.source = source;
        live->views[at(role)] = std::make_unique<CacheView>(*cache, std::move(prefix));
        cache->hold_source(source);
    }
    live_.push_back(live);
    try {
        if (!prompt_is_coming(*live)) start(*live);
    } catch (...) {
        leave(*live);
        throw;
    }
    return live;
}

void BatchedDecoder::preempt(LiveRequest& live) {
    std::erase_if(live_, [&](const Live& other) { return other.get() == &live; });
    if (live.preemption) {  // before all of its rows were there again
        live.preemption->interrupt();
    } else {
        live.preemption.emplace(live.views);
    }
}

void BatchedDecoder::resume(const Live& live) {
    live_.push_back(live);
    if (live->preemption->begin()) live->preemption.reset();
}

/// Return whether another request computes the prompt of one that has not started.
bool BatchedDecoder::prompt_is_coming(const LiveRequest& live) const {
    const DecodingRequest& request = live.request;
    if (!options_.shares_prefixes || request.config.prompt_logprobs) return false;
    return std::any_of(live_.begin(), live_.end(), [&](const Live& other) {
        return other->wanted && other->wanted->is_prefill &&
               other->request.source == request.source &&
               other->request.prompt_ids == request.prompt_ids;
    });
}

/// Run a request up to its first engine call, after the rows that it can share.
void BatchedDecoder::start(LiveRequest& live) {
    for (Role role : ROLES) {
        const auto& view = live.views[at(role)];
        if (!view || (view->spec().reads_features && !live.request.config.has_draft_model())) {
            continue;  // without features its rows could not be computed again
        }
        if (live.request.prompt_ids.empty()) continue;  // an error of `decoding_loop`
        if (live.request.chooses_start(role, view->spec())) continue;
        view->prefix = caches_[at(role)]->longest_prefix(live.request.reusable_prompt(role));
    }
    CacheView* draft = live.views[at(Role::draft)].get();
    live.loop.emplace(decoding_loop(live.request, *live.views[at(Role::target)], draft));
    live.wanted = live.loop->advance();
    if (!live.wanted) live.loop->result();  // an error: a call precedes any result
    live.waits_since = live.request.clock();
}

void BatchedDecoder::leave(LiveRequest& live) {
    if (live.has_left) return;
    live.has_left = true;
    std::erase_if(live_, [&](const Live& other) { return other.get() == &live; });
    live.wanted = nullptr;
    live.loop.reset();
    for (Role role : ROLES) {
        const auto& view = live.views[at(role)];
        if (!view) continue;
        PreemptedRows* rows = live.dropped_rows(role);
        UsedRows& used = rows ? static_cast<UsedRows&>(*rows) : *view;
        caches_[at(role)]->close_view(used);
        caches_[at(role)]->release_source(live.request.source);
    }
}

std::vector<Progress> BatchedDecoder::iterate() {
    std::vector<Progress> progress;
    start_waiting(progress);
    std::vector<LiveRequest*> prompts = next_prompts(Role::draft);
    while (true) {
        const std::vector<Live> drafting = callers(Role::draft, prompts);
        if (drafting.empty()) break;
        run(Role::draft, drafting, progress);
        prompts.clear();
    }
    run(Role::target, callers(Role::target, next_prompts(Role::target)), progress);
    return progress;
}

/// Start the requests whose prompts no other one computes any more.
void BatchedDecoder::start_waiting(std::vector<Progress>& progress) {
    for (const Live& live : std::vector<Live>(live_)) {
        if (live->loop || prompt_is_coming(*live)) continue;
        try {
            start(*live);
        } catch (...) {  // of this request alone
            end(live, std::current_exception(), progress);
        }
    }
}

/// Return whose prompts go on in this iteration: the oldest, no more rows than one piece.
std::vector<LiveRequest*> BatchedDecoder::next_prompts(Role role) const {
    std::vector<LiveRequest*> prompts;
    std::size_t num_rows = 0;
    for (const Live& live : live_) {
        const EngineCall* call = live->call_of(role);
        if (!call || !call->is_prefill) continue;
        num_rows += call->num_rows;
        if (!prompts.empty() && num_rows > PREFILL_CHUNK) break;
        prompts.push_back(live.get());
    }
    return prompts;
}

/// Return who waits for an engine, `prompts` first; callers with other prompts wait.
std::vector<BatchedDecoder::Live> BatchedDecoder::callers(
    Role role, const std::vector<LiveRequest*>& prompts) const {
    std::vector<Live> found, others;
    for (const Live& live : live_) {
        const EngineCall* call = live->call_of(role);
        if (!call) continue;
        // An engine keeps all logits of its last rows alone: prompts come first.
        if (is_among(prompts, live.get())) {
            found.push_back(live);
        } else if (!call->is_prefill) {
            others.push_back(live);
        }
    }
    found.insert(found.end(), others.begin(), others.end());
    return found;
}

/// Make the calls of the callers in as few forwards as can be; let each go on.
void BatchedDecoder::run(Role role, const std::vector<Live>& callers,
                         std::vector<Progress>& progress) {
    if (callers.empty()) return;
    const bool joins_sources = cache(role).engine().spec().joins_sources;
    for (auto& together : forward_groups(callers, joins_sources)) {
        std::erase_if(together, [&](const Live& live) { return !is_among(live_, live); });
        run_together(role, std::move(together), progress);  // those not preempted for others
    }
}

void BatchedDecoder::run_together(Role role, std::vector<Live> callers,
                                  std::vector<Progress>& progress) {
    if (!live_.empty() && is_among(callers, live_.back())) {
        const LiveRequest& youngest = *live_.back();
        if (youngest.request.preempts && youngest.request.preempts(*youngest.call())) {
            preempt_youngest(callers, progress);
        }
    }
    read_sources(role, callers, progress);
    make_room(role, callers, progress);
    if (callers.empty()) return;
    std::vector<EngineCall*> calls;
    for (const Live& live : callers) calls.push_back(live->call());
    const double began = options_.clock();
    std::vector<ForwardResult> results;
    try {
        results = cache(role).forward(calls);
    } catch (...) {  // of the engine: all who took part have lost their rows
        for (const Live& live : callers) end(live, std::current_exception(), progress);
        return;
    }
    const double seconds = options_.clock() - began;
    if (options_.costs) observe_call(*options_.costs, calls, seconds, results[0]);
    for (std::size_t i = 0; i < callers.size(); ++i) {
        if (const auto error = results[0].error_of(callers[i]->request.source.get())) {
            end(callers[i], error, progress);
            continue;
        }
        calls[i]->meter->count(calls[i]->num_rows, seconds, results[i]);
        advance(callers[i], results[i], progress);
    }
}

void BatchedDecoder::preempt_youngest(std::vector<Live>& callers, std::vector<Progress>& progress) {
    const Live youngest = live_.back();
    preempt(*youngest);
    progress.push_back({youngest, WasPreempted{}});
    std::erase(callers, youngest);
}

/// Let the engine read the sources of a call; end, and remove, whose source it cannot.
void BatchedDecoder::read_sources(Role role, std::vector<Live>& callers,
                                  std::vector<Progress>& progress) {
    const auto source_of = [](const Live& live) { return live->request.source; };
    const auto is_first = [&](const Live& live) {
        return source_of(live) == source_of(callers.front());
    };
    Engine& engine = cache(role).engine();
    if (!engine.spec().joins_sources || std::ranges::all_of(callers, is_first)) {
        return;  // an error is of the one source
    }
    for (const Live& live : std::vector<Live>(callers)) {
        try {
            engine.read_source(source_of(live));
        } catch (...) {
            std::erase(callers, live);
            end(live, std::current_exception(), progress);
        }
    }
}

/// Preempt the youngest of several requests until the calls of `callers` fit.
void BatchedDecoder::make_room(Role role, std::vector<Live>& callers,
                               std::vector<Progress>& progress) {
    while (live_.size() > 1) {
        std::size_t num_new = 0;
        for (const Live& live : callers) num_new += live->call()->num_rows;
        if (cache(role).has_room(num_new)) return;
        preempt_youngest(callers, progress);
    }
}

void BatchedDecoder::advance(const Live& live, const ForwardResult& result,
                             std::vector<Progress>& progress) {
    try {
        if (live->preemption) {
            if (live->preemption->advance(&result)) live->preemption.reset();
            return;
        }
        live->wanted->meter->waited += live->request.clock() - live->waits_since;
        live->wanted = live->loop->advance(&result);
        if (live->wanted) {
            live->waits_since = live->request.clock();
            return;
        }
        DecodeResult outcome = live->loop->result();
        leave(*live);
        progress.push_back({live, std::move(outcome)});
    } catch (...) {  // of this request alone
        end(live, std::current_exception(), progress);
    }
}

void BatchedDecoder::end(const Live& live, std::exception_ptr error,
                         std::vector<Progress>& progress) {
    leave(*live);
    progress.emplace_back().live = live;
    progress.back().event.emplace<std::exception_ptr>(std::move(error));
}

}  // namespace dsbd
