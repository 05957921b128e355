// From the options that a caller gives to the config of the request.
//
// Of each option the first of these is used: what the caller gives; the model's, of its
// generation_config.json; the usual one of chats; the default of the table. Only what the caller
// gives is refused: a default that means nothing to the strategy, or contradicts the other options,
// is left out.
#pragma once

#include "config.hpp"

namespace dsbd {

/// What options depend on, of a bundle.
struct BundleFacts {
    Ints eos_token_ids;
    std::size_t context_length = 0;  // of the pair
    // K of a target that returns so many logits of a position and keeps no others; 0 if any can be
    // read.
    std::size_t num_top_logits = 0;
    bool reads_source = false;
    bool has_draft = false;
    bool is_for_chats = false;  // whether requests are chats, which have defaults of their own
    std::string generation_config;  // content of generation_config.json; empty: none
    std::string generation_config_file;  // its path, for messages
};

/// Gives the tokens of a text.
using Encode = std::function<Ints(const std::string&)>;

/// Defaults of the requests to one bundle.
class ModelDefaults {
public:
    /// Error: the file of the bundle is invalid.
    explicit ModelDefaults(BundleFacts facts);

    /// Return the config of a request, ends, seed and drafter decided; Error: see decoding_config.
    ///
    /// options: a JSON object. encode: gives the tokens of a predicted text; null: the bundle has
    /// no native text.
    DecodingConfig config(std::string_view options, std::size_t num_prompt_tokens,
                          const Encode& encode = nullptr) const;

    /// The fields of the file that dsbd-ort does not support and that have no effect: a JSON
    /// object.
    std::string not_built() const;

private:
    struct Given;

    BundleFacts facts_;
    std::shared_ptr<const Given> given_;
};

}  // namespace dsbd
