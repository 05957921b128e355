// Drafting: the forest grown by the draft model, and the fixed policy.
#include "drafting/draft.hpp"

namespace dsbd {
namespace {

/// See `fixed_policy`.
class FixedDraftPolicy final : public DraftPolicy {
public:
    FixedDraftPolicy(std::vector<std::size_t> layer_widths, Propose propose)
        : layer_widths_(std::move(layer_widths)), propose_(std::move(propose)) {}

    void begin(std::size_t, std::size_t most_layers) override {
        layer_ = num_forced_ = 0;
        most_layers_ = most_layers;
    }
    bool takes_all(std::size_t num_candidates, std::size_t num_rows) override {
        return wants_layer(num_rows) && num_candidates <= layer_widths_[layer_];
    }
    bool wants_layer(std::size_t, std::size_t = 0) override {
        return layer_ < layer_widths_.size() && layer_ + num_forced_ < most_layers_;
    }
    Ints choose(JointDistribution& joint, std::size_t depth) override {
        return propose_(joint, layer_widths_[layer_++], depth);
    }
    Ints choose_forced(const JointDistribution& joint) override {
        if (num_forced_ == MOST_FORCED_LAYERS || layer_ + num_forced_ >= most_layers_) return {};
        ++num_forced_;
        return all_candidates(joint);
    }
    void observe(const Iteration&) override {}

private:
    std::vector<std::size_t> layer_widths_;
    Propose propose_;
    std::size_t layer_ = 0, num_forced_ = 0, most_layers_ = 0;
};

}  // namespace

std::unique_ptr<DraftPolicy> fixed_policy(std::vector<std::size_t> layer_widths, Propose propose) {
    return std::make_unique<FixedDraftPolicy>(std::move(layer_widths), std::move(propose));
}

EngineCalls<std::vector<DraftLayer>> draft_forest(Forest& forest, Drafter& drafter,
                                                  const Beams& beams, DraftPolicy& policy,
                                                  std::size_t depth, bool keeps_distributions,
                                                  bool repeats) {
    std::vector<DraftLayer> layers;
    Nodes nodes = beams.nodes;
    Floats log_u = beams.log_weights;
    Ints copies = beams.copies;
    const TakesAll takes_all = [&policy](std::size_t num_candidates, std::size_t num_rows) {
        return policy.takes_all(num_candidates, num_rows);
    };
    while (!(forest.has_ends && forest.are_absorbing(nodes))) {
        if (!drafter.forces() && !policy.wants_layer(0)) break;
        std::optional<LayerNeeds> needs = drafter.look_up(nodes, takes_all);
        if (!needs) break;
        const bool is_forced = needs->is_forced && !keeps_distributions;  // else drawn as they are
        if (!is_forced && !policy.wants_layer(needs->pending.size(), needs->num_whole)) break;
        co_await drafter.compute(std::move(needs->pending));
        JointDistribution joint = drafter.joint(nodes, log_u, copies);
        if (!joint.num_candidates()) break;  // none is known, or processors leave none
        const std::size_t depth_now = depth + layers.size();
        DraftLayer layer;
        layer.drawn = is_forced ? policy.choose_forced(joint) : policy.choose(joint, depth_now);
        if (layer.drawn.empty()) break;
        DistinctDraws distinct;
        if (repeats) distinct = distinct_in_order(layer.drawn);
        const Ints& chosen = repeats ? distinct.values : layer.drawn;
        const std::int64_t num_added = forest.num_added;
        nodes = layer.children = forest.descend(joint, chosen);
        layer.num_new = forest.num_added - num_added;
        log_u = entries_at(joint.log_weights, chosen);
        copies = std::move(distinct.copies);
        if (keeps_distributions) {
            layer.distribution = std::make_shared<JointDistribution>(std::move(joint));
        }
        layers.push_back(std::move(layer));
    }
    co_return layers;
}

DistinctDraws distinct_in_order(const Ints& drawn) {
    DistinctDraws found;
    for (const std::int64_t each : drawn) {
        const auto place = std::find(found.values.begin(), found.values.end(), each);
        if (place == found.values.end()) {
            found.values.push_back(each);
            found.copies.push_back(1);
        } else {
            ++found.copies[static_cast<std::size_t>(place - found.values.begin())];
        }
    }
    return found;
}

}  // namespace dsbd
