// The module dsbd_ort_native: the core's decoder, for dsbd_ort.decoding.native_decoder.
#include <map>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "batched_decoder.hpp"
#include "callbacks.hpp"
#include "drafting/acceptance.hpp"
#include "drafting/ngram.hpp"
#include "error.hpp"
#include "python_engine.hpp"

namespace dsbd::python {
namespace {

nb::dict in_python(const DecodingStats& stats) {
    nb::dict found;
#define FIELD(name) found[#name] = stats.name
    FIELD(num_iterations);
    FIELD(num_draft_tokens);
    FIELD(num_accepted_tokens);
    FIELD(num_draft_layers);
    FIELD(num_accepted_layers);
    FIELD(mean_acceptance_length);
    FIELD(draft_acceptance_rate);
    FIELD(acceptance_histogram);
    FIELD(mean_beam_width);
    FIELD(num_prompt_tokens);
    FIELD(num_output_tokens);
    FIELD(num_cached_tokens);
    FIELD(target_rows);
    FIELD(draft_rows);
    FIELD(target_calls);
    FIELD(draft_calls);
    FIELD(time_to_first_token_s);
    FIELD(time_per_output_token_s);
    FIELD(tokens_per_s);
    FIELD(draft_s);
    FIELD(target_s);
    FIELD(host_s);
#undef FIELD
    found["drafter"] = nb::str(stats.drafter.data(), stats.drafter.size());
    return found;
}

nb::dict in_python(const DecodedSequence& sequence) {
    nb::dict found;
    const std::string_view reason = name_of(sequence.finish_reason);
    found["token_ids"] = sequence.token_ids;
    found["token_logprobs"] = sequence.token_logprobs;
    found["logprob"] = sequence.logprob;
    found["score"] = sequence.score;
    found["finish_reason"] = nb::str(reason.data(), reason.size());
    found["top_logprobs"] = sequence.top_logprobs;
    return found;
}

nb::object in_python(const DecodeResult& result) {
    nb::list sequences;
    for (const auto& sequence : result.sequences) sequences.append(in_python(sequence));
    nb::object scored = nb::none();
    if (const auto& of_prompt = result.prompt_logprobs) {
        scored = nb::make_tuple(of_prompt->token_logprobs, of_prompt->top_logprobs);
    }
    return nb::make_tuple(sequences, in_python(result.stats), result.distribution_bytes_peak,
                          scored);
}

/// Return the exception in Python; one of Python's own as it is.
nb::object in_python(const std::exception_ptr& error) {
    const Names& names = Names::get();
    try {
        std::rethrow_exception(error);
    } catch (nb::python_error& raised) {
        return nb::borrow(raised.value());
    } catch (const ModelError& raised) {
        return names.model_error(raised.what());
    } catch (const ConstraintError& raised) {
        return names.constraint_error(raised.what());
    } catch (const Error& raised) {
        return names.decoding_error(raised.what());
    } catch (const std::bad_alloc& raised) {
        return nb::borrow(PyExc_MemoryError)(raised.what());
    } catch (const std::exception& raised) {
        return nb::borrow(PyExc_RuntimeError)(raised.what());
    }
}

void translate(const std::exception_ptr& error, void*) { set_error(in_python(error)); }

/// The tokens that all live hypotheses agree on since the iteration before.
struct Output {
    Ints tokens;
    Floats logprobs;
    std::vector<TokenLogprobs> tops;  // empty without `top_logprobs`
    DecodingStats stats;
};

/// A live request, as Python sees it.
struct Handle {
    std::shared_ptr<LiveRequest> live;
    std::vector<Output> outputs;  // that nobody has taken yet
    std::size_t num_agreed = 0;

    void take(const IterationOutput& output) {
        Output& found = outputs.emplace_back();
        const Ints& agreed = output.agreed_tokens();
        found.tokens.assign(agreed.begin() + static_cast<std::ptrdiff_t>(num_agreed), agreed.end());
        found.logprobs = output.agreed_logprobs(num_agreed);
        if (output.tops) found.tops = output.tops->of(output.agreed(num_agreed));
        num_agreed = agreed.size();
        found.stats = output.recorder.stats(static_cast<std::int64_t>(num_agreed));
    }
};

/// The numbers of a PCG64 generator of numpy, which is left as it is.
RandomGenerator random_of(nb::handle generator) {
    const nb::object state = generator.attr("bit_generator").attr("state")["state"];
    const auto number = [&](const char* name) {
        const nb::object whole = state[name];
        const nb::object low = whole & nb::int_(~std::uint64_t{0}), high = whole >> nb::int_(64);
        return Uint128{nb::cast<std::uint64_t>(high)} << 64 | nb::cast<std::uint64_t>(low);
    };
    return RandomGenerator(number("state"), number("inc"));
}

/// See BatchedDecoder of dsbd_ort.decoding.batched_decoder.
class Decoder {
public:
    Decoder(nb::handle target, nb::handle draft, std::optional<std::size_t> max_rows,
            bool shares_prefixes, nb::handle costs, nb::handle clock)
        : target_(target) {
        if (!draft.is_none()) draft_.emplace(draft);
        BatchedDecoderOptions options{max_rows, shares_prefixes, costs_of(costs), clock_of(clock)};
        decoder_.emplace(target_, draft_ ? &*draft_ : nullptr, std::move(options));
    }

    std::shared_ptr<Handle> join(nb::handle request, const std::string& options,
                                 std::shared_ptr<AcceptanceEstimator> estimator,
                                 std::shared_ptr<NGramPool> pool) {
        const auto handle = std::make_shared<Handle>();
        const nb::object costs = request.attr("costs"), stop = request.attr("stop");
        const nb::object constraint = request.attr("running_constraint");
        DecodingConfig config = decoding_config(options, {!costs.is_none(), draft_.has_value()});
        if (!constraint.is_none()) {
            config.constraint = std::make_shared<PyConstraint>(constraint);
            if (const auto most = config.constraint->most_tokens()) config.end_after(*most);
        }
        DecodingRequest found{ints_of(request.attr("prompt_ids")), std::move(config),
                              random_of(request.attr("rng"))};
        if (!stop.is_none()) found.stop = std::make_shared<PyStopState>(stop);
        found.clock = clock_of(request.attr("clock"));
        found.costs = costs_of(costs);
        found.estimator = std::move(estimator);
        found.ngram_pool = std::move(pool);
        found.source = sources_.of(request.attr("source"));
        const nb::object begin = request.attr("begin_token"), copied = request.attr("copied_ids");
        if (!begin.is_none()) found.begin_token = nb::cast<std::int64_t>(begin);
        if (PyCallable_Check(copied.ptr())) {
            found.late_ids = [copied = held(copied)] {
                nb::gil_scoped_acquire lock;
                return ints_of((**copied)());
            };
        } else {
            found.copied_ids = ints_of(copied);
        }
        if (const nb::object preempts = request.attr("preempts"); !preempts.is_none()) {
            found.preempts = [preempts = held(preempts)](const EngineCall&) {
                nb::gil_scoped_acquire lock;
                return is_true((**preempts)(nb::none()));
            };
        }
        found.on_iteration = [taker = handle.get()](const IterationOutput& output) {
            taker->take(output);
        };
        handle->live = decoder_->join(std::move(found));
        handles_.push_back(handle);
        return handle;
    }

    /// Return (handle, event) of every output and ending: an Output, a result, an exception, or
    /// None for a request that was preempted.
    nb::list iterate() {
        std::vector<Progress> progress;
        {
            nb::gil_scoped_release unlocked;
            progress = decoder_->iterate();
        }
        raise(target_.fatal);
        if (draft_) raise(draft_->fatal);
        nb::list found;
        const auto handles = handles_;
        for (const auto& handle : handles) {
            for (Output& output : handle->outputs) {
                found.append(nb::make_tuple(handle, std::move(output)));
            }
            handle->outputs.clear();
        }
        for (const Progress& each : progress) {
            const auto ended = std::ranges::find(handles_, each.live, &Handle::live);
            const nb::object handle = nb::cast(*ended);
            nb::object event = nb::none();
            if (const auto* result = std::get_if<DecodeResult>(&each.event)) {
                event = in_python(*result);
            } else if (const auto* error = std::get_if<std::exception_ptr>(&each.event)) {
                event = in_python(*error);
            }
            if (!event.is_none()) handles_.erase(ended);
            found.append(nb::make_tuple(handle, event));
        }
        return found;
    }

    void preempt(Handle& handle) { decoder_->preempt(*handle.live); }
    void resume(Handle& handle) { decoder_->resume(handle.live); }
    void leave(Handle& handle) {
        decoder_->leave(*handle.live);
        std::erase_if(handles_, [&](const auto& other) { return other.get() == &handle; });
    }
    void keep_for(nb::handle tokens, nb::handle source) {
        decoder_->keep_for({ints_of(tokens), sources_.of(source)});
    }
    void forget() { decoder_->forget(); }
    std::size_t num_live() const { return decoder_->num_live(); }
    std::size_t num_used_rows() const { return decoder_->num_used_rows(); }

private:
    static void raise(nb::handle error) {
        if (!error.is_valid()) return;
        set_error(error);
        throw nb::python_error();
    }

    std::shared_ptr<Costs> costs_of(nb::handle costs) {
        if (costs.is_none()) return nullptr;
        std::erase_if(costs_, [](const auto& each) { return each.second.expired(); });
        auto& known = costs_[costs.ptr()];
        std::shared_ptr<PyCosts> found = known.lock();
        if (!found) known = found = std::make_shared<PyCosts>(costs);
        return found;
    }

    std::map<PyObject*, std::weak_ptr<PyCosts>> costs_;  // those in use hold their objects
    Sources sources_;
    PyEngine target_;
    std::optional<PyEngine> draft_;
    std::vector<std::shared_ptr<Handle>> handles_;  // also those that were preempted
    std::optional<BatchedDecoder> decoder_;         // the last member: it ends first
};

}  // namespace

NB_MODULE(dsbd_ort_native, module) {
    module.attr("__version__") = DSBD_VERSION;
#ifdef NDEBUG
    nb::set_leak_warnings(false);  // a process may end with pipelines open
#endif
    nb::register_exception_translator(translate);
    nb::class_<AcceptanceEstimator>(module, "AcceptanceEstimator")
        .def(nb::new_([](std::optional<double> agreement) {
                 return std::make_shared<AcceptanceEstimator>(agreement);
             }),
             nb::arg("agreement").none());
    nb::class_<NGramPool>(module, "NGramPool")
        .def(nb::new_([](std::size_t size) { return std::make_shared<NGramPool>(size); }))
        .def("add_text", [](NGramPool& pool, const Ints& tokens) { pool.add_text(tokens); });
    nb::class_<Output>(module, "Output")
        .def_ro("tokens", &Output::tokens)
        .def_ro("logprobs", &Output::logprobs)
        .def_ro("tops", &Output::tops)
        .def("stats", [](const Output& output) { return in_python(output.stats); });
    nb::class_<Handle>(module, "Handle")
        .def_prop_ro("num_rows", [](const Handle& each) { return each.live->num_rows(); })
        .def_prop_ro("num_rows_at_end",
                     [](const Handle& each) { return each.live->num_rows_at_end(); });
    nb::class_<Decoder>(module, "Decoder")
        .def(nb::init<nb::handle, nb::handle, std::optional<std::size_t>, bool, nb::handle,
                      nb::handle>(),
             nb::arg("target"), nb::arg("draft").none(), nb::arg("max_rows").none(),
             nb::arg("shares_prefixes"), nb::arg("costs").none(), nb::arg("clock"))
        .def("join", &Decoder::join, nb::arg("request"), nb::arg("options"), nb::arg("estimator"),
             nb::arg("pool").none())
        .def("iterate", &Decoder::iterate)
        .def("preempt", &Decoder::preempt)
        .def("resume", &Decoder::resume)
        .def("leave", &Decoder::leave)
        .def("keep_for", &Decoder::keep_for, nb::arg("tokens"), nb::arg("source").none())
        .def("forget", &Decoder::forget)
        .def_prop_ro("num_live", &Decoder::num_live)
        .def_prop_ro("num_used_rows", &Decoder::num_used_rows);
}

}  // namespace dsbd::python
