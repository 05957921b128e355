// Several requests on the same engines: their trees are one, verified in one forward.
#include "batched_decoder.hpp"

#include "drafting/cost_curve.hpp"

namespace dsbd {
namespace {

constexpr std::array ROLES = {Role::target, Role::draft};

/// Return members by the forward that they share: one for each source, unless the engine joins.
std::vector<std::vector<std::shared_ptr<BatchMember>>> forward_groups(
    const std::vector<std::shared_ptr<BatchMember>>& members, bool joins_sources) {
    std::vector<std::vector<std::shared_ptr<BatchMember>>> groups;
    for (const auto& member : members) {
        auto place = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
            return joins_sources || group[0]->request.source == member->request.source;
        });
        if (place == groups.end()) place = groups.emplace(place);
        place->push_back(member);
    }
    return groups;
}

}  // namespace

EngineCall* BatchMember::call_of(Role role) const {
    EngineCall* found = call();
    return found && found->role == role ? found : nullptr;
}

std::size_t BatchMember::num_rows() const {
    std::size_t most = 0;
    for (Role role : ROLES) {
        const PreemptedRows* rows = rows_of(preempted, role);
        const auto& view = views[at(role)];
        if (view) most = std::max(most, rows ? rows->num_rows() : view->num_rows());
    }
    return most;
}

std::size_t BatchMember::num_rows_at_end() const {
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
    for (const Member& member : std::vector<Member>(members_)) leave(*member);
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

BatchedDecoder::Member BatchedDecoder::join(DecodingRequest request) {
    const auto member = std::make_shared<BatchMember>(std::move(request));
    const SourcePointer& source = member->request.source;
    member->request.num_sharers = [this] { return members_.size(); };
    for (Role role : ROLES) {
        const auto& cache = caches_[at(role)];
        if (!cache) continue;
        PrefixCache prefix;
        prefix.source = source;
        member->views[at(role)] = std::make_unique<CacheView>(*cache, std::move(prefix));
        cache->hold_source(source);
    }
    members_.push_back(member);
    try {
        if (!prompt_is_coming(*member)) start(*member);
    } catch (...) {
        leave(*member);
        throw;
    }
    return member;
}

void BatchedDecoder::preempt(BatchMember& member) {
    std::erase_if(members_, [&](const Member& other) { return other.get() == &member; });
    member.recomputation.reset();
    member.wanted_again = nullptr;
    for (Role role : ROLES) {
        if (auto* rows = rows_of(member.preempted, role)) {  // again, before all of them were there
            caches_[at(role)]->close_view(*rows);
        } else if (auto& view = member.views[at(role)]) {
            member.preempted.push_back(std::make_unique<PreemptedRows>(role, *view));
        }
    }
}

void BatchedDecoder::resume(const Member& member) {
    member->recomputation.emplace(recomputed(member->preempted));
    members_.push_back(member);
    recompute(*member, nullptr);
}

/// Return whether another request computes the prompt of one that has not started.
bool BatchedDecoder::prompt_is_coming(const BatchMember& member) const {
    const DecodingRequest& request = member.request;
    if (!options_.shares_prefixes || request.config.prompt_logprobs) return false;
    return std::any_of(members_.begin(), members_.end(), [&](const Member& other) {
        return other->wanted && other->wanted->is_prefill &&
               other->request.source == request.source &&
               other->request.prompt_ids == request.prompt_ids;
    });
}

/// Run a request up to its first engine call, after the rows that it can share.
void BatchedDecoder::start(BatchMember& member) {
    member.has_started = true;
    for (Role role : ROLES) {
        const auto& view = member.views[at(role)];
        if (!view || (view->spec().reads_features && !member.request.config.has_draft_model())) {
            continue;  // without features its rows could not be computed again
        }
        if (member.request.prompt_ids.empty()) continue;  // an error of `decoding_loop`
        if (member.request.chooses_start(role, view->spec())) continue;
        view->prefix = caches_[at(role)]->longest_prefix(member.request.reusable_prompt(role));
    }
    CacheView* draft = member.views[at(Role::draft)].get();
    member.loop.emplace(decoding_loop(member.request, *member.views[at(Role::target)], draft));
    member.wanted = member.loop->advance();
    if (!member.wanted) member.loop->result();  // an error: a call precedes any result
    member.waits_since = member.request.clock();
}

void BatchedDecoder::leave(BatchMember& member) {
    if (member.has_left) return;
    member.has_left = true;
    std::erase_if(members_, [&](const Member& other) { return other.get() == &member; });
    member.wanted = member.wanted_again = nullptr;
    member.recomputation.reset();
    member.loop.reset();
    for (Role role : ROLES) {
        const auto& view = member.views[at(role)];
        if (!view) continue;
        PreemptedRows* rows = rows_of(member.preempted, role);
        UsedRows& used = rows ? static_cast<UsedRows&>(*rows) : *view;
        caches_[at(role)]->close_view(used);
        caches_[at(role)]->release_source(member.request.source);
    }
}

std::vector<Progress> BatchedDecoder::iterate() {
    std::vector<Progress> progress;
    start_waiting(progress);
    std::vector<BatchMember*> prompts = next_prompts(Role::draft);
    while (true) {
        const std::vector<Member> drafting = callers(Role::draft, prompts);
        if (drafting.empty()) break;
        run(Role::draft, drafting, progress);
        prompts.clear();
    }
    run(Role::target, callers(Role::target, next_prompts(Role::target)), progress);
    return progress;
}

/// Start the requests whose prompts no other one computes any more.
void BatchedDecoder::start_waiting(std::vector<Progress>& progress) {
    for (const Member& member : std::vector<Member>(members_)) {
        if (member->has_started || prompt_is_coming(*member)) continue;
        try {
            start(*member);
        } catch (...) {  // of this request alone
            end(member, std::current_exception(), progress);
        }
    }
}

/// Return whose prompts go on in this iteration: the oldest, no more rows than one piece.
std::vector<BatchMember*> BatchedDecoder::next_prompts(Role role) const {
    std::vector<BatchMember*> prompts;
    std::size_t num_rows = 0;
    for (const Member& member : members_) {
        const EngineCall* call = member->call_of(role);
        if (!call || !call->is_prefill) continue;
        num_rows += call->num_rows;
        if (!prompts.empty() && num_rows > PREFILL_CHUNK) break;
        prompts.push_back(member.get());
    }
    return prompts;
}

/// Return who waits for an engine, `prompts` first; members with other prompts wait.
std::vector<BatchedDecoder::Member> BatchedDecoder::callers(
    Role role, const std::vector<BatchMember*>& prompts) const {
    std::vector<Member> found, others;
    for (const Member& member : members_) {
        const EngineCall* call = member->call_of(role);
        if (!call) continue;
        // An engine keeps all logits of its last rows alone: prompts come first.
        if (is_among(prompts, member.get())) {
            found.push_back(member);
        } else if (!call->is_prefill) {
            others.push_back(member);
        }
    }
    found.insert(found.end(), others.begin(), others.end());
    return found;
}

/// Make the calls of the members in as few forwards as can be; let each go on.
void BatchedDecoder::run(Role role, const std::vector<Member>& members,
                         std::vector<Progress>& progress) {
    if (members.empty()) return;
    const bool joins_sources = cache(role).engine().spec().joins_sources;
    for (auto& together : forward_groups(members, joins_sources)) {
        std::erase_if(together, [&](const Member& member) { return !is_among(members_, member); });
        run_together(role, std::move(together), progress);  // those not preempted for others
    }
}

void BatchedDecoder::run_together(Role role, std::vector<Member> members,
                                  std::vector<Progress>& progress) {
    if (!members_.empty() && is_among(members, members_.back())) {
        const BatchMember& youngest = *members_.back();
        if (youngest.request.preempts && youngest.request.preempts(*youngest.call())) {
            preempt_youngest(members, progress);
        }
    }
    read_sources(role, members, progress);
    make_room(role, members, progress);
    if (members.empty()) return;
    std::vector<EngineCall*> calls;
    for (const Member& member : members) calls.push_back(member->call());
    const double began = options_.clock();
    std::vector<ForwardResult> results;
    try {
        results = cache(role).forward(calls);
    } catch (...) {  // of the engine: all who took part have lost their rows
        for (const Member& member : members) end(member, std::current_exception(), progress);
        return;
    }
    const double seconds = options_.clock() - began;
    if (options_.costs) observe_call(*options_.costs, calls, seconds, results[0]);
    for (std::size_t i = 0; i < members.size(); ++i) {
        if (const auto error = results[0].error_of(members[i]->request.source.get())) {
            end(members[i], error, progress);
            continue;
        }
        calls[i]->meter->count(calls[i]->num_rows, seconds, results[i]);
        advance(members[i], results[i], progress);
    }
}

void BatchedDecoder::preempt_youngest(std::vector<Member>& members,
                                      std::vector<Progress>& progress) {
    const Member youngest = members_.back();
    preempt(*youngest);
    progress.push_back({youngest, WasPreempted{}});
    std::erase(members, youngest);
}

/// Let the engine read the sources of a call; end, and remove, whose source it cannot.
void BatchedDecoder::read_sources(Role role, std::vector<Member>& members,
                                  std::vector<Progress>& progress) {
    const auto source_of = [](const Member& member) { return member->request.source; };
    const auto is_first = [&](const Member& member) {
        return source_of(member) == source_of(members.front());
    };
    Engine& engine = cache(role).engine();
    if (!engine.spec().joins_sources || std::ranges::all_of(members, is_first)) {
        return;  // an error is of the one source
    }
    for (const Member& member : std::vector<Member>(members)) {
        try {
            engine.read_source(source_of(member));
        } catch (...) {
            std::erase(members, member);
            end(member, std::current_exception(), progress);
        }
    }
}

/// Preempt the youngest of several requests until the calls of `members` fit.
void BatchedDecoder::make_room(Role role, std::vector<Member>& members,
                               std::vector<Progress>& progress) {
    while (members_.size() > 1) {
        std::size_t num_new = 0;
        for (const Member& member : members) num_new += member->call()->num_rows;
        if (cache(role).has_room(num_new)) return;
        preempt_youngest(members, progress);
    }
}

/// Begin to compute rows again, or go on with the result of a call.
void BatchedDecoder::recompute(BatchMember& member, const ForwardResult* result) {
    member.wanted_again = member.recomputation->advance(result);
    if (member.wanted_again) return;
    member.recomputation->result();
    member.recomputation.reset();
}

void BatchedDecoder::advance(const Member& member, const ForwardResult& result,
                             std::vector<Progress>& progress) {
    try {
        if (member->recomputation) {
            recompute(*member, &result);
            return;
        }
        member->wanted->meter->waited += member->request.clock() - member->waits_since;
        member->wanted = member->loop->advance(&result);
        if (member->wanted) {
            member->waits_since = member->request.clock();
            return;
        }
        DecodeResult outcome = member->loop->result();
        leave(*member);
        progress.push_back({member, std::move(outcome)});
    } catch (...) {  // of this request alone
        end(member, std::current_exception(), progress);
    }
}

void BatchedDecoder::end(const Member& member, std::exception_ptr error,
                         std::vector<Progress>& progress) {
    leave(*member);
    progress.emplace_back().member = member;
    progress.back().event.emplace<std::exception_ptr>(std::move(error));
}

}  // namespace dsbd
