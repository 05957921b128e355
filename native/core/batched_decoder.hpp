// Several requests on the same engines: their trees are one, verified in one forward.
//
// Each request runs the loop of `decode` and gets what it would get alone; here its engine calls
// are made together with those of the others: as many draft calls as any request needs, then one
// call of the target. If the rows of a call do not fit a bounded cache, the youngest request is
// preempted: its rows are dropped, and computed again once it is resumed; what it returns stays the
// same.
#pragma once

#include <array>
#include <exception>
#include <variant>

#include "cache_view.hpp"
#include "decode.hpp"
#include "engine.hpp"
#include "engine_call.hpp"
#include "kv_cache.hpp"
#include "preemption.hpp"
#include "request.hpp"
#include "result.hpp"

namespace dsbd {

class Costs;

/// A request in a batched decoder, from `join` to its end or `leave`.
class LiveRequest {
public:
    explicit LiveRequest(DecodingRequest given) : request(std::move(given)) {}

    /// Rows that it has in the cache of one engine, those included to be computed again.
    std::size_t num_rows() const;
    /// Rows that a request that returned a result had in the cache of one engine.
    std::size_t num_rows_at_end() const;

    DecodingRequest request;

private:
    friend class BatchedDecoder;

    /// The engine call that the request waits for, null if it waits for none.
    EngineCall* call() const { return preemption ? preemption->wanted() : wanted; }
    EngineCall* call_of(Role role) const;
    PreemptedRows* dropped_rows(Role role) const {
        return preemption ? preemption->rows(role) : nullptr;
    }

    RoleViews views;
    std::optional<EngineCallLoop<DecodeResult>> loop;  // none: its prompt is computed for another
    EngineCall* wanted = nullptr;  // that the loop waits for
    double waits_since = 0.0;  // when it began to wait, on the clock of the request
    std::optional<Preemption> preemption;  // none while its rows are in the caches
    bool has_left = false;
};

/// The request has given up its rows: it waits until it is resumed.
struct WasPreempted {};

/// How a request ended, or that it was preempted. An exception is of any type, as callbacks are
/// callers' code: the other requests go on.
struct Progress {
    std::shared_ptr<LiveRequest> live;
    std::variant<WasPreempted, DecodeResult, std::exception_ptr> event;
};

struct BatchedDecoderOptions {
    std::optional<std::size_t> max_rows = {};  // most rows of each cache
    bool shares_prefixes = true;  // whether prompts that begin alike are computed once
    std::shared_ptr<Costs> costs = nullptr;  // learn from the calls
    Clock clock = seconds_now;
};

/// The live requests of a target and, if there is one, its draft.
class BatchedDecoder {
public:
    /// Take the engines, whose caches are used for nothing else.
    BatchedDecoder(Engine& target, Engine* draft, BatchedDecoderOptions options = {});
    ~BatchedDecoder();

    /// Rows that live requests use in the cache of one engine, shared ones counted once.
    std::size_t num_used_rows() const;
    std::size_t num_live() const { return live_.size(); }
    /// Drop all cache rows except the prefix that this path can reuse. No request may be live.
    void keep_for(const RowIdentity& path);
    /// Let no request begin with rows of those that are over.
    void forget();
    SharedKVCache& cache(Role role) { return *caches_[at(role)]; }

    /// Take in a request, which starts with the next iteration; or once its prompt is computed, if
    /// another request is computing the same one. Throws what `decoding_loop` throws, unless it
    /// starts later.
    std::shared_ptr<LiveRequest> join(DecodingRequest request);
    /// Run one iteration of every request; return which have ended or were preempted. The outputs
    /// of iterations go to the receivers of the requests.
    std::vector<Progress> iterate();
    /// Drop the rows of a live request, which waits until it is resumed.
    void preempt(LiveRequest& live);
    /// Let a preempted request go on, as the youngest, with the next iteration.
    void resume(const std::shared_ptr<LiveRequest>& live);
    /// Give up a request between two iterations; one that is over has left already.
    void leave(LiveRequest& live);

private:
    using Live = std::shared_ptr<LiveRequest>;

    bool prompt_is_coming(const LiveRequest& live) const;
    void start(LiveRequest& live);
    void start_waiting(std::vector<Progress>& progress);
    std::vector<LiveRequest*> next_prompts(Role role) const;
    std::vector<Live> callers(Role role, const std::vector<LiveRequest*>& prompts) const;
    void run(Role role, const std::vector<Live>& callers, std::vector<Progress>& progress);
    void run_together(Role role, std::vector<Live> callers, std::vector<Progress>& progress);
    void preempt_youngest(std::vector<Live>& callers, std::vector<Progress>& progress);
    void read_sources(Role role, std::vector<Live>& callers, std::vector<Progress>& progress);
    void make_room(Role role, std::vector<Live>& callers, std::vector<Progress>& progress);
    void advance(const Live& live, const ForwardResult& result, std::vector<Progress>& progress);
    void end(const Live& live, std::exception_ptr error, std::vector<Progress>& progress);

    std::array<std::unique_ptr<SharedKVCache>, 2> caches_;  // by engine
    BatchedDecoderOptions options_;
    std::vector<Live> live_;  // oldest first
};

}  // namespace dsbd
