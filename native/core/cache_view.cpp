// One request's rows of an engine's key/value cache, and which of them each of its nodes sees.
#include "cache_view.hpp"

#include <algorithm>
#include <bit>

namespace dsbd {

namespace {

void set_bit(std::uint64_t* words, std::size_t bit) {
    words[bit / 64] |= std::uint64_t{1} << (bit % 64);
}

void clear_bit(std::uint64_t* words, std::size_t bit) {
    words[bit / 64] &= ~(std::uint64_t{1} << (bit % 64));
}

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
    seen_.assign(64 * num_words_, 0);
    row_cache.open_view(*this);
}

std::size_t CacheView::num_rows() const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < num_words_; ++i) {
        std::uint64_t word = 0;
        for (std::size_t number = 0; number < num_slots_; ++number) word |= slot(number)[i];
        count += static_cast<std::size_t>(std::popcount(word));
    }
    return std::max(count, prefix.tokens.size());
}

void CacheView::begin() {
    reserve(num_slots_, row_cache.num_rows());
    std::fill_n(slot(0), num_words_, 0);
    for (std::size_t i = hides_first_; i < prefix.rows.size(); ++i) {
        set_bit(slot(0), at(prefix.rows[i]));
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

void CacheView::append(std::span<const std::int64_t> parent_slots, std::size_t first_row,
                       BitRows& mask) {
    const std::size_t size = parent_slots.size(), first = num_slots_;
    reserve(first + size, first_row + size);
    num_slots_ += size;
    mask.reset(size, first_row + size);
    const bool hides_roots = hides_first_ && prefix.rows.empty();
    for (std::size_t s = 0; s < size; ++s) {
        std::uint64_t* seen = slot(first + s);
        std::copy_n(slot(at(parent_slots[s])), num_words_, seen);
        set_bit(seen, first_row + s);
        std::copy_n(seen, mask.num_words(), mask.row(s));
        // The prompt's one token, if it is new, sees itself, and no other row sees it.
        if (hides_roots && parent_slots[s] == 0) clear_bit(seen, first_row + s);
    }
}

void CacheView::forget_own_rows(std::span<const std::int64_t> slots) {
    for (auto number : slots) {
        std::uint64_t* seen = slot(at(number));
        for (std::size_t i = num_words_; i-- > 0;) {
            if (!seen[i]) continue;
            seen[i] ^= std::bit_floor(seen[i]);
            break;
        }
    }
}

void CacheView::keep(std::span<const std::int64_t> slots) {
    kept_.resize(slots.size() * num_words_);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        std::copy_n(slot(at(slots[i])), num_words_, kept_.data() + i * num_words_);
    }
    std::copy(kept_.begin(), kept_.end(), slot(1));
    num_slots_ = 1 + slots.size();
}

void CacheView::end(const Ints& agreed_tokens) {
    num_rows_at_end = num_rows();
    const std::size_t first = std::min<std::size_t>(1, num_slots_ - 1);
    std::vector<std::uint64_t> by_all(slot(first), slot(first) + num_words_);
    for (std::size_t number = first + 1; number < num_slots_; ++number) {
        for (std::size_t i = 0; i < num_words_; ++i) by_all[i] &= slot(number)[i];
    }
    if (hides_first_ && !prefix.rows.empty()) set_bit(by_all.data(), at(prefix.rows[0]));
    if (hides_first_ && prefix.rows.empty()) by_all.assign(num_words_, 0);
    prefix.rows.clear();
    for_bits(by_all.data(), num_words_,
             [&](std::size_t row) { prefix.rows.push_back(static_cast<std::int64_t>(row)); });
    prefix.tokens = agreed_tokens;
    prefix.shorten(prefix.rows.size());
    prefix.shorten(prefix.tokens.size());
    num_slots_ = 1;
    std::fill_n(slot(0), num_words_, 0);  // the prefix is all that is left
}

void CacheView::mark_used(Flags& is_used) const {
    for (std::size_t i = 0; i < num_words_; ++i) {
        std::uint64_t word = 0;
        for (std::size_t number = 0; number < num_slots_; ++number) word |= slot(number)[i];
        for_bits(&word, 1, [&](std::size_t bit) { is_used[64 * i + bit] = 1; });
    }
    for (std::size_t i = 0; i < prefix.tokens.size(); ++i) is_used[at(prefix.rows[i])] = 1;
}

void CacheView::renumber(std::span<const std::int64_t> new_rows) {
    prefix.rows.resize(prefix.tokens.size());
    for (auto& row : prefix.rows) row = new_rows[at(row)];
    std::vector<std::uint64_t> before(num_words_);
    for (std::size_t number = 0; number < num_slots_; ++number) {
        std::uint64_t* seen = slot(number);
        before.assign(seen, seen + num_words_);
        std::fill_n(seen, num_words_, 0);
        for_bits(before.data(), num_words_,
                 [&](std::size_t row) { set_bit(seen, at(new_rows[row])); });
    }
}

Ints CacheView::seen_rows(std::size_t number) const {
    std::vector<std::uint64_t> seen(slot(number), slot(number) + num_words_);
    for (std::size_t i = 0; number == 0 && i < prefix.tokens.size(); ++i) {
        const std::size_t row = at(prefix.rows[i]);
        if (row >= 64 * seen.size()) seen.resize(row / 64 + 1);
        set_bit(seen.data(), row);
    }
    Ints rows;
    for_bits(seen.data(), seen.size(),
             [&](std::size_t row) { rows.push_back(static_cast<std::int64_t>(row)); });
    return rows;
}

void CacheView::show(const std::vector<Ints>& rows_by_slot) {
    reserve(num_slots_, row_cache.num_rows());
    for (std::size_t number = 0; number < rows_by_slot.size(); ++number) {
        std::fill_n(slot(number), num_words_, 0);
        for (auto row : rows_by_slot[number]) set_bit(slot(number), at(row));
        if (hides_first_ && !prefix.rows.empty()) clear_bit(slot(number), at(prefix.rows[0]));
    }
}

void CacheView::reserve(std::size_t num_slots, std::size_t num_rows) {
    const std::size_t size = seen_.size() / num_words_;
    if (num_slots <= size && num_rows <= 64 * num_words_) return;
    const std::size_t more_slots = num_slots > size ? 2 * num_slots : size;
    const std::size_t more_words = num_rows > 64 * num_words_ ? num_rows / 32 + 1 : num_words_;
    std::vector<std::uint64_t> larger(more_slots * more_words);
    for (std::size_t number = 0; number < num_slots_; ++number) {
        std::copy_n(slot(number), num_words_, larger.data() + number * more_words);
    }
    seen_ = std::move(larger);
    num_words_ = more_words;
}

}  // namespace dsbd
