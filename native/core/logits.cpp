// The logits of the rows of a forward, by what the engine's head returns.
#include "logits.hpp"

#include <cmath>

#include "error.hpp"
#include "numbers.hpp"

namespace dsbd {
namespace {

std::string shape(std::size_t num_rows, std::size_t num_columns) {
    return "(" + std::to_string(num_rows) + ", " + std::to_string(num_columns) + ")";
}

void check_shape(const char* name, const std::string& found, const std::string& expected) {
    if (found == expected) return;
    throw ModelError(std::string("the model returned ") + name + " of shape " + found +
                     ", expected " + expected + ": one row per entry of logit_rows");
}

}  // namespace

void check_logits(const Logits& logits, const EngineSpec& spec, std::size_t num_rows) {
    if (!logits.num_top) {
        return check_shape("logits", shape(logits.num_rows, logits.vocab_size),
                           shape(num_rows, spec.vocab_size));
    }
    check_shape("top_ids", shape(logits.num_rows, logits.num_top),
                shape(num_rows, spec.num_top_logits));
    const std::span ids(logits.top_ids, num_rows * logits.num_top);
    std::uint64_t is_outside = 0;
    for (const auto id : ids) is_outside |= static_cast<std::uint64_t>(id) >= spec.vocab_size;
    if (!is_outside) return;
    const auto [lowest, highest] = std::minmax_element(ids.begin(), ids.end());
    throw ModelError("the model returned top_ids from " + std::to_string(*lowest) + " to " +
                     std::to_string(*highest) + ", expected 0 to " +
                     std::to_string(spec.vocab_size - 1) + "; export the engine again");
}

std::span<const float> full_row(const Logits& logits, std::size_t row) {
    if (logits.values) return {logits.values + row * logits.vocab_size, logits.vocab_size};
    return logits.full->row(logits.first_full_row + row);
}

void read_logits(const Logits& logits, std::size_t row, IntSpan tokens, std::span<double> found) {
    if (!logits.values) return logits.full->read(logits.first_full_row + row, tokens, found);
    const auto all = full_row(logits, row);
    for (std::size_t i = 0; i < tokens.size(); ++i) found[i] = all[at(tokens[i])];
}

void check_largest(const Logits& logits) {
    if (!logits.num_top) return;
    const std::size_t size = logits.num_top;
    for (std::size_t row = 0; row < logits.num_rows; ++row) check_finite(logits.logsumexp[row]);
    for (std::size_t row = 0; row < logits.num_rows; ++row) {
        check_finite(logits.top_logits[row * size]);
    }
    for (std::size_t row = 0; row < logits.num_rows; ++row) {
        const float* const found = logits.top_logits + row * size;
        std::uint32_t is_wrong = 0;
        for (std::size_t k = 0; k < size; ++k) is_wrong |= !(found[k] <= found[0]);
        if (!is_wrong) continue;
        throw ModelError(
            "the model returned top_logits with NaN or a larger one after the first; check the "
            "engine's precision and the export's parity report");
    }
}

double log_normalizer(const Logits& logits, std::size_t row) {
    if (logits.num_top) return double{logits.logsumexp[row]};
    const float* const values = logits.values + row * logits.vocab_size;
    return log_normalizer(std::span(values, logits.vocab_size));
}

std::size_t num_most_probable(const Logits& logits, std::size_t number) {
    const std::size_t num_known = logits.num_top ? logits.num_top : logits.vocab_size;
    return number ? std::min(number, num_known) : num_known;
}

void most_probable(const Logits& logits, std::size_t row, std::size_t number, std::int64_t* tokens,
                   double* scores) {
    const std::size_t size = num_most_probable(logits, number);
    if (!logits.num_top) {
        const float* const values = logits.values + row * logits.vocab_size;
        largest_logits({values, logits.vocab_size}, size, tokens, scores);
        return;
    }
    std::copy_n(logits.top_ids + row * logits.num_top, size, tokens);
    std::copy_n(logits.top_logits + row * logits.num_top, size, scores);
}

}  // namespace dsbd
