// Encoder of an encoder-decoder: its entry in the manifest (encoder_entry.py).
#pragma once

#include <optional>

#include "runtime/manifest.hpp"

namespace dsbd {

/// Return the entry of the encoder of an engine, none if that reads no source. Error: it is
/// invalid, or its source is sound or a picture.
std::optional<EncoderEntry> encoder_of(const JsonObject& model, std::size_t vocab_size,
                                       const Json& made_by);

/// Error: the draft reads a source that requests do not have, or an encoder that is not shared.
void check_encoders(const Bundle& bundle);

}  // namespace dsbd
