// Decoders of tokenizer.json, and how its tokens join into text.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "json_fields.hpp"

namespace dsbd {

/// How later tokens can change the text of earlier ones.
struct TextJoints {
    bool is_local = true;         // no step looks for text across tokens; if not, anything can change
    bool joins_bytes = false;   // tokens are bytes (`ByteLevel`)
    bool has_byte_runs = false;  // some tokens are bytes, decoded a run at a time (`ByteFallback`)
};

/// Characters that a `Strip` may take from the beginning of the joined text.
inline constexpr std::size_t most_stripped = 2;

/// The steps of a decoder, each from tokens to tokens; at the end they are joined.
class Decoder {
public:
    /// Read the field `decoder` of tokenizer.json; without it tokens are joined by spaces.
    explicit Decoder(const JsonObject& tokenizer);

    std::string decoded(std::vector<std::string> tokens) const;
    const TextJoints& joints() const { return joints_; }

private:
    std::vector<std::function<void(std::vector<std::string>&)>> steps_;
    TextJoints joints_;
    bool is_given_ = false;
};

/// Return the byte that a token such as <0x0A> is.
std::optional<char> byte_of_spelling(std::string_view token);

}  // namespace dsbd
