// What a request brings along in Python, as the core calls it: states, costs, a clock.
#include "callbacks.hpp"

#include <nanobind/stl/string.h>

#include "request.hpp"

namespace dsbd::python {
namespace {

nb::object one(std::int64_t number) { return array_of(IntSpan(&number, 1)); }

CostCurve curve_of(nb::handle curve) {
    CostCurve found;
    for (nb::handle rows : curve.attr("rows")) found.rows.push_back(nb::cast<double>(rows));
    for (nb::handle s : curve.attr("seconds")) found.seconds.push_back(nb::cast<double>(s));
    if (const nb::object seen = curve.attr("seen"); !seen.is_none()) {
        found.seen = {nb::cast<std::size_t>(seen[0]), nb::cast<std::size_t>(seen[1])};
    }
    return found;
}

}  // namespace

std::shared_ptr<const StopState> PyStopState::extended(std::int64_t token) const {
    nb::gil_scoped_acquire lock;
    return std::make_shared<PyStopState>(state_->attr("extended")(token));
}

PyConstraint::PyConstraint(nb::handle constraint)
    : constraint_(nb::borrow(constraint)), knows_last_(nb::hasattr(constraint, "ends_next")) {
    const nb::object most = nb::getattr(constraint, "most_tokens", nb::none());
    if (!most.is_none()) most_tokens_ = nb::cast<std::size_t>(most);
}

std::string PyConstraint::name() const {
    nb::gil_scoped_acquire lock;
    return nb::cast<std::string>(nb::str(constraint_->attr("name")));
}

Constraint::State PyConstraint::start(IntSpan prompt_ids) const {
    nb::gil_scoped_acquire lock;
    return number(constraint_->attr("start")(array_of(prompt_ids).attr("tolist")()));
}

Constraint::State PyConstraint::advance(State state, std::int64_t token) const {
    nb::gil_scoped_acquire lock;
    return number(constraint_->attr("advance")(states(state), one(token)));
}

bool PyConstraint::allow(State state, Ints& tokens, TokenBits& bits) const {
    nb::gil_scoped_acquire lock;
    const nb::object allowed = constraint_->attr("allowed")(states(state));
    if (nb::hasattr(allowed, "tokens")) {
        tokens = ints_of(allowed.attr("tokens"));
        return false;
    }
    const nb::object words = Names::get().contiguous(allowed.attr("bits"));
    const Memory<const std::uint32_t> memory(words);
    bits.assign(memory.data(), memory.data() + memory.size());
    return true;
}

bool PyConstraint::says(const char* method, State state) const {
    nb::gil_scoped_acquire lock;
    return is_true(constraint_->attr(method)(states(state))[0]);
}

void PyConstraint::keep_only(IntSpan states) const {
    std::erase_if(states_, [&](const auto& each) { return !is_among(states, each.first); });
}

/// Return a state as an array, (1,).
nb::object PyConstraint::states(State state) const {
    const auto found = states_.find(state);
    return found == states_.end() ? one(state) : **found->second;
}

Constraint::State PyConstraint::number(nb::handle states) const {
    if (!nb::cast<std::string>(states.attr("dtype").attr("kind")).starts_with("O")) {
        return ints_of(states).at(0);
    }
    states_.emplace(next_, held(states));
    return next_++;
}

std::shared_ptr<const EngineCosts> PyCosts::now() {
    nb::gil_scoped_acquire lock;
    const nb::object found = costs_->attr("now")();
    if (!latest_ || !found.is(**latest_)) {
        latest_ = held(found);
        copy_ = std::make_shared<const EngineCosts>(EngineCosts{curve_of(found.attr("target")),
                                                                curve_of(found.attr("draft")),
                                                                curve_of(found.attr("source"))});
    }
    return copy_;
}

void PyCosts::observe(CostKind kind, std::size_t num_rows, double seconds) {
    nb::gil_scoped_acquire lock;
    const char* names[] = {"target", "draft", "source"};
    costs_->attr("observe")(names[static_cast<std::size_t>(kind)], num_rows, seconds);
}

Clock clock_of(nb::handle clock) {
    if (clock.is(nb::module_::import_("time").attr("perf_counter"))) return seconds_now;
    return [clock = held(clock)] {
        nb::gil_scoped_acquire lock;
        return nb::cast<double>((**clock)());
    };
}

}  // namespace dsbd::python
