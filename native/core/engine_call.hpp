// Engine calls that a request needs before it can go on, and coroutines that hand them out.
//
// A computation never makes an engine call. `co_await needed(call)` hands it to whoever runs the
// request, and goes on when that one has its result: so several requests share calls.
#pragma once

#include <array>
#include <coroutine>
#include <exception>
#include <variant>

#include "forward.hpp"

namespace dsbd {

enum class Role : std::uint8_t { target = 0, draft = 1 };
inline constexpr std::array ROLES = {Role::target, Role::draft};

/// An engine as an index.
inline std::size_t at(Role role) { return static_cast<std::size_t>(role); }

/// Seconds of a clock that never goes back.
using Clock = std::function<double()>;

/// The engine calls and rows of a request and their time, that of cache moves included.
struct Meter {
    std::int64_t calls = 0;  // engine calls that the request took part in
    std::int64_t rows = 0;   // its own rows in them
    double seconds = 0.0;    // of the calls; a call that several requests share counts for each
    double engine_s = 0.0;  // of these in the engine alone, without what the host does for a call
    double waited = 0.0;  // in which the request waited for its calls, others' included

    void count(std::size_t num_rows, double call_seconds, const ForwardResult& result) {
        ++calls;
        rows += static_cast<std::int64_t>(num_rows);
        seconds += call_seconds;
        engine_s += result.run_s ? *result.run_s + result.source_seconds : call_seconds;
    }
};

/// One forward that a request needs before it can go on.
struct EngineCall {
    Role role = Role::target;
    Meter* meter = nullptr;  // of the request, for this engine
    std::size_t num_rows = 0;  // rows that it appends
    /// Write the forward, given its first cache row; called once, when the call is made.
    std::function<void(std::size_t first_row, Forward& forward)> write;
    std::shared_ptr<const Source> source;
    bool is_prefill = false;  // whether it computes a part of the prompt
};

/// What a running computation waits for; one for each request.
struct CallSlot {
    EngineCall* wanted = nullptr;  // null: the computation is over, or has not begun
    const ForwardResult* answer = nullptr;  // set before it is resumed
    std::coroutine_handle<> waiting;  // the innermost coroutine, which has asked
};

namespace detail {

struct PromiseBase {
    CallSlot* slot = nullptr;
    std::coroutine_handle<> caller;
    std::exception_ptr error;

    std::suspend_always initial_suspend() noexcept { return {}; }
    void unhandled_exception() { error = std::current_exception(); }

    struct Final {
        bool await_ready() noexcept { return false; }
        template <class Promise>
        std::coroutine_handle<> await_suspend(std::coroutine_handle<Promise> done) noexcept {
            const auto caller = done.promise().caller;
            return caller ? caller : std::noop_coroutine();
        }
        void await_resume() noexcept {}
    };
    Final final_suspend() noexcept { return {}; }
};

template <class T>
struct Promise;

}  // namespace detail

/// A computation that needs engine calls. It starts when it is awaited, or by `EngineCallLoop`.
template <class T>
class [[nodiscard]] EngineCalls {
public:
    using promise_type = detail::Promise<T>;
    using Handle = std::coroutine_handle<promise_type>;

    explicit EngineCalls(Handle handle) : handle_(handle) {}
    EngineCalls(EngineCalls&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
    EngineCalls& operator=(EngineCalls&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~EngineCalls() {
        if (handle_) handle_.destroy();
    }

    bool await_ready() const noexcept { return false; }
    template <class Promise>
    std::coroutine_handle<> await_suspend(std::coroutine_handle<Promise> caller) noexcept {
        handle_.promise().slot = caller.promise().slot;
        handle_.promise().caller = caller;
        return handle_;
    }
    T await_resume() { return result(); }

    Handle handle() const { return handle_; }
    /// The result once it is done; rethrows what the computation threw.
    T result() {
        if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
        return handle_.promise().take();
    }

private:
    Handle handle_;
};

namespace detail {

template <class T>
struct Promise : PromiseBase {
    std::optional<T> value;
    EngineCalls<T> get_return_object() {
        return EngineCalls<T>(std::coroutine_handle<Promise>::from_promise(*this));
    }
    template <class U>
    void return_value(U&& found) {
        value.emplace(std::forward<U>(found));
    }
    T take() { return std::move(*value); }
};

template <>
struct Promise<void> : PromiseBase {
    EngineCalls<void> get_return_object() {
        return EngineCalls<void>(std::coroutine_handle<Promise>::from_promise(*this));
    }
    void return_void() {}
    void take() {}
};

}  // namespace detail

/// `co_await needed(call)` returns the ForwardResult of a call, valid until the next one.
struct needed {
    explicit needed(EngineCall& engine_call) : call(engine_call) {}
    bool await_ready() const noexcept { return false; }
    template <class Promise>
    void await_suspend(std::coroutine_handle<Promise> caller) noexcept {
        slot = caller.promise().slot;
        slot->wanted = &call;
        slot->waiting = caller;
    }
    const ForwardResult& await_resume() const noexcept { return *slot->answer; }

    EngineCall& call;
    CallSlot* slot = nullptr;
};

/// Runs a computation from one engine call to the next.
template <class T>
class EngineCallLoop {
public:
    explicit EngineCallLoop(EngineCalls<T> calls)
        : calls_(std::move(calls)), slot_(std::make_unique<CallSlot>()) {
        calls_.handle().promise().slot = slot_.get();
        slot_->waiting = calls_.handle();
    }

    /// Begin, or go on with the result of the call that was wanted. Return the next call that is
    /// needed, null once the computation is over; `result` then returns or rethrows its outcome.
    EngineCall* advance(const ForwardResult* answer = nullptr) {
        slot_->wanted = nullptr;
        slot_->answer = answer;
        std::exchange(slot_->waiting, {}).resume();
        return slot_->wanted;
    }
    T result() { return calls_.result(); }

private:
    EngineCalls<T> calls_;
    std::unique_ptr<CallSlot> slot_;  // its place does not change when the loop moves
};

}  // namespace dsbd
