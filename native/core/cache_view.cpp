// One request's rows of an engine's key/value cache, and which of them each of its nodes sees.
#include "cache_view.hpp"

#include <bit>

namespace dsbd {
namespace {

/// Call `use` with every bit that is set, lowest first.
template <class Use>
void for_bits(const std::uint64_t* words, std::size_t num_words, const Use& use) {
    for (std::size_t i = 0; i < num_words; ++i) {
        for (std::uint64_t word = words[i]; word; word &= word - 1) {
            use(64 * i + static_cast<std::size_t>(std::countr_zero(word)));
        }
    }
}

}  // namespace

CacheView::CacheView(SharedKVCache& cache, PrefixCache given)
    : row_cache(cache), hides_first_(cache.engine().spec().reads_features) {
    prefix = std::move(given);
    row_cache.open_view(*this);
}

std::size_t CacheView::num_rows() const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < seen_.num_words(); ++i) {
        std::uint64_t word = 0;
        for (std::size_t number = 0; number < num_slots_; ++number) word |= seen_.row(number)[i];
        count += static_cast<std::size_t>(std::popcount(word));
    }
    return std::max(count, prefix.tokens.size());
}

void CacheView::begin() {
    reserve(num_slots_, row_cache.num_rows());
    std::fill_n(seen_.row(0), seen_.num_words(), 0);
    for (std::size_t i = hides_first_; i < prefix.rows.size(); ++i) {
        seen_.set(0, at(prefix.rows[i]));
    }
}

void CacheView::append_prompt(std::size_t num_tokens, std::size_t first_row, BitRows& mask) {
    mask.reset(num_tokens, first_row + num_tokens);
    prefix.rows.resize(prefix.tokens.size());
    const std::size_t num_before = prefix.rows.size();
    for (std::size_t s = 0; s < num_tokens; ++s) {
        if (s) {
            std::copy_n(mask.row(s - 1), mask.num_words(), mask.row(s));
        } else {
            for (auto row : prefix.rows) mask.set(0, at(row));
        }
        mask.set(s, first_row + s);
    }
    for (std::size_t s = 0; s < num_tokens; ++s) {
        prefix.rows.push_back(static_cast<std::int64_t>(first_row + s));
    }
    for (std::size_t s = num_before ? 0 : 1; hides_first_ && s < num_tokens; ++s) {
        mask.clear(s, at(prefix.rows[0]));
    }
}

void CacheView::append(IntSpan parent_slots, std::size_t first_row, BitRows& mask) {
    const std::size_t size = parent_slots.size(), first = num_slots_;
    reserve(first + size, first_row + size);
    num_slots_ += size;
    mask.reset(size, first_row + size);
    const bool hides_roots = hides_first_ && prefix.rows.empty();
    for (std::size_t s = 0; s < size; ++s) {
        std::uint64_t* const seen = seen_.row(first + s);
        std::copy_n(seen_.row(at(parent_slots[s])), seen_.num_words(), seen);
        seen_.set(first + s, first_row + s);
        std::copy_n(seen, mask.num_words(), mask.row(s));
        // The prompt's one token, if it is new, sees itself, and no other row sees it.
        if (hides_roots && parent_slots[s] == 0) seen_.clear(first + s, first_row + s);
    }
}

void CacheView::forget_own_rows(IntSpan slots) {
    for (auto number : slots) {
        std::uint64_t* seen = seen_.row(at(number));
        for (std::size_t i = seen_.num_words(); i-- > 0;) {
            if (!seen[i]) continue;
            seen[i] ^= std::bit_floor(seen[i]);
            break;
        }
    }
}

void CacheView::keep(IntSpan slots) {
    kept_.resize(slots.size() * seen_.num_words());
    for (std::size_t i = 0; i < slots.size(); ++i) {
        std::copy_n(seen_.row(at(slots[i])), seen_.num_words(),
                    kept_.data() + i * seen_.num_words());
    }
    std::copy(kept_.begin(), kept_.end(), seen_.row(1));
    num_slots_ = 1 + slots.size();
}

void CacheView::end(const Ints& agreed_tokens) {
    num_rows_at_end = num_rows();
    const std::size_t first = std::min<std::size_t>(1, num_slots_ - 1);
    BitRows by_all(1, seen_.num_columns());
    if (!hides_first_ || !prefix.rows.empty()) {
        std::copy_n(seen_.row(first), seen_.num_words(), by_all.row(0));
        for (std::size_t number = first + 1; number < num_slots_; ++number) {
            for (std::size_t i = 0; i < seen_.num_words(); ++i) {
                by_all.row(0)[i] &= seen_.row(number)[i];
            }
        }
        if (hides_first_) by_all.set(0, at(prefix.rows[0]));
    }
    prefix.rows.clear();
    for_bits(by_all.row(0), by_all.num_words(),
             [&](std::size_t row) { prefix.rows.push_back(static_cast<std::int64_t>(row)); });
    prefix.tokens = agreed_tokens;
    prefix.shorten(prefix.rows.size());
    prefix.shorten(prefix.tokens.size());
    num_slots_ = 1;
    std::fill_n(seen_.row(0), seen_.num_words(), 0);  // the prefix is all that is left
}

std::optional<EngineCall> CacheView::begin_again(std::size_t num_dropped, std::size_t num_begin) {
    const auto rows =
        std::make_shared<const RowsByPosition>(rows_by_position(num_dropped, num_begin));
    const std::size_t size = rows->tokens.size(), num_before = prefix.tokens.size();
    const std::size_t num_tokens = std::min(num_before, num_begin) + num_before -
                                   std::min(num_before, num_begin + num_dropped);
    if (!size) {
        prefix.shorten(0);
        show(rows->seen);
        return {};
    }
    const auto write = [=, this](std::size_t first_row, Forward& forward) {
        forward.token_ids = rows->tokens;
        forward.positions = rows->positions;
        forward.mask.reset(size, first_row + size);
        for (std::size_t s = 0; s < size; ++s) {
            rows->for_seen(s, [&](std::size_t row) { forward.mask.set(s, first_row + row); });
            forward.mask.set(s, first_row + s);
        }
        prefix.tokens = rows->tokens;
        prefix.tokens.resize(num_tokens);
        count_up(prefix.rows, num_tokens, static_cast<std::int64_t>(first_row));
        reserve(num_slots_, first_row + size);
        show(rows->seen, first_row);
    };
    return EngineCall{Role::draft, &meter, size, write, prefix.source, true};
}

RowsByPosition CacheView::rows_by_position(std::size_t num_dropped, std::size_t num_begin) const {
    const auto first = static_cast<std::int64_t>(num_begin),
               end = static_cast<std::int64_t>(num_begin + num_dropped);
    Flags is_used(row_cache.num_rows());
    mark_used(is_used);
    Ints order;  // position and row packed into one number
    for (std::size_t row = 0; row < is_used.size(); ++row) {
        const std::int64_t position = row_cache.position_of(row);
        if (!is_used[row] || (first <= position && position < end)) continue;
        order.push_back((position << 32) + static_cast<std::int64_t>(row));
    }
    std::sort(order.begin(), order.end());
    RowsByPosition found;
    Ints number_of_row(is_used.size(), -1);
    for (const auto each : order) {
        const std::int64_t position = each >> 32;
        const std::size_t row = at(each & 0xFFFF'FFFF);
        number_of_row[row] = static_cast<std::int64_t>(found.tokens.size());
        found.tokens.push_back(row_cache.token_of(row));
        found.positions.push_back(position < first ? position : position - (end - first));
    }
    found.slots.resize(order.size());
    found.seen.resize(num_slots_);
    for (std::size_t slot = num_slots_; slot-- > 0;) {
        for (const auto row : seen_rows(slot)) {
            const std::int64_t number = number_of_row[at(row)];
            if (number < 0) continue;
            found.seen[slot].push_back(number);
            found.slots[at(number)] = static_cast<std::int64_t>(slot);
        }
        std::sort(found.seen[slot].begin(), found.seen[slot].end());
    }
    return found;
}

void CacheView::mark_used(Flags& is_used) const {
    for (std::size_t i = 0; i < seen_.num_words(); ++i) {
        std::uint64_t word = 0;
        for (std::size_t number = 0; number < num_slots_; ++number) word |= seen_.row(number)[i];
        for_bits(&word, 1, [&](std::size_t bit) { is_used[64 * i + bit] = 1; });
    }
    for (std::size_t i = 0; i < prefix.tokens.size(); ++i) is_used[at(prefix.rows[i])] = 1;
}

void CacheView::renumber(IntSpan new_rows) {
    prefix.rows.resize(prefix.tokens.size());
    for (auto& row : prefix.rows) row = new_rows[at(row)];
    const BitRows before = seen_;
    for (std::size_t number = 0; number < num_slots_; ++number) {
        std::fill_n(seen_.row(number), seen_.num_words(), 0);
        for_bits(before.row(number), before.num_words(),
                 [&](std::size_t row) { seen_.set(number, at(new_rows[row])); });
    }
}

/// Return the rows that a slot sees, increasing; those of the prefix as well for slot 0.
Ints CacheView::seen_rows(std::size_t number) const {
    BitRows seen(1, std::max(seen_.num_columns(), row_cache.num_rows()));
    std::copy_n(seen_.row(number), seen_.num_words(), seen.row(0));
    for (std::size_t i = 0; number == 0 && i < prefix.tokens.size(); ++i) {
        seen.set(0, at(prefix.rows[i]));
    }
    Ints rows;
    for_bits(seen.row(0), seen.num_words(),
             [&](std::size_t row) { rows.push_back(static_cast<std::int64_t>(row)); });
    return rows;
}

void CacheView::show(const std::vector<Ints>& rows_by_slot, std::size_t first_row) {
    reserve(num_slots_, row_cache.num_rows());
    for (std::size_t number = 0; number < rows_by_slot.size(); ++number) {
        std::fill_n(seen_.row(number), seen_.num_words(), 0);
        for (auto row : rows_by_slot[number]) seen_.set(number, first_row + at(row));
        if (hides_first_ && !prefix.rows.empty()) seen_.clear(number, at(prefix.rows[0]));
    }
}

void CacheView::reserve(std::size_t num_slots, std::size_t num_rows) {
    const bool has_slots = num_slots <= seen_.num_rows(),
               has_rows = num_rows <= seen_.num_columns();
    if (has_slots && has_rows) return;
    BitRows larger(has_slots ? seen_.num_rows() : 2 * num_slots,
                   has_rows ? seen_.num_columns() : 2 * num_rows + 64);
    for (std::size_t number = 0; number < num_slots_; ++number) {
        std::copy_n(seen_.row(number), seen_.num_words(), larger.row(number));
    }
    seen_ = std::move(larger);
}

}  // namespace dsbd
