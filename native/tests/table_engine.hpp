// Engines of tests: the logits of every path were written down by Python.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
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

/// The path of each row that has a feature, so a wrong feature is found out.
struct TableFeatures final : Features {
    TableFeatures(bool of_target, std::vector<Ints> of_rows)
        : is_target(of_target), paths(std::move(of_rows)) {}
    std::shared_ptr<const Features> copied(std::size_t row) const override {
        return std::make_shared<TableFeatures>(is_target, std::vector<Ints>{paths[row]});
    }

    bool is_target;
    std::vector<Ints> paths;
};

/// What an engine of a pair with a feature draft has to do with features.
enum class FeatureKind : std::uint8_t { none, returned, read };

/// An engine given by a table. It finds each node's path through the mask, so a wrong mask, row or
/// position gives wrong logits, as with a real engine.
class TableEngine final : public Engine, private FullLogits {
public:
    /// num_top: logits of a top-k head, which keeps the others until the next forward; 0: all.
    /// context_length: positions that it has; 0: no limit.
    TableEngine(const Table& table, std::size_t vocab_size, std::size_t num_top, double& now,
                FeatureKind features = FeatureKind::none, std::size_t context_length = 0)
        : table_(table), now_(now) {
        spec_.returns_features = features == FeatureKind::returned;
        spec_.reads_features = features == FeatureKind::read;
        spec_.vocab_size = vocab_size;
        spec_.context_length = context_length;
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
        if (forward.mask.num_columns() != num_rows()) throw std::logic_error("width of the mask");
        rows_.clear();
        paths_.clear();
        for (std::size_t s = 0; s < forward.num_new(); ++s) paths_.push_back(path(forward, s));
        for (auto row : forward.logit_rows) rows_.push_back(&after(forward, row));
        ForwardResult result = head();
        if (spec_.reads_features) result.features = std::make_shared<TableFeatures>(false, paths_);
        if (!forward.feature_rows.empty()) {
            std::vector<Ints> asked;
            for (auto row : forward.feature_rows) {
                asked.push_back(paths_.at(static_cast<std::size_t>(row)));
            }
            result.features = std::make_shared<TableFeatures>(true, std::move(asked));
        }
        return result;
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
    /// Return the path of a new row by what it sees; a feature draft's, by its parent's feature.
    Ints path(const Forward& forward, std::size_t s) const {
        Ints seen = seen_path(forward, s);
        if (spec_.reads_features && forward.positions[s]) {
            const TableFeatures* parents = parents_of(forward, s);
            if (!parents) throw std::logic_error("a row has no feature of its parent");
            const std::size_t row = static_cast<std::size_t>(forward.parent_features.rows.at(s));
            Ints whole = parents->paths.at(row);
            whole.push_back(forward.token_ids[s]);
            if (!std::equal(whole.begin() + 1, whole.end(), seen.begin() + 1, seen.end())) {
                throw std::logic_error("a row comes from the feature of another node");
            }
            return whole;
        }
        if (std::find(seen.begin(), seen.end(), -1) != seen.end()) {
            throw std::logic_error("a node does not see the positions 0 to its own");
        }
        return seen;
    }

    static const TableFeatures* parents_of(const Forward& forward, std::size_t s) {
        const std::int64_t source = forward.parent_features.sources.at(s);
        if (source == ParentFeatures::ZEROS) return nullptr;
        const auto number = static_cast<std::size_t>(source);
        const Features& features = *forward.parent_features.forwards.at(number);
        return dynamic_cast<const TableFeatures*>(&features);
    }

    Ints seen_path(const Forward& forward, std::size_t s) const {
        const auto length = static_cast<std::int64_t>(spec_.context_length);
        if (length && forward.positions[s] >= length) throw std::logic_error("beyond the context");
        Ints found(static_cast<std::size_t>(forward.positions[s]) + 1, -1);
        for (std::size_t row = 0; row < num_rows(); ++row) {
            if (!forward.mask.get(s, row)) continue;
            auto& place = found.at(static_cast<std::size_t>(positions_[row]));
            if (place != -1) throw std::logic_error("a node sees two rows of one position");
            place = tokens_[row];
        }
        return found;
    }

    const std::vector<float>& after(const Forward& forward, std::int64_t row) const {
        const auto s = static_cast<std::size_t>(row);
        Ints key = paths_[s];
        if (spec_.reads_features) {  // its logits are others if it came from an own feature
            const TableFeatures* parents = parents_of(forward, s);
            if (parents && !parents->is_target) key.push_back(-1);
        }
        const auto found = table_.find(key);
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
    std::vector<Ints> paths_;  // of the rows of the latest forward
    std::vector<const std::vector<float>*> rows_;  // of the latest forward
    Ints ids_;
    std::vector<float> values_, sums_;
};

}  // namespace dsbd::tests
