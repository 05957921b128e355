// The algorithm of the host without ONNX Runtime: a model whose logits are a hash of the path.
//
// Every line of stdin is the arguments of one request, as those of dsbd_host; for each, one line
// per sequence (its tokens and their sum of log-probabilities), then the calls of both models.

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "command_line.hpp"
#include "dsbd/decode.hpp"

namespace {

constexpr std::size_t vocab_size = 16;

/// Logits from 0 to 8 after a path; with `is_draft` up to 2 more, by a hash of its own.
std::vector<float> logits_of(const std::vector<std::int64_t>& path, bool is_draft) {
    std::uint64_t key = 0;
    for (const std::int64_t token : path) {
        key = dsbd::child_key(key, token);
    }
    std::vector<float> logits;
    for (std::uint64_t token = 0; token < vocab_size; ++token) {
        const auto own = static_cast<double>(dsbd::mix64(key, token) >> 40);
        const auto added = static_cast<double>(dsbd::mix64(~key, token) >> 40);
        logits.push_back(static_cast<float>((own + (is_draft ? added / 4 : 0.0)) * 0x1p-21));
    }
    return logits;
}

/// Finds each node's path through the mask: a wrong mask, row or position is an error.
class TableModel final : public dsbd::StepModel {
public:
    explicit TableModel(bool is_draft) : is_draft_(is_draft) {}

    std::size_t vocab_size() const override { return ::vocab_size; }
    std::size_t context_length() const override { return 256; }
    std::size_t num_candidates() const override { return 0; }
    std::size_t num_rows() const override { return tokens_.size(); }

    dsbd::HeadOutput step(const dsbd::StepInput& input) override {
        const std::size_t num_rows = tokens_.size() + input.token_ids.size();
        if (input.mask.size() != input.token_ids.size() * num_rows) {
            throw dsbd::Error("the mask has " + std::to_string(input.mask.size()) + " cells");
        }
        tokens_.insert(tokens_.end(), input.token_ids.begin(), input.token_ids.end());
        positions_.insert(positions_.end(), input.positions.begin(), input.positions.end());
        dsbd::HeadOutput head;
        head.row_size = ::vocab_size;
        for (const std::int64_t node : input.logit_rows) {
            const auto sees = input.mask.begin() + node * static_cast<std::int64_t>(num_rows);
            std::vector<std::int64_t> path(input.positions[node] + 1, -1);
            for (std::size_t row = 0; row < num_rows; ++row) {
                if (sees[static_cast<std::ptrdiff_t>(row)] != 0) {
                    std::int64_t& place = path.at(positions_[row]);
                    place = place < 0 ? tokens_[row] : throw dsbd::Error("a position seen twice");
                }
            }
            if (std::count(path.begin(), path.end(), -1) != 0) {
                throw dsbd::Error("a position that is not seen");
            }
            const std::vector<float> logits = logits_of(path, is_draft_);
            head.logits.insert(head.logits.end(), logits.begin(), logits.end());
        }
        return head;
    }

    void keep(const std::vector<std::size_t>& rows) override {
        std::vector<std::int64_t> tokens, positions;
        for (const std::size_t row : rows) {
            tokens.push_back(tokens_.at(row));
            positions.push_back(positions_.at(row));
        }
        tokens_ = tokens;
        positions_ = positions;
    }

private:
    bool is_draft_;
    std::vector<std::int64_t> tokens_;
    std::vector<std::int64_t> positions_;
};

}  // namespace

int main() {
    TableModel target(false);
    TableModel draft(true);
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words("table " + line);
        const CommandLine command = command_line_of(
            {std::istream_iterator<std::string>(words), std::istream_iterator<std::string>()});
        const dsbd::Result result =
            dsbd::decode(target, &draft, *command.ids, dsbd::checked(command.options, {1}));
        for (const dsbd::Beam& beam : result.sequences) {
            for (const std::int64_t token : beam.token_ids) {
                std::printf("%lld ", static_cast<long long>(token));
            }
            std::printf("%.17g\n", beam.logprob);
        }
        std::printf("%zu %zu\n\n", result.target_calls, result.draft_calls);
    }
}
