// Paths of recent rows back to their checkpoints, and what a call folds.
#include "runtime/recent_paths.hpp"

#include <algorithm>
#include <bit>
#include <map>
#include <string>
#include <utility>

namespace dsbd {

namespace {

using Flags = std::vector<std::uint8_t>;

constexpr std::size_t MOST_HELD = 4;  // checkpoints that stay for paths that branch off later
constexpr std::int64_t FIRST_HELD = 256;  // rows; fewer are soon computed again
constexpr std::size_t LOOK_EVERY = 16;  // recent rows, or more
constexpr std::int64_t BEGIN = 0;  // the checkpoint where paths begin
constexpr std::int64_t FOLDED = -1;  // instead of a checkpoint: nothing continues from it
constexpr std::size_t FOLDED_TOGETHER = 32;  // the fewest rows that are folded
constexpr std::int64_t STAY_RECENT = 16;  // before the deepest of a path: drafts are shorter
constexpr std::int64_t MOST_LEFT = 128;  // if a path is longer, even a short chain is folded

/// The last set bit of a row before a column, or NO_ROW.
std::int64_t last_bit(const std::uint64_t* words, std::size_t stop) {
    for (std::size_t w = (stop + 63) / 64; w-- > 0;) {
        std::uint64_t word = words[w];
        if (w == stop / 64) word &= (std::uint64_t{1} << (stop % 64)) - 1;
        if (word) return static_cast<std::int64_t>(w * 64 + 63) - std::countl_zero(word);
    }
    return RecentPaths::NO_ROW;
}

bool contains(const Ints& numbers, std::int64_t number) {
    return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

}  // namespace

std::int64_t RecentPaths::end_of(std::int64_t checkpoint) const {
    return ends_[static_cast<std::size_t>(checkpoint)];
}

void RecentPaths::truncate(std::size_t num_rows) {
    if (num_rows < table_.size()) table_.resize(num_rows);
    std::erase_if(held_, [&](std::int64_t held) { return held >= this->num_rows(); });
}

void RecentPaths::keep(std::span<const std::int64_t> rows) {
    Ints new_rows(table_.size(), NO_ROW);
    for (std::size_t i = 0; i < rows.size(); ++i) {
        new_rows[static_cast<std::size_t>(rows[i])] = static_cast<std::int64_t>(i);
        table_[i] = row(rows[i]);  // rows move down only
    }
    table_.resize(rows.size());
    const auto renumbered = [&](std::int64_t old) {
        return old == NO_ROW ? NO_ROW : new_rows[static_cast<std::size_t>(old)];
    };
    for (Row& each : table_) each.parent = renumbered(each.parent);
    for (std::int64_t& held : held_) held = renumbered(held);
    std::erase(held_, NO_ROW);
    if (table_.empty()) {
        num_recent_ = 0;
        ends_ = {0};
        memory_.reserve(0, 0);
    }
    give_up({});
    drop_unneeded();
}

void RecentPaths::prepare(const Call& call) {
    if (num_recent_ < next_look_) return;
    fold_chains(continued(call));
    look_later();
}

void RecentPaths::compute_again(const Call& call, std::size_t most_rows,
                                const std::function<void(const Call&)>& compute) {
    for (const std::int64_t number : continued(call)) {
        if (row(number).checkpoint != FOLDED) continue;
        const Ints rows = path(number);
        std::size_t begin = rows.size();
        while (begin > 0 && row(rows[begin - 1]).checkpoint == FOLDED) --begin;
        for (std::size_t start = begin; start < rows.size(); start += most_rows) {
            const std::size_t stop = std::min(start + most_rows, rows.size());
            const Forward forward = forward_again(rows, start, stop);
            const Call again{forward, 0, stop - start, call.first_row};
            set_next(again, Ints(rows.begin() + static_cast<std::ptrdiff_t>(start),
                                 rows.begin() + static_cast<std::ptrdiff_t>(stop)));
            compute(again);
            append_next(again);
            prepare(call);
        }
        hold(number);
    }
}

Forward RecentPaths::forward_again(const Ints& rows, std::size_t start, std::size_t stop) const {
    Forward forward;
    forward.mask.reset(stop - start, table_.size() + stop - start);
    for (std::size_t i = start; i < stop; ++i) {
        forward.token_ids.push_back(row(rows[i]).token);
        forward.positions.push_back(row(rows[i]).position);
        for (std::size_t k = 0; k < i; ++k) {
            forward.mask.set(i - start, static_cast<std::size_t>(rows[k]));
        }
        forward.mask.set(i - start, table_.size() + i - start);
    }
    return forward;
}

void RecentPaths::set_next(const Call& call, Ints again) {
    const std::size_t num_new = call.num_new();
    next = {};
    next.checkpoints = continued_checkpoints(call, !again.empty());
    for (std::size_t s = 0; s < num_new; ++s) {
        const std::uint64_t* const words = call.forward.mask.row(call.start + s);
        std::int64_t depth = 0;
        for (std::size_t w = 0; w < call.forward.mask.num_words(); ++w) {
            depth += std::popcount(words[w]);
        }
        const std::int64_t parent = last_bit(words, table_.size() + s);
        const std::int64_t above = parent == NO_ROW ? 0
                                   : parent < num_rows()
                                       ? row(parent).depth
                                       : next.depths[static_cast<std::size_t>(parent - num_rows())];
        if (depth != above + 1) {
            throw Error("row " + std::to_string(s) + " sees " + std::to_string(depth) +
                        " rows, expected " + std::to_string(above + 1) +
                        ": itself and all that the "
                        "row above it sees; an engine with convolutions or recurrences takes whole "
                        "paths");
        }
        next.parents.push_back(parent);
        next.depths.push_back(depth);
    }
    memory_.reserve(num_recent_ + num_new, num_recent_);
    for (std::size_t s = 0; s < again.size(); ++s) {
        row(again[s]).place = static_cast<std::int64_t>(num_recent_ + s);
    }
    next.again = std::move(again);
    next.first_row = num_recent_;
    set_ancestors(call);
    set_places_of_rows();
}

void RecentPaths::set_ancestors(const Call& call) {
    next.ancestors.assign(call.num_new() * num_ancestors_, NO_ROW);
    for (std::size_t s = 0; s < call.num_new(); ++s) {
        std::size_t stop = table_.size() + s;
        for (std::size_t k = num_ancestors_; k-- > 0;) {
            const std::int64_t above = last_bit(call.forward.mask.row(call.start + s), stop);
            if (above == NO_ROW) break;
            next.ancestors[s * num_ancestors_ + k] =
                above < num_rows() ? row(above).place
                                   : static_cast<std::int64_t>(num_recent_) + above - num_rows();
            stop = static_cast<std::size_t>(above);
        }
    }
}

/// With checkpoints [1, 0, 1] of two: rows [[1, 0], [0, 2]], the second of which is padding, and
/// places [2, 0, 3].
void RecentPaths::set_places_of_rows() {
    const auto [least, most] =
        std::minmax_element(next.checkpoints.begin(), next.checkpoints.end());
    const std::int64_t first = *least;
    next.first_checkpoint = static_cast<std::size_t>(first);
    next.num_checkpoints = static_cast<std::size_t>(*most - first + 1);
    std::vector<Ints> rows_of(next.num_checkpoints);
    Ints within;
    for (std::size_t s = 0; s < next.checkpoints.size(); ++s) {
        Ints& rows = rows_of[static_cast<std::size_t>(next.checkpoints[s] - first)];
        within.push_back(static_cast<std::int64_t>(rows.size()));
        rows.push_back(static_cast<std::int64_t>(s));
    }
    std::size_t longest = 0;
    for (const Ints& rows : rows_of) longest = std::max(longest, rows.size());
    for (Ints& rows : rows_of) {
        rows.resize(longest, 0);
        next.checkpoint_rows.insert(next.checkpoint_rows.end(), rows.begin(), rows.end());
    }
    for (std::size_t s = 0; s < within.size(); ++s) {
        next.row_places.push_back(
            (next.checkpoints[s] - first) * static_cast<std::int64_t>(longest) + within[s]);
    }
}

void RecentPaths::append_next(const Call& call) {
    for (std::size_t s = 0; s < call.num_new(); ++s) {
        if (next.again.empty()) {
            table_.push_back({call.forward.token_ids[call.start + s],
                              call.forward.positions[call.start + s], next.parents[s],
                              next.depths[s], static_cast<std::int64_t>(num_recent_ + s),
                              next.checkpoints[s]});
        } else {
            row(next.again[s]).checkpoint = next.checkpoints[s];
        }
    }
    num_recent_ += call.num_new();
}

void RecentPaths::fill_mask(const Call& call, std::size_t s, std::uint8_t* mask) const {
    const std::int64_t end = end_of(next.checkpoints[s]);
    const BitRows& bits = call.forward.mask;
    for (std::size_t c = 0; c < table_.size(); ++c) {
        if (table_[c].place < 0) continue;
        mask[table_[c].place] = bits.get(call.start + s, c) && table_[c].depth > end;
    }
    for (std::size_t k = 0; k < call.num_new(); ++k) {
        mask[next.first_row + k] |= bits.get(call.start + s, table_.size() + k);
    }
}

RecentPaths::Rows RecentPaths::continued(const Call& call) const {
    Rows found;
    for (std::size_t s = 0; s < call.num_new(); ++s) found.insert(last_seen(call, s));
    found.erase(NO_ROW);
    return found;
}

/// The last row of the cache that a new row sees.
std::int64_t RecentPaths::last_seen(const Call& call, std::size_t s) const {
    return last_bit(call.forward.mask.row(call.start + s), table_.size());
}

Ints RecentPaths::continued_checkpoints(const Call& call, bool is_again) const {
    Ints found;
    for (std::size_t s = 0; s < call.num_new(); ++s) {
        // of rows computed again, the first continues from a row and each other from the one before
        const std::int64_t last = last_seen(call, is_again ? 0 : s);
        found.push_back(last == NO_ROW ? BEGIN : row(last).checkpoint);
    }
    return found;
}

Ints RecentPaths::path(std::int64_t last) const {
    Ints rows;
    for (; last != NO_ROW; last = row(last).parent) rows.push_back(last);
    std::reverse(rows.begin(), rows.end());
    return rows;
}

/// Fold the beginning of long paths; the call's `continued` rows stay rows to continue from.
void RecentPaths::fold_chains(const Rows& continued) {
    Rows stops = continued;
    stops.insert(held_.begin(), held_.end());
    bool has_folded = false;
    for (auto chains = foldable_chains(stops); !chains.empty(); chains = foldable_chains(stops)) {
        for (const Chain& chain : chains) fold(chain, stops);
        has_folded = true;
    }
    if (has_folded) drop_unneeded();
}

void RecentPaths::look_later() { next_look_ = num_recent_ + std::max(LOOK_EVERY, num_recent_ / 4); }

/// A chain of rows with one child each is folded as soon as it is long, except for the last rows
/// of its path; a short one if the branches at its end have grown long: rejected drafts do not.
std::vector<RecentPaths::Chain> RecentPaths::foldable_chains(const Rows& stops) const {
    const Ints rows = unfolded();
    std::map<std::int64_t, std::int64_t> root_of, deepest;
    std::map<std::int64_t, Ints> trees, children;  // trees by root; a root is before its rows
    for (const std::int64_t each : rows) {
        const auto found = root_of.find(row(each).parent);
        const std::int64_t root = root_of[each] = found == root_of.end() ? each : found->second;
        trees[root].push_back(each);
        children[row(each).parent].push_back(each);
    }
    for (auto each = rows.rbegin(); each != rows.rend(); ++each) {
        std::int64_t depth = row(*each).depth;
        for (const std::int64_t child : children[*each]) depth = std::max(depth, deepest[child]);
        deepest[*each] = depth;
    }
    std::vector<Chain> chains;
    for (const auto& [root, tree] : trees) {
        Ints chain{root};
        while (children[chain.back()].size() == 1) chain.push_back(children[chain.back()].front());
        const std::int64_t end_depth = row(chain.back()).depth;
        const Ints& below = children[chain.back()];
        const auto num_long = std::count_if(below.begin(), below.end(), [&](std::int64_t child) {
            return deepest[child] >= end_depth + STAY_RECENT;
        });
        std::erase_if(chain, [&, last = deepest[root] - STAY_RECENT](std::int64_t each) {
            return row(each).depth > last;
        });
        const bool is_long = chain.size() >= FOLDED_TOGETHER || num_long > 1;
        if (chain.empty() || !(is_long || deepest[root] - row(root).depth >= MOST_LEFT)) continue;
        const auto stop = std::find_if(chain.begin(), chain.end(),
                                       [&](std::int64_t each) { return stops.contains(each); });
        if (stop != chain.end()) chain.erase(stop + 1, chain.end());
        Chain found{chain, {}};
        for (const std::int64_t each : tree) {
            if (!contains(chain, each)) found.below.push_back(each);
        }
        chains.push_back(std::move(found));
    }
    return chains;
}

/// Fold a chain into a checkpoint, from which the rows below continue from now on. A checkpoint
/// stays every time that a path has doubled its length.
void RecentPaths::fold(const Chain& chain, const Rows& stops) {
    const std::int64_t source = row(chain.rows.front()).checkpoint;
    const std::int64_t end = row(chain.rows.front()).parent;
    const std::int64_t before = end_of(source), depth = row(chain.rows.back()).depth;
    Ints places;
    for (const std::int64_t each : chain.rows) {
        row(each).checkpoint = FOLDED;
        places.push_back(row(each).place);
    }
    for (const std::int64_t each : chain.below) row(each).checkpoint = FOLDED;
    const auto width = [](std::int64_t number) {
        return std::bit_width(static_cast<std::uint64_t>(number));
    };
    if (end != NO_ROW && before >= FIRST_HELD && width(before) < width(depth)) hold(end);
    give_up(stops);
    const std::size_t target = unused_checkpoint();
    memory_.reserve_checkpoints(ends_.size());
    memory_.fold(places, static_cast<std::size_t>(source), target);
    ends_[target] = depth;
    row(chain.rows.back()).checkpoint = static_cast<std::int64_t>(target);
    for (const std::int64_t each : chain.below) {
        row(each).checkpoint = static_cast<std::int64_t>(target);
    }
}

/// Let no path continue from the middle of one, unless from `stops` or a held row.
void RecentPaths::give_up(const Rows& stops) {
    Rows in_use;
    for (const std::int64_t each : unfolded()) in_use.insert(row(each).checkpoint);
    Flags has_child(table_.size());
    for (const Row& each : table_) {
        if (each.parent != NO_ROW) has_child[static_cast<std::size_t>(each.parent)] = 1;
    }
    for (std::int64_t number = 0; number < num_rows(); ++number) {
        Row& each = row(number);
        const bool is_last = each.checkpoint >= 0 && each.depth == end_of(each.checkpoint);
        if (!is_last || in_use.contains(each.checkpoint) || stops.contains(number)) continue;
        if (!contains(held_, number) && has_child[static_cast<std::size_t>(number)]) {
            each.checkpoint = FOLDED;
        }
    }
}

/// The first number from which no row continues, a new one if all are in use.
std::size_t RecentPaths::unused_checkpoint() {
    Flags is_used(ends_.size() + 1);
    is_used[BEGIN] = 1;
    for (const Row& each : table_) {
        if (each.checkpoint >= 0) is_used[static_cast<std::size_t>(each.checkpoint)] = 1;
    }
    const auto found = std::find(is_used.begin(), is_used.end(), 0) - is_used.begin();
    if (static_cast<std::size_t>(found) == ends_.size()) ends_.push_back(0);
    return static_cast<std::size_t>(found);
}

void RecentPaths::hold(std::int64_t number) {
    std::erase(held_, number);
    held_.push_back(number);
    if (held_.size() > MOST_HELD) held_.erase(held_.begin());
}

/// The rows of the cache after a checkpoint, none of them its last.
Ints RecentPaths::unfolded() const {
    Ints found;
    for (std::int64_t number = 0; number < num_rows(); ++number) {
        const Row& each = row(number);
        if (each.checkpoint >= 0 && each.depth > end_of(each.checkpoint)) found.push_back(number);
    }
    return found;
}

/// Drop the recent rows that no new row could read, and the checkpoints of none.
void RecentPaths::drop_unneeded() {
    Flags is_needed(table_.size());
    for (const std::int64_t each : unfolded()) is_needed[static_cast<std::size_t>(each)] = 1;
    for (std::int64_t number = 0; number < num_rows(); ++number) {
        if (row(number).checkpoint < 0) continue;
        std::int64_t each = number;
        for (std::size_t k = 0; k < num_ancestors_ && each != NO_ROW;
             ++k, each = row(each).parent) {
            is_needed[static_cast<std::size_t>(each)] = 1;
        }
    }
    Ints needed;
    for (std::int64_t number = 0; number < num_rows(); ++number) {
        if (is_needed[static_cast<std::size_t>(number)]) {
            needed.push_back(number);
        } else {
            row(number).place = NO_ROW;
        }
    }
    std::sort(needed.begin(), needed.end(),
              [&](std::int64_t a, std::int64_t b) { return row(a).place < row(b).place; });
    Ints moved;
    std::int64_t checkpoint = BEGIN;
    for (std::size_t i = 0; i < needed.size(); ++i) {
        std::int64_t& place = row(needed[i]).place;
        if (place != static_cast<std::int64_t>(i)) moved.push_back(place);
        place = static_cast<std::int64_t>(i);
    }
    if (!moved.empty()) memory_.move_rows(moved, needed.size() - moved.size());
    num_recent_ = needed.size();
    memory_.shrink(num_recent_);
    look_later();
    for (const Row& each : table_) checkpoint = std::max(checkpoint, each.checkpoint);
    ends_.resize(static_cast<std::size_t>(checkpoint) + 1);
    memory_.reserve_checkpoints(ends_.size());
}

}  // namespace dsbd
