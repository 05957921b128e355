// Preemption: the cache rows of a request are dropped, and computed again when it goes on.
#include "preemption.hpp"

#include <algorithm>
#include <numeric>

namespace dsbd {

namespace {

std::size_t at(std::int64_t number) { return static_cast<std::size_t>(number); }

}  // namespace

PreemptedRows::PreemptedRows(CacheView& view) : view_(view) {
    const SharedKVCache& cache = view.row_cache;
    Flags is_used(cache.num_rows());
    view.mark_used(is_used);
    std::vector<std::size_t> rows;
    for (std::size_t row = 0; row < is_used.size(); ++row) {
        if (is_used[row]) rows.push_back(row);
    }
    std::stable_sort(rows.begin(), rows.end(), [&](std::size_t a, std::size_t b) {
        return cache.position_of(a) < cache.position_of(b);
    });
    Ints number_of_row(is_used.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
        tokens_.push_back(cache.token_of(rows[i]));
        positions_.push_back(cache.position_of(rows[i]));
        number_of_row[rows[i]] = static_cast<std::int64_t>(i);
    }
    slots_.resize(rows.size());
    for (std::size_t slot = view.num_slots(); slot-- > 0;) {
        Ints seen = view.seen_rows(slot);
        for (auto& row : seen) row = number_of_row[at(row)];
        std::sort(seen.begin(), seen.end());
        for (auto row : seen) slots_[at(row)] = static_cast<std::int64_t>(slot);
        seen_.push_back(std::move(seen));
    }
    std::reverse(seen_.begin(), seen_.end());
    prefix.source = view.prefix.source;
    view.row_cache.remove(view);
}

EngineCalls<void> PreemptedRows::compute(Role role) {
    begin(view_.row_cache.longest_prefix({view_.prefix.tokens, view_.prefix.source}));
    while (rows_.size() < num_rows()) {
        EngineCall call = next_call(role);
        co_await needed(call);
    }
    end();
}

void PreemptedRows::begin(PrefixCache shared) {
    rows_ = std::move(shared.rows);
    show_prefix();
    view_.row_cache.add(*this);
}

/// Return the call that computes the next rows, of the lowest positions.
EngineCall PreemptedRows::next_call(Role role) {
    const std::size_t start = rows_.size();
    const std::size_t size = std::min(num_rows() - start, PREFILL_CHUNK);
    const auto write_rows = [=, this](std::size_t first_row, Forward& forward) {
        write(start, size, first_row, forward);
    };
    return {role, &view_.meter, size, write_rows, view_.prefix.source, true};
}

/// Write the rows from number `start` on: each sees those before it of a slot that sees it.
void PreemptedRows::write(std::size_t start, std::size_t size, std::size_t first_row,
                          Forward& forward) {
    const auto begin = static_cast<std::ptrdiff_t>(start);
    const auto end = static_cast<std::ptrdiff_t>(start + size);
    forward.token_ids.assign(tokens_.begin() + begin, tokens_.begin() + end);
    forward.positions.assign(positions_.begin() + begin, positions_.begin() + end);
    forward.mask.reset(size, first_row + size);
    for (std::size_t s = 0; s < size; ++s) rows_.push_back(static_cast<std::int64_t>(first_row + s));
    for (std::size_t s = 0; s < size; ++s) {
        const std::int64_t position = positions_[start + s];
        for (auto row : seen_[at(slots_[start + s])]) {
            const std::int64_t above = positions_[at(row)];
            const bool is_hidden = view_.spec().reads_features && above == 0;  // see CacheView
            if (above < position && !is_hidden) forward.mask.set(s, at(rows_[at(row)]));
        }
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

/// Give the rows back to the view.
void PreemptedRows::end() {
    view_.row_cache.remove(*this);
    view_.row_cache.add(view_);
    view_.prefix.rows = prefix.rows;
    std::vector<Ints> rows_by_slot = seen_;
    for (Ints& rows : rows_by_slot) {
        for (auto& row : rows) row = rows_[at(row)];
    }
    view_.show(rows_by_slot);
}

void PreemptedRows::mark_used(Flags& is_used) const {
    for (auto row : rows_) is_used[at(row)] = 1;
}

void PreemptedRows::renumber(std::span<const std::int64_t> new_rows) {
    for (auto& row : rows_) row = new_rows[at(row)];
    show_prefix();
}

EngineCalls<void> recomputed(Preempted& preempted) {
    for (std::size_t role = 0; role < preempted.size(); ++role) {
        if (!preempted[role]) continue;
        co_await preempted[role]->compute(static_cast<Role>(role));
        preempted[role].reset();
    }
}

}  // namespace dsbd
