// Preemption: the cache rows of a request are dropped, and computed again when it goes on.
#include "preemption.hpp"

#include <map>
#include <set>

#include "node_features.hpp"

namespace dsbd {
namespace {

/// The rows of a request with a feature draft, computed again side by side, by position.
///
/// A row of the draft comes from the same as before: from an own feature, which the request has
/// kept, or from the feature of the target's row of its parent, which has the same path of tokens.
class RecomputedPair {
public:
    RecomputedPair(PreemptedRows& target, PreemptedRows& draft);
    EngineCalls<void> compute();

private:
    Ints number_paths(const PreemptedRows& rows);
    void note(std::size_t start, std::size_t num_rows, const ForwardResult& result);
    EngineCalls<void> compute_draft();
    std::vector<FeaturePlace> next_places() const;

    PreemptedRows &target_, &draft_;
    // A path is a number: that of the pair of its parent's path and its token, as it was met first.
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> numbers_;
    Ints target_paths_, draft_parents_;              // by row: its path, and that of its parent
    std::map<std::size_t, FeaturePlace> own_;        // by row of the draft
    std::map<std::int64_t, FeaturePlace> of_target_;  // by path
};

RecomputedPair::RecomputedPair(PreemptedRows& target, PreemptedRows& draft)
    : target_(target), draft_(draft), target_paths_(number_paths(target)) {
    const Ints draft_paths = number_paths(draft);
    for (std::size_t row = 0; row < draft.num_rows(); ++row) {
        const std::int64_t parent = draft.parent(row);
        // The first row is that of path 0, seen by none.
        draft_parents_.push_back(parent < 0 ? 0 : draft_paths[at(parent)]);
    }
    for (std::size_t slot = 1; slot < draft.rows_by_slot().size(); ++slot) {
        const Ints& path = draft.rows_by_slot()[slot];
        const FeaturePlace place = draft.view().own_features(slot);
        if (!path.empty() && place.features) own_[at(path.back())] = place;
    }
}

/// Return the path of every row.
Ints RecomputedPair::number_paths(const PreemptedRows& rows) {
    Ints found;
    for (std::size_t row = 0; row < rows.num_rows(); ++row) {
        const std::int64_t parent = rows.parent(row);
        const std::int64_t unseen = rows.position(row) ? 0 : -1;
        const std::int64_t above = parent < 0 ? unseen : found[at(parent)];
        const auto next = static_cast<std::int64_t>(numbers_.size());
        found.push_back(numbers_.try_emplace({above, rows.token(row)}, next).first->second);
    }
    return found;
}

EngineCalls<void> RecomputedPair::compute() {
    PrefixCache of_target = target_.reusable(), of_draft = draft_.reusable();
    align_prefixes(of_target, of_draft);
    const std::size_t num_tokens = of_target.tokens.size();
    if (num_tokens && of_target.feature.num_tokens == num_tokens) {
        of_target_[target_paths_[num_tokens - 1]] = of_target.feature.place;
    }
    target_.begin(std::move(of_target));
    draft_.begin(std::move(of_draft));
    while (target_.num_computed() < target_.num_rows()) {
        const std::size_t start = target_.num_computed();
        const std::size_t size = std::min(target_.num_rows() - start, PREFILL_CHUNK);
        EngineCall call = target_.next_call(size, {}, true);
        const ForwardResult& result = co_await needed(call);
        note(start, size, result);
        co_await compute_draft();
    }
    co_await compute_draft();
    target_.end();
    draft_.end();
}

/// Note the features of rows of the target; forget those that no row needs any more.
void RecomputedPair::note(std::size_t start, std::size_t num_rows, const ForwardResult& result) {
    const auto first = static_cast<std::ptrdiff_t>(draft_.num_computed());
    const std::set<std::int64_t> needed(draft_parents_.begin() + first, draft_parents_.end());
    std::erase_if(of_target_, [&](const auto& each) { return !needed.count(each.first); });
    for (std::size_t i = 0; i < num_rows; ++i) {
        const std::int64_t path = target_paths_[start + i];
        if (!needed.count(path)) continue;
        of_target_[path] = {result.features, static_cast<std::int64_t>(result.first_feature + i)};
    }
}

/// Compute the next rows of the draft whose features are there.
EngineCalls<void> RecomputedPair::compute_draft() {
    while (draft_.num_computed() < draft_.num_rows()) {
        const std::vector<FeaturePlace> places = next_places();
        if (places.empty()) co_return;
        EngineCall call = draft_.next_call(places.size(), parents_at(places));
        co_await needed(call);
    }
}

/// Return what the next rows of the draft come from, as far as it is there.
std::vector<FeaturePlace> RecomputedPair::next_places() const {
    std::vector<FeaturePlace> found;
    const std::size_t first = draft_.num_computed();
    const std::size_t end = std::min(first + PREFILL_CHUNK, draft_.num_rows());
    for (std::size_t row = first; row < end; ++row) {
        FeaturePlace place;
        if (draft_.position(row)) {
            const auto own = own_.find(row);
            const auto other = of_target_.find(draft_parents_[row]);
            if (own == own_.end() && other == of_target_.end()) break;
            place = own == own_.end() ? other->second : own->second;
        }
        found.push_back(place);
    }
    return found;
}

}  // namespace

PreemptedRows::PreemptedRows(Role role, CacheView& view)
    : role_(role), view_(view), held_(view.rows_by_position()) {
    prefix.source = view.prefix.source;
    view.row_cache.remove(view);
}

EngineCalls<void> PreemptedRows::compute() {
    begin(reusable());
    while (num_computed() < num_rows()) {
        EngineCall call = next_call(std::min(num_rows() - num_computed(), PREFILL_CHUNK));
        co_await needed(call);
    }
    end();
}

void PreemptedRows::begin(PrefixCache shared) {
    rows_ = std::move(shared.rows);
    show_prefix();
    view_.row_cache.add(*this);
}

EngineCall PreemptedRows::next_call(std::size_t size, ParentFeatures reads, bool returns_features) {
    const auto write_rows = [=, this](std::size_t first_row, Forward& forward) {
        write(rows_.size(), size, first_row, forward);
        forward.parent_features = reads;
        for (std::size_t s = 0; returns_features && s < size; ++s) {
            forward.feature_rows.push_back(static_cast<std::int64_t>(s));
        }
    };
    return {role_, &view_.meter, size, write_rows, view_.prefix.source, true};
}

std::int64_t PreemptedRows::parent(std::size_t row) const {
    std::int64_t found = -1;
    held_.for_seen(row, [&](std::size_t above) {
        if (position(above) == position(row) - 1) found = static_cast<std::int64_t>(above);
    });
    return found;
}

/// Write the rows from number `start` on: each sees those before it of a slot that sees it.
void PreemptedRows::write(std::size_t start, std::size_t size, std::size_t first_row,
                          Forward& forward) {
    const auto begin = static_cast<std::ptrdiff_t>(start);
    const auto end = static_cast<std::ptrdiff_t>(start + size);
    const Ints &tokens = held_.tokens, &positions = held_.positions;
    forward.token_ids.assign(tokens.begin() + begin, tokens.begin() + end);
    forward.positions.assign(positions.begin() + begin, positions.begin() + end);
    forward.mask.reset(size, first_row + size);
    for (std::size_t row = first_row; row < first_row + size; ++row) {
        rows_.push_back(static_cast<std::int64_t>(row));
    }
    for (std::size_t s = 0; s < size; ++s) {
        held_.for_seen(start + s, [&](std::size_t row) {
            const bool is_hidden = view_.spec().reads_features && !position(row);  // see CacheView
            if (!is_hidden) forward.mask.set(s, at(rows_[row]));
        });
        forward.mask.set(s, first_row + s);
    }
    show_prefix();
}

/// Let another request share the rows of the prompt that are in the cache again.
void PreemptedRows::show_prefix() {
    const std::size_t num_shown = std::min(rows_.size(), view_.prefix.tokens.size());
    prefix.tokens = view_.prefix.tokens;
    prefix.rows = rows_;
    prefix.shorten(num_shown);
}

void PreemptedRows::end() {
    view_.row_cache.remove(*this);
    view_.row_cache.add(view_);
    view_.prefix.rows = prefix.rows;
    std::vector<Ints> rows_by_slot;
    for (const Ints& seen : held_.seen) rows_by_slot.push_back(entries_at(rows_, seen));
    view_.show(rows_by_slot);
}

void PreemptedRows::mark_used(Flags& is_used) const {
    for (auto row : rows_) is_used[at(row)] = 1;
}

void PreemptedRows::renumber(IntSpan new_rows) {
    for (auto& row : rows_) row = new_rows[at(row)];
    show_prefix();
}

Preemption::Preemption(const RoleViews& views) : views_(views) {
    for (Role role : ROLES) {
        if (const auto& view = views[at(role)]) {
            rows_[at(role)] = std::make_unique<PreemptedRows>(role, *view);
        }
    }
}

bool Preemption::begin() {
    computation_.emplace(compute());
    return advance(nullptr);
}

bool Preemption::advance(const ForwardResult* result) {
    wanted_ = computation_->advance(result);
    if (!wanted_) computation_->result();  // throws its error
    return !wanted_;
}

void Preemption::interrupt() {
    computation_.reset();
    wanted_ = nullptr;
    for (Role role : ROLES) {
        const auto& view = views_[at(role)];
        if (PreemptedRows* dropped = rows(role)) {
            view->row_cache.close_view(*dropped);
        } else if (view) {
            rows_[at(role)] = std::make_unique<PreemptedRows>(role, *view);
        }
    }
}

EngineCalls<void> Preemption::compute() {
    PreemptedRows* draft = rows(Role::draft);
    if (draft && draft->view().own_features) {
        RecomputedPair pair(*rows(Role::target), *draft);
        co_await pair.compute();
        rows_ = {};
    }
    for (Role role : ROLES) {
        if (!rows(role)) continue;
        co_await rows(role)->compute();
        rows_[at(role)].reset();
    }
}

}  // namespace dsbd
