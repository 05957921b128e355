// An engine in Python, of any provider, as the core calls it.
#pragma once

#include "arrays.hpp"
#include "engine.hpp"

namespace dsbd::python {

/// A source in Python; equal ones are one object, as rows share those of the same alone.
struct PySource final : Source {
    explicit PySource(nb::handle given);
    std::span<const std::int64_t> token_ids() const override { return ids; }

    Held object;
    Ints ids;  // if it is a tuple of tokens
};

/// Sources of live requests and of rows in a cache; equal ones become one object.
class Sources {
public:
    /// Return a source; null: None.
    SourcePointer of(nb::handle source);

private:
    std::vector<std::weak_ptr<const PySource>> known_;
};

class PyEngine final : public Engine, private FullLogits {
public:
    explicit PyEngine(nb::handle engine);

    const EngineSpec& spec() const override { return spec_; }
    std::size_t num_rows() const override;
    std::size_t num_free_rows() const override;
    void expect(std::size_t num_rows) override;
    ForwardResult forward(const Forward& forward) override;
    void keep(IntSpan rows) override;
    void read_source(const SourcePointer& source) override;
    void release_source(const Source& source) override;

    /// What a call has raised that is no Exception, such as SystemExit: it ends everything.
    nb::object fatal;

private:
    nb::object called(const Forward& forward);
    std::span<const float> row(std::size_t row) override;
    void read(std::size_t row, IntSpan tokens, std::span<double> logits) override;
    nb::object in_python(const Forward& forward) const;
    Logits logits_of(nb::handle logits, std::size_t num_rows);

    nb::object engine_, python_spec_;
    bool grows_at_a_cost_ = false, grows_in_steps_ = false;
    EngineSpec spec_;
    // Of the latest forward: its logits, and all logits of rows of a top-k head that were read.
    Memory<const float> values_, top_logits_, logsumexp_;
    Memory<const std::int64_t> top_ids_;
    nb::object full_;
    std::vector<Memory<const float>> read_;
};

}  // namespace dsbd::python
