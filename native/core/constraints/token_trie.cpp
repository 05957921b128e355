// Trie of the valid token sequences, in compressed sparse rows, as a file holds it.
#include "constraints/token_trie.hpp"

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <regex>
#include <stdexcept>

#include "error.hpp"

namespace dsbd {
namespace {

constexpr std::int64_t VERSION = 2;
constexpr std::size_t SEAL_BYTES = 132;

std::string read_file(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!file.is_open() || file.bad()) {
        throw Error(path.string() + " cannot be read; give a file that TokenTrie.save wrote");
    }
    return bytes;
}

/// CRC-32 as zlib's.
std::uint32_t crc32(const char* bytes, std::size_t size) {
    static const auto table = [] {
        std::array<std::uint32_t, 256> found{};  // of the remainders of single bytes
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            std::uint32_t remainder = byte;
            for (int bit = 0; bit < 8; ++bit) {
                remainder = remainder >> 1 ^ ((remainder & 1U) != 0 ? 0xEDB88320U : 0U);
            }
            found[byte] = remainder;
        }
        return found;
    }();
    std::uint32_t crc = ~0U;
    for (std::size_t i = 0; i < size; ++i) {
        crc = table[(crc ^ static_cast<unsigned char>(bytes[i])) & 0xFFU] ^ crc >> 8;
    }
    return ~crc;
}

/// Reads consecutive .npy arrays of format 1.0 and one dimension; runtime_error: there is none.
class Arrays {
public:
    explicit Arrays(const std::string& bytes) : bytes_(bytes) {}

    template <class T>
    std::vector<T> next() {
        const std::string type = read_header();
        if (type == "<i8") return read<T, std::int64_t>();
        if (type == "<i4") return read<T, std::int32_t>();
        if (type == "<u4") return read<T, std::uint32_t>();
        return read<T, std::uint8_t>();
    }

private:
    /// Move after the header of an array; return its type.
    std::string read_header() {
        constexpr std::size_t FIXED = 10;
        if (left() < FIXED || std::memcmp(at(), "\x93NUMPY\x01\x00", 8) != 0) {
            throw std::runtime_error("another version of .npy");
        }
        const std::size_t size =
            static_cast<unsigned char>(at()[8]) + 256U * static_cast<unsigned char>(at()[9]);
        place_ += FIXED;
        if (left() < size) throw std::runtime_error("its header is cut off");
        const std::string header(at(), size);
        place_ += size;
        static const std::regex type_pattern("'descr': '(<i8|<i4|<u4|\\|b1|\\|u1)'");
        static const std::regex size_pattern("'shape': \\((\\d{1,15}),\\)");
        std::smatch type, shape;
        if (!std::regex_search(header, type, type_pattern) ||
            !std::regex_search(header, shape, size_pattern)) {
            throw std::runtime_error("an array of another type or shape");
        }
        size_ = std::stoull(shape[1]);
        return type[1];
    }
    template <class T, class Stored>
    std::vector<T> read() {
        if (size_ > left() / sizeof(Stored)) throw std::runtime_error("an array is cut off");
        std::vector<T> found(size_);
        for (T& number : found) {
            Stored stored;
            std::memcpy(&stored, at(), sizeof stored);
            place_ += sizeof stored;
            number = static_cast<T>(stored);
        }
        return found;
    }
    const char* at() const { return bytes_.data() + place_; }
    std::size_t left() const { return bytes_.size() - std::min(place_, bytes_.size()); }

    const std::string& bytes_;
    std::size_t place_ = 0, size_ = 0;
};

/// Refuse a file that does not end with the .npy array of the CRC-32 of all bytes before it.
void check_seal(const std::string& bytes) {
    if (bytes.size() < SEAL_BYTES) throw std::runtime_error("it is cut off");
    const std::size_t stop = bytes.size() - SEAL_BYTES;
    std::string seal("\x93NUMPY\x01\x00\x76\x00", 10);
    seal += "{'descr': '<u4', 'fortran_order': False, 'shape': (1,), }";
    seal.resize(SEAL_BYTES - 5, ' ');
    seal += '\n';
    const std::uint32_t crc = crc32(bytes.data(), stop);
    for (unsigned shift = 0; shift < 32; shift += 8) seal += static_cast<char>(crc >> shift & 0xFF);
    if (bytes.compare(stop, SEAL_BYTES, seal) != 0) {
        throw std::runtime_error("its checksum does not match its bytes");
    }
}

}  // namespace

TokenTrie TokenTrie::load(const std::filesystem::path& path, std::optional<End> end) {
    TokenTrie trie(path);
    try {
        trie.read_arrays(read_file(path));
    } catch (const Error&) {
        throw;
    } catch (const std::runtime_error& error) {
        throw Error(path.string() + " is no saved trie, or not whole (" + error.what() +
                    "); save it again");
    }
    if (!trie.is_trie()) {
        throw Error(path.string() + " has arrays that do not form a trie; save it again");
    }
    trie.end_ = end.value_or(trie.end_);
    return trie;
}

void TokenTrie::read_arrays(const std::string& bytes) {
    Arrays arrays(bytes);
    const auto head = arrays.next<std::int64_t>();
    if (head.size() != 2 || head[0] != VERSION) {
        throw Error(path_ + " begins with " + (head.empty() ? "[]" : std::to_string(head[0])) +
                    ", a trie of this release with " + std::to_string(VERSION) + "; save it again");
    }
    check_seal(bytes);
    row_offsets_ = arrays.next<std::int64_t>();
    tokens_ = arrays.next<std::int32_t>();
    is_end_ = arrays.next<std::uint8_t>();
    end_ = head[1] ? End::eos : End::leaf;
}

bool TokenTrie::is_trie() const {
    const std::size_t num_nodes = is_end_.size();
    if (num_nodes < 2 || row_offsets_.size() != num_nodes + 1 || tokens_.size() != num_nodes - 1) {
        return false;
    }
    if (row_offsets_.front() != 0 || at(row_offsets_.back()) != num_nodes - 1) return false;
    for (std::size_t node = 0; node < num_nodes; ++node) {
        const std::int64_t start = row_offsets_[node];
        const bool is_above = start >= static_cast<std::int64_t>(node);  // children follow parents
        if (!is_above || start > row_offsets_[node + 1]) return false;
    }
    return std::ranges::min(tokens_) >= 0;
}

std::int64_t TokenTrie::highest_token() const { return std::ranges::max(tokens_); }

void TokenTrie::check_ends(const Ints& eos_token_ids) {
    if (checked_ends_ == eos_token_ids) return;  // looking at 10 million tokens takes a while
    for (std::size_t edge = 0; edge < tokens_.size(); ++edge) {
        const std::int64_t token = tokens_[edge];
        if (std::ranges::find(eos_token_ids, token) == eos_token_ids.end()) continue;
        const bool goes_on = row_offsets_[edge + 1] != row_offsets_[edge + 2];
        const auto next = std::ranges::upper_bound(row_offsets_, static_cast<std::int64_t>(edge));
        if (!goes_on && !is_end_[at(next - row_offsets_.begin() - 1)]) continue;
        throw Error(name() + " has the end-of-sequence token " + std::to_string(token) +
                    (goes_on ? " within a sequence" : " after a sequence of its own") +
                    "; leave such tokens out, the decoder allows them where a sequence ends");
    }
    checked_ends_ = eos_token_ids;
}

std::span<const std::int32_t> TokenTrie::edges(State state) const {
    const std::size_t first = at(row_offsets_[at(state)]), stop = at(row_offsets_[at(state) + 1]);
    return std::span(tokens_).subspan(first, stop - first);
}

Constraint::State TokenTrie::advance(State state, std::int64_t token) const {
    const auto found_in = edges(state);
    const auto edge = std::ranges::lower_bound(found_in, token);
    if (edge == found_in.end() || *edge != token) {
        throw ConstraintError(name() + " has no token " + std::to_string(token) + " after node " +
                              std::to_string(state) +
                              "; a path advances by the tokens that are allowed there");
    }
    return row_offsets_[at(state)] + (edge - found_in.begin()) + 1;
}

bool TokenTrie::allow(State state, Ints& tokens, TokenBits&) const {
    const auto found = edges(state);
    tokens.insert(tokens.end(), found.begin(), found.end());
    return false;
}

bool TokenTrie::accepts(State state) const { return is_end_[at(state)]; }

bool TokenTrie::ends_next(State state) const {
    // The edges of a node lead to consecutive nodes: these are leaves if the row of edges of the
    // last one ends where that of the first one begins.
    if (end_ == End::eos) return false;
    const std::size_t first = at(row_offsets_[at(state)]) + 1;
    const std::size_t last = at(row_offsets_[at(state) + 1]) + 1;
    return row_offsets_[first] == row_offsets_[last];
}

std::optional<std::size_t> TokenTrie::most_tokens() const {
    std::size_t depth = 0, last = 1;  // the nodes before `last` are those of this depth and above
    for (std::size_t next; (next = at(row_offsets_[last]) + 1) > last; last = next) ++depth;
    return depth + (end_ == End::eos);
}

}  // namespace dsbd
