// What a request brings along in Python, as the core calls it: states, costs, a clock.
#pragma once

#include <map>

#include "arrays.hpp"
#include "drafting/cost_curve.hpp"
#include "logits_processing/constraint.hpp"
#include "logits_processing/path_states.hpp"

namespace dsbd::python {

/// A stop state in Python.
class PyStopState final : public StopState {
public:
    explicit PyStopState(nb::object state)
        : has_ended_(is_true(state.attr("has_ended"))), state_(std::move(state)) {}
    bool has_ended() const override { return has_ended_; }
    std::shared_ptr<const StopState> extended(std::int64_t token) const override;

private:
    bool has_ended_;
    Held state_;
};

/// A constraint in Python, of one request; its states are numbered here unless they are numbers.
class PyConstraint final : public Constraint {
public:
    explicit PyConstraint(nb::handle constraint);
    std::string name() const override;
    State start(IntSpan prompt_ids) const override;
    State advance(State state, std::int64_t token) const override;
    bool allow(State state, Ints& tokens, TokenBits& bits) const override;
    void keep_only(IntSpan states) const override;
    bool accepts(State state) const override { return says("accepts", state); }
    bool has_ended(State state) const override { return says("has_ended", state); }
    bool ends_next(State state) const override { return knows_last_ && says("ends_next", state); }
    std::optional<std::size_t> most_tokens() const override { return most_tokens_; }

private:
    bool says(const char* method, State state) const;
    nb::object states(State state) const;
    State number(nb::handle states) const;

    Held constraint_;
    mutable std::map<State, HeldPointer> states_;  // arrays of one state each, by number
    mutable State next_ = 0;
    bool knows_last_;
    std::optional<std::size_t> most_tokens_;
};

/// Costs in Python.
class PyCosts final : public Costs {
public:
    explicit PyCosts(nb::handle costs) : costs_(nb::borrow(costs)) {}
    std::shared_ptr<const EngineCosts> now() override;
    void observe(CostKind kind, std::size_t num_rows, double seconds) override;

private:
    Held costs_;
    HeldPointer latest_;  // what `now` returned, and its copy
    std::shared_ptr<const EngineCosts> copy_;
};

/// Return a clock in Python; `time.perf_counter` is the core's own.
Clock clock_of(nb::handle clock);

}  // namespace dsbd::python
