// A saved trie of token sequences: which tokens may follow a path (docs/constraints.md).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"

namespace dsbd {

/// The state of a path is a node of the trie: 0 at the start, `ended` after an end-of-sequence
/// token.
class Trie {
public:
    using State = std::int64_t;
    static constexpr State start = 0;
    static constexpr State ended = -1;

    /// Read a file that dsbd_ort.TokenTrie.save wrote.
    explicit Trie(const std::string& path) : path_(path) {
        std::ifstream file(path, std::ios::binary);
        if (!file) {
            throw Error("cannot read " + path + "; give a trie that dsbd_ort.TokenTrie saved");
        }
        const std::vector<std::int64_t> head = read_array(file);
        if (head.size() != 2 || head[0] != 2) {
            throw Error(path + " is a trie of another version; this host reads version 2");
        }
        check_seal(file);
        row_offsets_ = read_array(file);
        tokens_ = read_array(file);
        is_end_ = read_array(file);
        needs_end_ = head[1] == 1;
        if (row_offsets_.size() != is_end_.size() + 1 || tokens_.size() + 1 != is_end_.size()) {
            throw Error(path + " has arrays that make no trie; save it again");
        }
    }

    /// Refuse a trie whose sequences a model cannot write.
    void check(std::size_t vocab_size) const {
        const std::int64_t highest = *std::max_element(tokens_.begin(), tokens_.end());
        if (static_cast<std::size_t>(highest) >= vocab_size) {
            throw Error(path_ + " has the token id " + std::to_string(highest) +
                        "; expected 0 to " + std::to_string(vocab_size - 1) +
                        ", the model's vocabulary");
        }
    }

    /// Return the tokens that may follow, end-of-sequence ids where the path may end.
    std::vector<std::int64_t> allowed(State state, const std::set<std::int64_t>& eos_ids) const {
        const auto [first, stop] = row(state);
        std::vector<std::int64_t> tokens(tokens_.begin() + first, tokens_.begin() + stop);
        if (is_end_[static_cast<std::size_t>(state)] != 0) {
            tokens.insert(tokens.end(), eos_ids.begin(), eos_ids.end());
        }
        return tokens;
    }

    /// Return the state of a path with one more of its allowed tokens.
    State next(State state, std::int64_t token) const {
        const auto [first, stop] = row(state);
        const auto end = tokens_.begin() + stop;
        const auto found = std::lower_bound(tokens_.begin() + first, end, token);
        return found != end && *found == token ? found - tokens_.begin() + 1 : ended;
    }

    /// Return whether a path ends as it is, without an end-of-sequence token.
    bool has_ended(State state) const {
        const auto [first, stop] = row(state);
        return first == stop && !needs_end_;
    }

private:
    std::pair<std::ptrdiff_t, std::ptrdiff_t> row(State state) const {
        const auto node = static_cast<std::size_t>(state);
        return {row_offsets_.at(node), row_offsets_.at(node + 1)};
    }

    Error damaged() const {
        return Error(path_ + " is no saved trie, or not whole; save it again");
    }

    /// Refuse a file whose last array, of 132 bytes, is not the CRC-32 of all bytes before it.
    void check_seal(std::ifstream& file) const {
        const std::streampos place = file.tellg();
        file.seekg(-132, std::ios::end);
        std::streamoff left = file.tellg();
        if (!file) {
            throw damaged();
        }
        const std::vector<std::int64_t> seal = read_array(file);
        std::array<std::uint32_t, 256> table{};  // of the remainders of single bytes
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            std::uint32_t remainder = byte;
            for (int bit = 0; bit < 8; ++bit) {
                remainder = remainder >> 1 ^ ((remainder & 1U) != 0 ? 0xEDB88320U : 0U);
            }
            table[byte] = remainder;
        }
        std::uint32_t crc = ~0U;
        file.seekg(0);
        for (; left != 0; --left) {
            crc = table[(crc ^ static_cast<std::uint32_t>(file.get())) & 0xFFU] ^ crc >> 8;
        }
        if (seal.size() != 1 || seal[0] != static_cast<std::int64_t>(~crc & 0xFFFFFFFFU)) {
            throw damaged();
        }
        file.seekg(place);
    }

    /// Read a .npy array of format 1.0 and one dimension; numbers of any of its types.
    std::vector<std::int64_t> read_array(std::ifstream& file) const {
        char magic[10];
        if (!file.read(magic, sizeof magic) || std::memcmp(magic, "\x93NUMPY\x01\x00", 8) != 0) {
            throw damaged();
        }
        std::string header(static_cast<unsigned char>(magic[8]) +
                               256U * static_cast<unsigned char>(magic[9]),
                           ' ');
        std::smatch type, size;
        if (!file.read(header.data(), static_cast<std::streamsize>(header.size())) ||
            !std::regex_search(header, type, std::regex("'descr': '(<i8|<i4|<u4|\\|b1)'")) ||
            !std::regex_search(header, size, std::regex("'shape': \\((\\d+),\\)"))) {
            throw damaged();
        }
        std::vector<std::int64_t> numbers;
        for (std::size_t left = std::stoull(size[1]); left != 0; --left) {
            std::int64_t number = 0;
            if (type[1] == "<i8") {
                file.read(reinterpret_cast<char*>(&number), 8);
            } else if (type[1] == "<i4") {
                std::int32_t value = 0;
                file.read(reinterpret_cast<char*>(&value), 4);
                number = value;
            } else if (type[1] == "<u4") {
                std::uint32_t value = 0;
                file.read(reinterpret_cast<char*>(&value), 4);
                number = value;
            } else {
                number = file.get();
            }
            if (!file) {
                throw damaged();
            }
            numbers.push_back(number);
        }
        return numbers;
    }

    std::string path_;
    std::vector<std::int64_t> row_offsets_;    // (num_nodes + 1,)
    std::vector<std::int64_t> tokens_;         // of the edge to node e + 1
    std::vector<std::int64_t> is_end_;         // by node
    bool needs_end_ = false;
};

}  // namespace dsbd
