// Next-token distributions of many positions, by row (slot), in flat arrays.
#include "distribution.hpp"

#include <cmath>
#include <limits>

#include "numbers.hpp"

namespace dsbd {
namespace {

constexpr double NOT_COMPUTED_YET = std::numeric_limits<double>::quiet_NaN();

template <class T>
std::size_t bytes(const std::vector<T>& entries) {
    return entries.capacity() * sizeof(T);
}

/// Replace entries by some of them.
template <class T>
void take(std::vector<T>& entries, IntSpan rows) {
    std::vector<T> found{entries[0]};
    found.reserve(entries.capacity());
    for (const auto row : rows) found.push_back(entries[at(row)]);
    entries.swap(found);
}

template <class T>
void append(std::vector<T>& entries, const std::vector<T>& others, std::size_t begin,
            std::size_t size) {
    const auto first = others.begin() + static_cast<std::ptrdiff_t>(begin);
    entries.insert(entries.end(), first, first + static_cast<std::ptrdiff_t>(size));
}

}  // namespace

void TokenDistributions::clear() {
    kind_ = Kind::none;
    entries_ = spare_ = {};
    begins_ = {0};
    counts_ = {0};
    is_made_ = {1};
    largest_ = {0.0f};
    normalizers_ = log_sums_ = {0.0};
}

std::size_t TokenDistributions::add_row(Kind kind, std::size_t begin, std::size_t num_tokens) {
    kind_ = kind;
    begins_.push_back(begin);
    counts_.push_back(num_tokens);
    is_made_.push_back(kind == Kind::listed);
    largest_.push_back(0.0f);
    normalizers_.push_back(NOT_COMPUTED_YET);
    log_sums_.push_back(NOT_COMPUTED_YET);
    return begin;
}

TokenDistributions::TopRow TokenDistributions::add_top(std::size_t num_tokens, double normalizer) {
    const std::size_t begin = add_row(Kind::top, entries_.tokens.size(), num_tokens);
    normalizers_.back() = normalizer;
    entries_.tokens.resize(begin + num_tokens);
    entries_.log_probs.resize(begin + num_tokens);
    entries_.raw_log_probs.resize(begin + num_tokens);
    return {&entries_.tokens[begin], &entries_.raw_log_probs[begin]};
}

void TokenDistributions::add_dense(std::span<const float> logits) {
    add_dense(logits, largest_logit(logits), NOT_COMPUTED_YET);
}

void TokenDistributions::add_dense(std::span<const float> logits, float largest,
                                   double normalizer) {
    add_row(Kind::dense, entries_.logits.size(), logits.size());
    largest_.back() = largest;
    normalizers_.back() = normalizer;
    entries_.logits.insert(entries_.logits.end(), logits.begin(), logits.end());
}

void TokenDistributions::add_listed(IntSpan tokens, FloatSpan log_probs, FloatSpan raw_log_probs) {
    const std::size_t begin = entries_.tokens.size();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (log_probs[i] == LOG_ZERO) continue;
        entries_.tokens.push_back(tokens[i]);
        entries_.log_probs.push_back(log_probs[i]);
        entries_.raw_log_probs.push_back(raw_log_probs[i]);
    }
    add_row(Kind::listed, begin, entries_.tokens.size() - begin);
}

void TokenDistributions::keep(IntSpan rows) {
    for (auto* each : {&spare_.log_probs, &spare_.raw_log_probs}) each->clear();
    spare_.tokens.clear();
    spare_.logits.clear();
    for (const auto row : rows) {
        const std::size_t begin = begins_[at(row)], size = num_tokens(row);
        if (kind_ == Kind::dense) {
            append(spare_.logits, entries_.logits, begin, size);
            continue;
        }
        append(spare_.tokens, entries_.tokens, begin, size);
        append(spare_.log_probs, entries_.log_probs, begin, size);
        append(spare_.raw_log_probs, entries_.raw_log_probs, begin, size);
    }
    std::swap(entries_, spare_);
    take(counts_, rows);
    take(is_made_, rows);
    take(largest_, rows);
    take(normalizers_, rows);
    take(log_sums_, rows);
    begins_.resize(counts_.size());
    std::exclusive_scan(counts_.begin(), counts_.end(), begins_.begin(), std::size_t{0});
}

std::size_t TokenDistributions::made(std::int64_t row) {
    const auto index = at(row);
    const std::size_t begin = begins_[index];
    if (is_made_[index]) return begin;
    is_made_[index] = 1;
    const std::span raw(&entries_.raw_log_probs[begin], counts_[index]);
    const std::span log_probs(&entries_.log_probs[begin], counts_[index]);
    const double largest = raw[0], normalizer = normalizers_[index];
    if (!warp_.is_raw) {
        for (std::size_t i = 0; i < raw.size(); ++i) log_probs[i] = raw[i] - largest;
        warp_.warp(log_probs);
    }
    for (double& logit : raw) logit -= normalizer;
    if (warp_.is_raw) std::copy(raw.begin(), raw.end(), log_probs.begin());
    return begin;
}

double TokenDistributions::normalizer_of(std::size_t row) {
    if (std::isnan(normalizers_[row])) normalizers_[row] = log_normalizer(logits_of(row));
    return normalizers_[row];
}

void TokenDistributions::warp_dense(std::size_t row, double* log_probs) {
    const auto logits = logits_of(row);
    const double less = warp_.is_raw ? normalizer_of(row) : double{largest_[row]};
    for (std::size_t i = 0; i < logits.size(); ++i) log_probs[i] = double{logits[i]} - less;
    if (!warp_.is_raw) warp_.warp({log_probs, logits.size()});
}

void TokenDistributions::copy(std::int64_t row, const CandidateArrays& found) {
    const auto index = at(row);
    const std::size_t size = counts_[index];
    if (kind_ != Kind::dense) {
        const std::size_t begin = made(row);
        std::copy_n(entries_.tokens.data() + begin, size, found.tokens);
        std::copy_n(entries_.log_probs.data() + begin, size, found.log_probs);
        std::copy_n(entries_.raw_log_probs.data() + begin, size, found.raw_log_probs);
        return;
    }
    const auto logits = logits_of(index);
    const double normalizer = normalizer_of(index);
    std::iota(found.tokens, found.tokens + size, std::int64_t{0});
    for (std::size_t i = 0; i < size; ++i) found.raw_log_probs[i] = double{logits[i]} - normalizer;
    warp_dense(index, found.log_probs);
}

void TokenDistributions::consider(std::int64_t row, const NoisyBeam& beam, BestByNoise& best) {
    const auto index = at(row);
    const std::size_t size = counts_[index];
    if (kind_ != Kind::dense) {
        const std::size_t begin = made(row);
        const IntSpan tokens(entries_.tokens.data() + begin, size);
        return best.consider(beam, {tokens, {entries_.log_probs.data() + begin, size}});
    }
    if (are_whole()) return best.consider(beam, whole(row));
    warped_.resize(size);
    warp_dense(index, warped_.data());
    best.consider(beam, {{}, warped_});
}

bool TokenDistributions::are_whole() const {
    return kind_ == Kind::dense && !warp_.is_raw && !warp_.cuts() && warp_.typical_p == 1.0;
}

WholeRow TokenDistributions::whole(std::int64_t row) {
    const auto index = static_cast<std::size_t>(row);
    const auto logits = logits_of(index);
    const double largest = largest_[index];
    double& log_sum = log_sums_[index];
    if (std::isnan(log_sum)) log_sum = log_sum_of_exp(logits, largest, warp_.temperature);
    return {logits, {largest, warp_.temperature, log_sum}};
}

double TokenDistributions::raw_log_prob(std::int64_t row, std::size_t place) {
    const auto index = at(row);
    if (kind_ == Kind::dense) return double{logits_of(index)[place]} - normalizer_of(index);
    return entries_.raw_log_probs[made(row) + place];
}

double TokenDistributions::least(std::int64_t row) {
    const std::size_t begin = made(row);
    return entries_.log_probs[begin + num_tokens(row) - 1];
}

double TokenDistributions::log_prob_of(std::int64_t row, std::int64_t token) {
    const auto index = at(row);
    if (counts_[index] == 0) return LOG_ZERO;
    if (are_whole()) return whole(row).log_prob_of(static_cast<std::size_t>(token));
    if (kind_ == Kind::dense) {
        warped_.resize(counts_[index]);
        warp_dense(index, warped_.data());
        return warped_[at(token)];
    }
    const std::size_t begin = made(row);
    const auto first = entries_.tokens.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = first + static_cast<std::ptrdiff_t>(counts_[index]);
    const auto found = std::find(first, last, token);
    if (found == last) return LOG_ZERO;
    return entries_.log_probs[static_cast<std::size_t>(found - entries_.tokens.begin())];
}

std::size_t TokenDistributions::num_bytes() const {
    return bytes(entries_.tokens) + bytes(entries_.log_probs) + bytes(entries_.raw_log_probs) +
           bytes(entries_.logits);
}

}  // namespace dsbd
