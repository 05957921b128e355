// Features of a request's nodes: which a feature draft reads, and where they lie.
#include "node_features.hpp"

namespace dsbd {

void align_prefixes(PrefixCache& target, PrefixCache& draft) {
    const std::size_t num_target = target.tokens.size();
    draft.shorten(num_target + 1);
    const std::size_t num_draft = draft.tokens.size();
    const bool is_kept = target.feature.num_tokens == num_target && num_target == num_draft &&
                         target.feature.place.features;
    if (num_draft <= num_target && !is_kept) target.shorten(num_draft ? num_draft - 1 : 0);
}

ParentFeatures parents_at(std::span<const FeaturePlace> places) {
    ParentFeatures found;
    for (const FeaturePlace& place : places) {
        found.rows.push_back(place.row);
        if (!place.features) {
            found.sources.push_back(ParentFeatures::ZEROS);
            continue;
        }
        auto known = std::find(found.forwards.begin(), found.forwards.end(), place.features);
        if (known == found.forwards.end()) known = found.forwards.insert(known, place.features);
        found.sources.push_back(known - found.forwards.begin());
    }
    return found;
}

void NodeFeatures::take(const ForwardResult& result, std::size_t num_rows) {
    for (std::size_t row = 0; row < num_rows; ++row) {
        places.push_back({result.features, static_cast<std::int64_t>(result.first_feature + row)});
    }
}

void NodeFeatures::keep(IntSpan slots) {
    std::vector<FeaturePlace> kept = entries_at(places, slots);
    kept.insert(kept.begin(), places[0]);
    places = std::move(kept);
}

void TargetFeatures::take_prompt(const ForwardResult& result, std::size_t start,
                                 std::size_t num_rows) {
    start_ = start;
    before_ = places[0];
    first_ = {result.features, static_cast<std::int64_t>(result.first_feature)};
    // A copy, so that the others need not be held.
    places[0] = {result.features->copied(result.first_feature + num_rows - 1), 0};
    view_.prefix.feature = {start + num_rows, places[0]};
}

ParentFeatures TargetFeatures::of_prompt(std::size_t start, std::size_t num_rows) const {
    std::vector<FeaturePlace> found;
    for (std::size_t position = start; position < start + num_rows; ++position) {
        FeaturePlace place;
        if (position > start_) {
            place = first_;
            place.row += static_cast<std::int64_t>(position - 1 - start_);
        } else if (position) {
            place = before_;  // there is one, see `align_prefixes`
        }
        found.push_back(place);
    }
    return parents_at(found);
}

Nodes DraftFeatures::ready(const Nodes& nodes) const {
    Nodes found;
    for (auto node : nodes) {
        const std::int64_t parent = forest_.parents[at(node)];
        if (forest_.slot(Role::target, parent) >= 0 || forest_.slot(Role::draft, parent) > 0) {
            found.push_back(node);
        }
    }
    return found;
}

ParentFeatures DraftFeatures::begin(const Nodes& nodes) {
    std::vector<FeaturePlace> found;
    next_parents_.clear();
    for (auto node : nodes) {
        const std::int64_t parent = forest_.parents[at(node)];
        const std::int64_t of_target = forest_.slot(Role::target, parent);
        const std::int64_t own = of_target < 0 ? forest_.slot(Role::draft, parent) : 0;
        found.push_back(own ? places[at(own)] : target_.places[at(of_target)]);
        next_parents_.push_back(own);
    }
    return parents_at(found);
}

void DraftFeatures::take(const ForwardResult& result, std::size_t num_rows) {
    NodeFeatures::take(result, num_rows);
    own_parents_.insert(own_parents_.end(), next_parents_.begin(), next_parents_.end());
}

void DraftFeatures::keep(IntSpan slots) {
    NodeFeatures::keep(slots);
    own_parents_.assign(1 + slots.size(), 0);  // what comes from own features is outdated
}

FeaturePlace DraftFeatures::own_of(std::size_t slot) const {
    return own_parents_[slot] ? places[at(own_parents_[slot])] : FeaturePlace{};
}

}  // namespace dsbd
