// Rows of one engine's key/value cache, of one request or of several: append, keep, trim.
#include "kv_cache.hpp"

namespace dsbd {
namespace {

/// So many rows that no view sees, and a quarter of the others, may lie between these: an unused
/// row costs a masked column, dropping it moves those after it in every transformer layer. No
/// quarter if rows are folded, which waits for unused ones to be dropped.
constexpr std::size_t MOST_UNUSED_ROWS = 64;
/// More unused rows than these are dropped before the cache grows, which copies it whole.
constexpr std::size_t WORTH_DROPPING = 32;
/// Closed views whose rows may serve a request that begins alike.
constexpr std::size_t MOST_CLOSED = 256;

std::size_t count_of(const Flags& flags) {
    return static_cast<std::size_t>(std::count(flags.begin(), flags.end(), 1));
}

void append_shifted(Ints& rows, const Ints& more, std::size_t first) {
    for (auto row : more) rows.push_back(row + static_cast<std::int64_t>(first));
}

}  // namespace

std::size_t PrefixCache::num_common(const RowIdentity& identity) const {
    if (source != identity.source) return 0;
    const auto ends = std::ranges::mismatch(tokens, identity.tokens);
    return static_cast<std::size_t>(ends.in1 - tokens.begin());
}

RowIdentity PrefixCache::identity_of(const RowIdentity& path) const {
    RowIdentity found{{}, path.source};
    const auto size = [](std::size_t wanted, const Ints& known) {
        return static_cast<std::ptrdiff_t>(std::min(wanted, known.size()));
    };
    found.tokens.assign(tokens.begin(), tokens.begin() + size(num_begin, tokens));
    found.tokens.insert(found.tokens.end(), path.tokens.begin() + size(start, path.tokens),
                        path.tokens.end());
    return found;
}

void PrefixCache::shorten(std::size_t num_tokens) {
    if (tokens.size() > num_tokens) tokens.resize(num_tokens);
    if (rows.size() > num_tokens) rows.resize(num_tokens);
    if (feature.num_tokens > num_tokens) feature = {};
}

SharedKVCache::SharedKVCache(Engine& engine, std::optional<std::size_t> max_rows,
                             bool shares_prefixes)
    : engine_(engine), max_rows_(max_rows), shares_prefixes_(shares_prefixes) {
    tokens_.resize(engine.num_rows());
    positions_.resize(engine.num_rows());
}

std::size_t SharedKVCache::num_used() const { return count_of(used()); }

void SharedKVCache::open_view(UsedRows& view) {
    const PrefixCache& prefix = view.prefix;
    for (std::size_t i = 0; i < prefix.tokens.size(); ++i) {
        const auto row = at(prefix.rows[i]);
        tokens_[row] = prefix.tokens[i];
        positions_[row] = static_cast<std::int64_t>(i);
    }
    add(view);
}

void SharedKVCache::add(UsedRows& rows) {
    views_.push_back(&rows);
    next_check_ = 0;
}

void SharedKVCache::close_view(UsedRows& view) {
    if (!is_among(views_, &view)) return;
    remove(view);
    if (view.prefix.tokens.empty()) return;
    closed_.push_back(view.prefix);
    if (closed_.size() > MOST_CLOSED) closed_.erase(closed_.begin());
}

void SharedKVCache::keep_for(const RowIdentity& path) {
    PrefixCache longest;
    std::size_t most_common = 0;
    if (!shares_prefixes_) closed_.clear();
    for (const PrefixCache& prefix : closed_) {
        const std::size_t num_common = prefix.num_common(prefix.identity_of(path));
        if (num_common <= most_common) continue;
        longest = prefix;
        most_common = num_common;
    }
    longest.shorten(most_common);
    keep_rows(longest.rows);
    count_up(longest.rows, longest.rows.size());
    closed_.clear();
    if (most_common) closed_.push_back(std::move(longest));
}

PrefixCache SharedKVCache::longest_prefix(const RowIdentity& identity) const {
    const PrefixCache* longest = nullptr;
    std::size_t most_common = 0;
    const auto consider = [&](const PrefixCache& other) {
        const std::size_t found = other.num_common(identity);
        if (found > most_common) longest = &other;
        most_common = std::max(most_common, found);
    };
    if (shares_prefixes_) {
        for (const UsedRows* view : views_) consider(view->prefix);
        for (const PrefixCache& prefix : closed_) consider(prefix);
    }
    PrefixCache copy = longest ? *longest : PrefixCache{};
    copy.shorten(most_common);
    copy.source = identity.source;
    return copy;
}

void SharedKVCache::hold_source(const SourcePointer& source) {
    if (source && engine_.spec().joins_sources) ++num_readers_[source];
}

void SharedKVCache::release_source(const SourcePointer& source) {
    const auto place = num_readers_.find(source);
    if (place == num_readers_.end() || --place->second) return;
    engine_.release_source(*source);
    num_readers_.erase(place);
}

bool SharedKVCache::has_room(std::size_t num_new) const {
    if (!max_rows_ || engine_.num_rows() + num_new <= *max_rows_) return true;
    return num_used() + num_new <= *max_rows_;
}

void SharedKVCache::expect(std::size_t num_new) {
    std::size_t num_rows = num_used() + num_new;
    num_rows += MOST_UNUSED_ROWS + num_rows / 4;  // see `make_room`
    engine_.expect(max_rows_ ? std::min(num_rows, *max_rows_) : num_rows);
}

std::vector<ForwardResult> SharedKVCache::forward(std::span<EngineCall* const> calls) {
    std::size_t num_new = 0;
    for (const EngineCall* call : calls) num_new += call->num_rows;
    make_room(num_new);
    const ForwardResult whole = engine_.forward(written(calls));
    if (calls.size() == 1) return {whole};  // usually
    std::vector<ForwardResult> results;
    std::size_t row = 0, feature = 0;
    for (const Forward& part : parts_) {
        ForwardResult& result = results.emplace_back(whole);
        result.logits = whole.logits.part(row, part.logit_rows.size());
        result.first_feature = feature;
        row += part.logit_rows.size();
        feature += part.parent_features.rows.empty() ? part.feature_rows.size() : part.num_new();
    }
    return results;
}

/// Return one forward that appends the rows of the calls, one after the other. The mask of each is
/// made for its place, so it may have fewer columns than the last one's.
const Forward& SharedKVCache::written(std::span<EngineCall* const> calls) {
    parts_.resize(calls.size());
    std::size_t first_row = engine_.num_rows();
    for (std::size_t i = 0; i < calls.size(); ++i) {
        Forward& part = parts_[i];
        part.logit_rows.clear();
        part.feature_rows.clear();
        part.parent_features = {};
        part.sources.clear();
        part.source_of_row.clear();
        if (calls[i]->source) part.sources.push_back(calls[i]->source);
        calls[i]->write(first_row, part);
        first_row += calls[i]->num_rows;
        tokens_.resize(std::max(tokens_.size(), first_row));
        positions_.resize(tokens_.size());
        const auto begin = static_cast<std::ptrdiff_t>(first_row - part.num_new());
        std::copy(part.token_ids.begin(), part.token_ids.end(), tokens_.begin() + begin);
        std::copy(part.positions.begin(), part.positions.end(), positions_.begin() + begin);
    }
    if (calls.size() == 1) return parts_[0];
    joined_ = {};
    joined_.mask.reset(first_row - engine_.num_rows(), first_row);
    for (const Forward& part : parts_) join(part);
    return joined_;
}

/// Append the rows of one call to the joined forward.
void SharedKVCache::join(const Forward& part) {
    const std::size_t first = joined_.num_new();
    for (std::size_t s = 0; s < part.num_new(); ++s) {
        std::copy_n(part.mask.row(s), part.mask.num_words(), joined_.mask.row(first + s));
    }
    append_shifted(joined_.token_ids, part.token_ids, 0);
    append_shifted(joined_.positions, part.positions, 0);
    append_shifted(joined_.logit_rows, part.logit_rows, first);
    append_shifted(joined_.feature_rows, part.feature_rows, first);
    ParentFeatures& parents = joined_.parent_features;
    for (auto source : part.parent_features.sources) {
        const bool is_zeros = source == ParentFeatures::ZEROS;
        const auto shift = static_cast<std::int64_t>(parents.forwards.size());
        parents.sources.push_back(is_zeros ? source : source + shift);
    }
    append_shifted(parents.rows, part.parent_features.rows, 0);
    const auto& forwards = part.parent_features.forwards;
    parents.forwards.insert(parents.forwards.end(), forwards.begin(), forwards.end());
    if (part.sources.empty()) return;
    auto place = std::find(joined_.sources.begin(), joined_.sources.end(), part.sources[0]);
    if (place == joined_.sources.end()) place = joined_.sources.insert(place, part.sources[0]);
    joined_.source_of_row.resize(joined_.num_new(), place - joined_.sources.begin());
}

/// Drop the unused rows if they are many, or if they leave no room for so many rows.
void SharedKVCache::make_room(std::size_t num_new) {
    const std::size_t num_rows = engine_.num_rows();
    const bool is_full = max_rows_ && num_rows + num_new > *max_rows_;
    const bool grows = num_new > engine_.num_free_rows();
    if (num_rows <= next_check_ && !is_full && !grows) return;
    const Flags is_used = used();
    const std::size_t num_used = count_of(is_used);
    std::size_t most_unused = MOST_UNUSED_ROWS;
    if (!engine_.spec().folds_rows) most_unused += num_used / 4;
    next_check_ = num_used + most_unused;
    if (grows) most_unused = std::min(most_unused, WORTH_DROPPING);
    if (num_rows - num_used > (is_full ? 0 : most_unused)) keep(is_used);
}

/// Return which rows an open view sees, (num_rows,).
Flags SharedKVCache::used() const {
    Flags is_used(engine_.num_rows());
    for (const UsedRows* view : views_) view->mark_used(is_used);
    return is_used;
}

/// Drop all other rows, those of closed views among them.
void SharedKVCache::keep(const Flags& is_used) {
    closed_.clear();
    const Ints kept = places_of(is_used);
    if (kept.size() == is_used.size()) return;
    Ints new_rows(is_used.size());
    for (std::size_t i = 0; i < kept.size(); ++i)
        new_rows[at(kept[i])] = static_cast<std::int64_t>(i);
    keep_rows(kept);
    for (UsedRows* view : views_) view->renumber(new_rows);
}

void SharedKVCache::keep_rows(const Ints& rows) {
    if (rows.size() == engine_.num_rows()) return;
    engine_.keep(rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
        tokens_[i] = tokens_[at(rows[i])];
        positions_[i] = positions_[at(rows[i])];
    }
    next_check_ = 0;
}

}  // namespace dsbd
