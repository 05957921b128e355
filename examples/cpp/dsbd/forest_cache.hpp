// Rows and next-token laws of one engine over the forest, and which node sees which row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "forest.hpp"
#include "step_model.hpp"
#include "token_law.hpp"

namespace dsbd {

/// One engine's side of the forest: no node is computed twice while it is live.
///
/// The cache's first `num_shared_` rows are seen by every live node (the prompt and the beams'
/// common path); only the rows after them differ between nodes.
class ForestCache {
public:
    ForestCache(StepModel& model, const Forest& forest, const Warp& warp)
        : model_(model), forest_(forest), warp_(warp) {}

    std::size_t num_calls() const { return num_calls_; }

    /// Compute the prompt without its last token, which is the forest's root.
    void prefill(const std::vector<std::int64_t>& prompt) {
        model_.keep({});
        num_shared_ = prompt.size() - 1;
        for (std::size_t start = 0; start < num_shared_; start += prefill_chunk) {
            const std::size_t num_new = std::min(prefill_chunk, num_shared_ - start);
            StepInput input;
            for (std::size_t row = start; row < start + num_new; ++row) {
                input.token_ids.push_back(prompt[row]);
                input.positions.push_back(static_cast<std::int64_t>(row));
                input.mask.insert(input.mask.end(), row + 1, 1);
                input.mask.insert(input.mask.end(), start + num_new - row - 1, 0);
            }
            input.logit_rows = {0};  // not every head takes none; nobody looks at its logits
            step(input);
        }
    }

    /// Return whether the law after a node is known; an ended one needs none.
    bool is_computed(std::size_t node) const {
        return forest_[node].is_end || laws_.count(node) != 0;
    }

    /// Return the law after a computed node, nullptr for one that ends a sequence.
    const TokenLaw* law(std::size_t node) const {
        return forest_[node].is_end ? nullptr : &laws_.at(node);
    }

    /// Compute `nodes` and those of their ancestors that are not, in one engine call, if any.
    void compute(const std::vector<std::size_t>& nodes) {
        const std::set<std::size_t> missing = pending(nodes);
        if (missing.empty()) {
            return;
        }
        const std::size_t num_rows = model_.num_rows() + missing.size();
        StepInput input;
        for (const std::size_t node : missing) {
            const Node& added = forest_[node];
            std::vector<std::size_t> rows;
            if (added.parent != no_node) {
                rows = rows_seen_.at(added.parent);
            }
            rows.push_back(model_.num_rows() + input.token_ids.size());
            std::vector<std::uint8_t> sees(num_rows, 0);
            std::fill_n(sees.begin(), num_shared_, std::uint8_t{1});
            for (const std::size_t row : rows) {
                sees[row] = 1;
            }
            input.mask.insert(input.mask.end(), sees.begin(), sees.end());
            rows_seen_[node] = std::move(rows);
            input.logit_rows.push_back(static_cast<std::int64_t>(input.token_ids.size()));
            input.token_ids.push_back(added.token);
            input.positions.push_back(added.position);
        }
        const HeadOutput head = step(input);
        std::size_t row = 0;
        for (const std::size_t node : missing) {
            laws_[node] = token_law(head, row++, warp_, forest_.allowed(node));
        }
    }

    /// Return what of `nodes` is not computed, and the ancestors that are needed to compute it.
    std::set<std::size_t> needed_for(const std::set<std::size_t>& nodes) const {
        std::set<std::size_t> needed = pending({nodes.begin(), nodes.end()});
        for (const std::size_t node : std::set<std::size_t>(needed)) {
            if (forest_[node].parent != no_node) {
                needed.insert(forest_[node].parent);
            }
        }
        return needed;
    }

    /// Forget all but the kept nodes, and now and then the rows that none of them sees.
    void prune(const std::map<std::size_t, std::size_t>& renumbered) {
        std::map<std::size_t, TokenLaw> laws;
        std::map<std::size_t, std::vector<std::size_t>> rows_seen;
        for (const auto& [old_node, node] : renumbered) {
            if (const auto found = laws_.find(old_node); found != laws_.end()) {
                laws[node] = std::move(found->second);
                rows_seen[node] = std::move(rows_seen_.at(old_node));
            }
        }
        laws_ = std::move(laws);
        rows_seen_ = std::move(rows_seen);
        if (model_.num_rows() - num_shared_ > most_told_apart && !rows_seen_.empty()) {
            drop_unseen_rows();
        }
    }

private:
    static constexpr std::size_t prefill_chunk = 256;
    static constexpr std::size_t most_told_apart = 64;  // a masked row costs less than a move

    HeadOutput step(const StepInput& input) {
        ++num_calls_;
        return model_.step(input);
    }

    std::set<std::size_t> pending(const std::vector<std::size_t>& nodes) const {
        std::set<std::size_t> missing;  // in order: parents come before children
        for (std::size_t node : nodes) {
            while (node != no_node && !is_computed(node) && missing.insert(node).second) {
                node = forest_[node].parent;
            }
        }
        return missing;
    }

    /// Keep the rows that a node sees; the first ones that all see are shared from now on.
    void drop_unseen_rows() {
        std::map<std::size_t, std::size_t> num_seers;  // by row
        for (const auto& [node, rows] : rows_seen_) {
            for (const std::size_t row : rows) {
                ++num_seers[row];
            }
        }
        std::vector<std::size_t> kept(num_shared_);
        std::iota(kept.begin(), kept.end(), std::size_t{0});
        std::map<std::size_t, std::size_t> moved;  // new row by old row
        for (const auto& [row, num] : num_seers) {
            if (num == rows_seen_.size() && kept.size() == num_shared_) {
                ++num_shared_;
            }
            moved[row] = kept.size();
            kept.push_back(row);
        }
        if (kept.size() < model_.num_rows()) {
            model_.keep(kept);
        }
        for (auto& [node, rows] : rows_seen_) {
            for (std::size_t& row : rows) {
                row = moved.at(row);
            }
            rows.erase(rows.begin(), std::lower_bound(rows.begin(), rows.end(), num_shared_));
        }
    }

    StepModel& model_;
    const Forest& forest_;
    Warp warp_;
    std::size_t num_calls_ = 0;
    std::size_t num_shared_ = 0;
    std::map<std::size_t, TokenLaw> laws_;                           // by node
    std::map<std::size_t, std::vector<std::size_t>> rows_seen_;      // after the shared ones
};

}  // namespace dsbd
