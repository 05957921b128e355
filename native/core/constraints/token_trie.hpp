// Trie of the valid token sequences (item ids, labels, names), in compressed sparse rows, as a file
// holds it (docs/constraints.md, "The file of a trie").
#pragma once

#include <filesystem>

#include "logits_processing/constraint.hpp"

namespace dsbd {

/// Constraint to the sequences of a trie; the state of a path is its node.
class TokenTrie final : public Constraint {
public:
    enum class End : std::uint8_t { leaf, eos };

    /// Read what dsbd_ort.TokenTrie.save wrote; end: none: as saved. Error: it is no such file.
    static TokenTrie load(const std::filesystem::path& path, std::optional<End> end = std::nullopt);

    /// The highest token id of all sequences.
    std::int64_t highest_token() const;
    /// Error: one of these tokens is within a sequence, or ends one that is there without it too.
    void check_ends(const Ints& eos_token_ids);
    std::string name() const override { return "the token trie '" + path_ + "'"; }
    State start(IntSpan) const override { return 0; }
    State advance(State state, std::int64_t token) const override;
    bool allow(State state, Ints& tokens, TokenBits& bits) const override;
    bool accepts(State state) const override;
    bool has_ended(State state) const override { return end_ == End::leaf && edges(state).empty(); }
    bool ends_next(State state) const override;
    std::optional<std::size_t> most_tokens() const override;

private:
    explicit TokenTrie(const std::filesystem::path& path) : path_(path.string()) {}
    void read_arrays(const std::string& bytes);
    /// The edges of a node.
    std::span<const std::int32_t> edges(State state) const;
    bool is_trie() const;

    std::string path_;
    End end_ = End::leaf;
    std::optional<Ints> checked_ends_;
    std::vector<std::int64_t> row_offsets_;  // (num_nodes + 1,) edges of node n begin here
    std::vector<std::int32_t> tokens_;  // (num_nodes - 1,) of the edge to node e + 1
    std::vector<std::uint8_t> is_end_;  // (num_nodes,)
};

}  // namespace dsbd
