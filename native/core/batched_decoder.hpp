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

/// A request of a batched decoder, from `join` to its end or `leave`.
class BatchMember {
public:
    /// Rows that it has in the cache of one engine, those included to be computed again.
    std::size_t num_rows() const;
    /// Rows that a request that returned a result had in the cache of one engine.
    std::size_t num_rows_at_end() const;

    explicit BatchMember(DecodingRequest given) : request(std::move(given)) {}

    DecodingRequest request;

private:
    friend class BatchedDecoder;

    EngineCall* call() const { return wanted_again ? wanted_again : wanted; }
    EngineCall* call_of(Role role) const;

    std::array<std::unique_ptr<CacheView>, 2> views;  // by engine; null: there is no draft
    Preempted preempted;  // rows that must be computed again before
    std::optional<EngineCallLoop<DecodeResult>> loop;
    std::optional<EngineCallLoop<void>> recomputation;  // of preempted rows, once it is resumed
    EngineCall* wanted = nullptr;  // that the loop waits for
    EngineCall* wanted_again = nullptr;  // that the recomputation waits for
    double waits_since = 0.0;  // when it began to wait, on the clock of the request
    bool has_started = false;  // before, the prompt is being computed for another
    bool has_left = false;
};

/// The request has given up its rows: it waits until it is resumed.
struct WasPreempted {};

/// How a request ended, or that it was preempted. An exception is of any type, as callbacks are
/// callers' code: the other requests go on.
struct Progress {
    std::shared_ptr<BatchMember> member;
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
    std::size_t num_members() const { return members_.size(); }
    /// Drop all cache rows except the prefix that this path can reuse. No request may be live.
    void keep_for(const RowIdentity& path);
    /// Let no request begin with rows of those that are over.
    void forget();
    SharedKVCache& cache(Role role) { return *caches_[at(role)]; }

    /// Take in a request, which starts with the next iteration; or once its prompt is computed, if
    /// another request is computing the same one. Throws what `decoding_loop` throws, unless it
    /// starts later.
    std::shared_ptr<BatchMember> join(DecodingRequest request);
    /// Run one iteration of every request; return which have ended or were preempted. The outputs
    /// of iterations go to the receivers of the requests.
    std::vector<Progress> iterate();
    /// Drop the rows of a live request, which waits until it is resumed.
    void preempt(BatchMember& member);
    /// Let a preempted request go on, as the youngest, with the next iteration.
    void resume(const std::shared_ptr<BatchMember>& member);
    /// Give up a request between two iterations; one that is over has left already.
    void leave(BatchMember& member);

private:
    using Member = std::shared_ptr<BatchMember>;

    bool prompt_is_coming(const BatchMember& member) const;
    void start(BatchMember& member);
    void start_waiting(std::vector<Progress>& progress);
    std::vector<BatchMember*> next_prompts(Role role) const;
    std::vector<Member> callers(Role role, const std::vector<BatchMember*>& prompts) const;
    void run(Role role, const std::vector<Member>& members, std::vector<Progress>& progress);
    void run_together(Role role, std::vector<Member> members, std::vector<Progress>& progress);
    void preempt_youngest(std::vector<Member>& members, std::vector<Progress>& progress);
    void read_sources(Role role, std::vector<Member>& members, std::vector<Progress>& progress);
    void make_room(Role role, std::vector<Member>& members, std::vector<Progress>& progress);
    void recompute(BatchMember& member, const ForwardResult* result);
    void advance(const Member& member, const ForwardResult& result,
                 std::vector<Progress>& progress);
    void end(const Member& member, std::exception_ptr error, std::vector<Progress>& progress);

    std::array<std::unique_ptr<SharedKVCache>, 2> caches_;  // by engine
    BatchedDecoderOptions options_;
    std::vector<Member> members_;  // oldest first
};

}  // namespace dsbd
