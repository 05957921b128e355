// An engine in Python, of any provider, as the core calls it.
#include "python_engine.hpp"

#include <array>
#include <limits>

namespace dsbd::python {
namespace {

/// Features of a forward in Python.
struct PyFeatures final : Features {
    explicit PyFeatures(nb::object given) : object(std::move(given)) {}
    std::shared_ptr<const Features> copied(std::size_t row) const override {
        nb::gil_scoped_acquire lock;
        return std::make_shared<PyFeatures>(object->attr("copied")(row));
    }

    Held object;
};

nb::object object_of(const Source* source) {
    return source ? *static_cast<const PySource*>(source)->object : nb::none();
}

nb::object object_of(const Features& features) {
    return *static_cast<const PyFeatures&>(features).object;
}

std::size_t number_or(nb::handle number, std::size_t other) {
    return number.is_none() ? other : nb::cast<std::size_t>(number);
}

/// By byte of a mask, lowest first, eight cells of an array.
const auto CELLS = [] {
    std::array<std::array<std::uint8_t, 8>, 256> cells{};
    for (std::size_t byte = 0; byte < 256; ++byte) {
        for (std::size_t bit = 0; bit < 8; ++bit) cells[byte][bit] = byte >> bit & 1;
    }
    return cells;
}();

/// Return a mask as an array, (S, N) bool, and whether no row sees a later one.
std::pair<nb::object, bool> array_of(const BitRows& mask) {
    const Names& names = Names::get();
    const std::size_t num_rows = mask.num_rows(), num_columns = mask.num_columns();
    nb::object array = names.empty(nb::make_tuple(num_rows, num_columns), names.boolean);
    std::uint8_t* cells = Memory<std::uint8_t>(array).data();
    bool is_ordered = true;
    for (std::size_t s = 0; s < num_rows; ++s, cells += num_columns) {
        const std::uint64_t* words = mask.row(s);
        for (std::size_t c = 0; c < num_columns; c += 8) {
            const std::size_t byte = words[c / 64] >> (c % 64) & 255;
            std::copy_n(CELLS[byte].begin(), std::min<std::size_t>(8, num_columns - c), cells + c);
        }
        for (std::size_t c = num_columns - num_rows + s + 1; c < num_columns; ++c) {
            is_ordered &= !cells[c];
        }
    }
    return {array, is_ordered};
}

nb::object array_of(const ParentFeatures& parents) {
    nb::list forwards;
    for (const auto& features : parents.forwards) forwards.append(object_of(*features));
    return Names::get().parent_features(nb::tuple(forwards), python::array_of(parents.sources),
                                        python::array_of(parents.rows));
}

std::exception_ptr as_exception(nb::handle error) {
    set_error(error);
    return std::make_exception_ptr(nb::python_error());
}

}  // namespace

const Names& Names::get() {
    static const Names* names = [] {  // never let go: the interpreter may have ended by then
        const nb::object numpy = nb::module_::import_("numpy");
        const nb::object forward = nb::module_::import_("dsbd_forward.forward");
        const nb::object features = nb::module_::import_("dsbd_forward.features");
        const nb::object errors = nb::module_::import_("dsbd_ort.decoding.errors");
        return new Names{numpy.attr("empty"),          numpy.attr("ascontiguousarray"),
                         numpy.attr("int64"),          numpy.attr("float32"),
                         numpy.attr("bool_"),          forward.attr("Forward"),
                         forward.attr("RowSources"),   features.attr("ParentFeatures"),
                         errors.attr("DecodingError"), errors.attr("ConstraintError"),
                         errors.attr("ModelError")};
    }();
    return *names;
}

PySource::PySource(nb::handle given) : object(nb::borrow(given)) {
    if (!nb::isinstance<nb::tuple>(given)) return;
    for (nb::handle token : given) {
        if (!nb::isinstance<nb::int_>(token)) {
            ids.clear();
            return;
        }
        ids.push_back(nb::cast<std::int64_t>(token));
    }
}

SourcePointer Sources::of(nb::handle source) {
    if (source.is_none()) return nullptr;
    std::erase_if(known_, [](const auto& each) { return each.expired(); });
    for (const auto& each : known_) {
        const auto known = each.lock();
        if (known && known->object->equal(source)) return known;
    }
    auto made = std::make_shared<const PySource>(source);
    known_.push_back(made);
    return made;
}

PyEngine::PyEngine(nb::handle engine)
    : engine_(nb::borrow(engine)), python_spec_(engine.attr("spec")) {
    const nb::object head = python_spec_.attr("head"), memory = python_spec_.attr("memory");
    const auto is_set = [](const nb::object& spec, const char* name) {
        return is_true(spec.attr(name));
    };
    spec_.vocab_size = nb::cast<std::size_t>(python_spec_.attr("vocab_size"));
    spec_.context_length = number_or(python_spec_.attr("context_length"), 0);
    spec_.num_top_logits = nb::cast<std::size_t>(head.attr("num_top_logits"));
    spec_.keeps_full_logits = is_set(head, "keeps_full_logits");
    spec_.returns_features = is_set(python_spec_, "returns_features");
    spec_.reads_features = is_set(python_spec_, "reads_features");
    spec_.reads_source = is_set(python_spec_, "reads_source");
    spec_.joins_sources = is_set(python_spec_, "joins_sources");
    spec_.folds_rows = is_set(memory, "folds_rows");
    grows_at_a_cost_ = is_set(memory, "grows_at_a_cost");
    grows_in_steps_ = is_set(memory, "grows_in_steps");
}

std::size_t PyEngine::num_rows() const {
    nb::gil_scoped_acquire lock;
    return nb::cast<std::size_t>(engine_.attr("num_rows"));
}

std::size_t PyEngine::num_free_rows() const {
    if (!grows_in_steps_) return std::numeric_limits<std::size_t>::max();
    nb::gil_scoped_acquire lock;
    const auto number = nb::cast<std::int64_t>(engine_.attr("num_free_rows"));
    return static_cast<std::size_t>(std::max(number, std::int64_t{0}));  // of a closed one below 0
}

void PyEngine::expect(std::size_t num_rows) {
    if (!grows_at_a_cost_) return;
    nb::gil_scoped_acquire lock;
    engine_.attr("expect")(num_rows);
}

void PyEngine::keep(IntSpan rows) {
    nb::gil_scoped_acquire lock;
    engine_.attr("keep")(python::array_of(rows));
}

void PyEngine::read_source(const SourcePointer& source) {
    if (!spec_.joins_sources) return;
    nb::gil_scoped_acquire lock;
    engine_.attr("read_source")(object_of(source.get()));
}

void PyEngine::release_source(const Source& source) {
    if (!spec_.joins_sources) return;
    nb::gil_scoped_acquire lock;
    engine_.attr("release_source")(object_of(&source));
}

nb::object PyEngine::called(const Forward& forward) {
    try {
        return engine_.attr("forward")(in_python(forward));
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_Exception)) fatal = nb::borrow(error.value());
        throw;
    }
}

ForwardResult PyEngine::forward(const Forward& forward) {
    nb::gil_scoped_acquire lock;
    full_.reset();
    read_.clear();
    const nb::object found = called(forward);
    ForwardResult result;
    result.logits = logits_of(found.attr("logits"), forward.logit_rows.size());
    if (nb::object features = found.attr("features"); !features.is_none()) {
        result.features = std::make_shared<PyFeatures>(std::move(features));
        result.first_feature = nb::cast<std::size_t>(found.attr("first_feature"));
    }
    if (const nb::object reading = found.attr("reading"); !reading.is_none()) {
        result.source_tokens = nb::cast<std::size_t>(reading.attr("num_tokens"));
        result.source_seconds = nb::cast<double>(reading.attr("seconds"));
        result.source_own_seconds = nb::cast<double>(reading.attr("own_seconds"));
    }
    if (const nb::object run_s = found.attr("run_s"); !run_s.is_none()) {
        result.run_s = nb::cast<double>(run_s);
    }
    result.sets_up = is_true(found.attr("sets_up"));
    if (const nb::object failed = found.attr("failed"); !failed.is_none()) {
        for (const auto& source : forward.sources) {
            const nb::object error = failed.attr("get")(object_of(source.get()));
            if (!error.is_none()) result.failed.emplace_back(source.get(), as_exception(error));
        }
    }
    return result;
}

/// Return a forward as Python's engines take it, in memory of its own.
nb::object PyEngine::in_python(const Forward& forward) const {
    const Names& names = Names::get();
    const auto [mask, is_ordered] = array_of(forward.mask);
    nb::object features = nb::none(), parents = nb::none(), source = nb::none(), all = nb::none();
    if (!forward.feature_rows.empty()) features = python::array_of(forward.feature_rows);
    if (spec_.reads_features) parents = array_of(forward.parent_features);
    if (forward.sources.size() == 1) source = object_of(forward.sources[0].get());
    if (forward.sources.size() > 1) {
        nb::list distinct;
        for (const auto& each : forward.sources) distinct.append(object_of(each.get()));
        all = names.row_sources(nb::tuple(distinct), python::array_of(forward.source_of_row));
    }
    return names.forward(python::array_of(forward.token_ids), python::array_of(forward.positions),
                         mask, python::array_of(forward.logit_rows), features, parents, source, all,
                         is_ordered);
}

Logits PyEngine::logits_of(nb::handle logits, std::size_t num_rows) {
    const Names& names = Names::get();
    logits.attr("check")(python_spec_, num_rows);
    Logits found;
    found.num_rows = num_rows;
    found.vocab_size = spec_.vocab_size;
    const auto floats = [&](const nb::object& array) {
        return Memory<const float>(names.contiguous(array, names.float32));
    };
    if (const nb::object whole = logits.attr("whole"); !whole.is_none()) {
        values_ = floats(whole);
        found.values = values_.data();
        return found;
    }
    top_ids_ = Memory<const std::int64_t>(names.contiguous(logits.attr("top_ids"), names.int64));
    top_logits_ = floats(logits.attr("top_logits"));
    logsumexp_ = floats(logits.attr("logsumexp"));
    found.num_top = spec_.num_top_logits;
    found.top_ids = top_ids_.data();
    found.top_logits = top_logits_.data();
    found.logsumexp = logsumexp_.data();
    full_ = logits.attr("full");
    if (!full_.is_none()) found.full = this;
    return found;
}

void PyEngine::read(std::size_t row, IntSpan tokens, std::span<double> logits) {
    nb::gil_scoped_acquire lock;
    const Names& names = Names::get();
    const Ints rows(tokens.size(), static_cast<std::int64_t>(row));
    const nb::object found =
        full_.attr("read_tokens")(python::array_of(rows), python::array_of(tokens));
    const Memory<const float> memory(names.contiguous(found, names.float32));
    std::copy_n(memory.data(), memory.size(), logits.begin());
}

std::span<const float> PyEngine::row(std::size_t row) {
    nb::gil_scoped_acquire lock;
    const Names& names = Names::get();
    const std::int64_t rows[] = {static_cast<std::int64_t>(row)};
    const nb::object found = full_.attr("read")(python::array_of(rows));
    read_.emplace_back(names.contiguous(found, names.float32));
    return {read_.back().data(), read_.back().size()};
}

}  // namespace dsbd::python
