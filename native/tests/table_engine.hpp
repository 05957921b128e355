// Engines of tests: the logits of every path were written down by Python.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "error.hpp"

namespace dsbd::tests {

/// Logits by path of tokens, (vocab_size + 1,) float32 each: the last is their log-sum-exp.
using Table = std::map<Ints, std::vector<float>>;

/// An engine given by a table. It finds each node's path through the mask, so a wrong mask, row or
/// position gives wrong logits, as with a real engine.
class TableEngine final : public Engine, private FullLogits {
public:
    /// num_top: logits of a top-k head, which keeps the others until the next forward; 0: all.
    TableEngine(const Table& table, std::size_t vocab_size, std::size_t num_top, double& now)
        : table_(table), now_(now) {
        spec_.vocab_size = vocab_size;
        spec_.num_top_logits = num_top;
        spec_.keeps_full_logits = num_top > 0;
    }

    const EngineSpec& spec() const override { return spec_; }
    std::size_t num_rows() const override { return tokens_.size(); }
    std::size_t num_free_rows() const override { return std::size_t{1} << 30; }
    void expect(std::size_t) override {}

    ForwardResult forward(const Forward& forward) override {
        rows_of_calls.push_back(static_cast<std::int64_t>(forward.num_new()));
        now_ += 1e-3 + 1e-5 * static_cast<double>(forward.num_new());
        for (std::size_t s = 0; s < forward.num_new(); ++s) {
            tokens_.push_back(forward.token_ids[s]);
            positions_.push_back(forward.positions[s]);
        }
        if (forward.mask.num_columns() != num_rows()) throw std::logic_error("mask of another width");
        rows_.clear();
        for (std::size_t s = 0; s < forward.num_new(); ++s) check_path(forward, s);
        for (auto row : forward.logit_rows) rows_.push_back(&after(forward, row));
        return head();
    }

    void keep(std::span<const std::int64_t> rows) override {
        for (std::size_t i = 0; i < rows.size(); ++i) {
            if (i && rows[i] <= rows[i - 1]) throw std::logic_error("rows are not increasing");
            tokens_[i] = tokens_[static_cast<std::size_t>(rows[i])];
            positions_[i] = positions_[static_cast<std::size_t>(rows[i])];
        }
        tokens_.resize(rows.size());
        positions_.resize(rows.size());
    }

    Ints rows_of_calls;

private:
    Ints path(const Forward& forward, std::size_t s) const {
        Ints found(static_cast<std::size_t>(forward.positions[s]) + 1, -1);
        for (std::size_t row = 0; row < num_rows(); ++row) {
            if (!forward.mask.get(s, row)) continue;
            auto& place = found.at(static_cast<std::size_t>(positions_[row]));
            if (place != -1) throw std::logic_error("a node sees two rows of one position");
            place = tokens_[row];
        }
        return found;
    }

    void check_path(const Forward& forward, std::size_t s) const {
        const Ints found = path(forward, s);
        if (std::find(found.begin(), found.end(), -1) != found.end()) {
            throw std::logic_error("a node does not see the positions 0 to its own");
        }
    }

    const std::vector<float>& after(const Forward& forward, std::int64_t row) const {
        const auto found = table_.find(path(forward, static_cast<std::size_t>(row)));
        if (found == table_.end()) throw std::logic_error("Python has not computed this node");
        return found->second;
    }

    ForwardResult head() {
        ForwardResult result;
        result.logits.num_rows = rows_.size();
        result.logits.vocab_size = spec_.vocab_size;
        ids_.clear();
        values_.clear();
        sums_.clear();
        for (const auto* row : rows_) add_row(*row);
        if (!spec_.num_top_logits) {
            result.logits.values = values_.data();
            return result;
        }
        result.logits.num_top = spec_.num_top_logits;
        result.logits.top_ids = ids_.data();
        result.logits.top_logits = values_.data();
        result.logits.logsumexp = sums_.data();
        result.logits.full = this;
        return result;
    }

    void add_row(const std::vector<float>& row) {
        if (!spec_.num_top_logits) {
            values_.insert(values_.end(), row.begin(), row.end() - 1);
            return;
        }
        Ints order(spec_.vocab_size);
        std::iota(order.begin(), order.end(), std::int64_t{0});
        std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
            return row[static_cast<std::size_t>(a)] > row[static_cast<std::size_t>(b)];
        });
        for (std::size_t i = 0; i < spec_.num_top_logits; ++i) {
            ids_.push_back(order[i]);
            values_.push_back(row[static_cast<std::size_t>(order[i])]);
        }
        sums_.push_back(row.back());
    }

    std::span<const float> row(std::size_t row) override {
        return std::span(*rows_.at(row)).first(spec_.vocab_size);
    }

    const Table& table_;
    double& now_;
    EngineSpec spec_;
    Ints tokens_, positions_;
    std::vector<const std::vector<float>*> rows_;  // of the latest forward
    Ints ids_;
    std::vector<float> values_, sums_;
};

}  // namespace dsbd::tests
