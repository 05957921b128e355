// Prompts of encoder-decoders (prompts.py): the prompt of a request is its source. Decoding begins
// with the model's start token, and all its rows depend on the source too.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "forward.hpp"
#include "runtime/manifest.hpp"

namespace dsbd {

/// A prompt as the engines read it.
struct RequestInputs {
    Ints prompt_ids;            // the tokens that decoding continues
    SourcePointer source = {};  // null: the model reads none
    Ints copied_ids = {};       // tokens of the source, if it shares the target's vocabulary
};

/// The options of a request without its languages, and the language of its source.
struct LanguageOptions {
    std::string options;
    Json src_lang;  // null: not given
};

/// Turns prompts into inputs of the engines; for any thread.
class PromptReader {
public:
    explicit PromptReader(const Bundle& bundle)
        : bundle_(bundle), encoder_(bundle.target.encoder) {}

    bool reads_source() const { return encoder_.has_value(); }
    /// Return the options with the language of the target as first token; Error: it is unknown.
    LanguageOptions with_language(std::string_view options) const;
    /// Return the inputs of a request whose prompt are these tokens. Error: they, or the language,
    /// are invalid; CapacityError: the source is longer than an encoder reads.
    RequestInputs read(Ints token_ids, bool is_text, const Json& src_lang);
    /// CapacityError: a source of so many tokens is longer than an encoder reads.
    void check_length(std::size_t num_tokens) const;

private:
    std::int64_t language(const char* option, const Json& name) const;
    void put_language(Ints& token_ids, std::int64_t language) const;
    SourcePointer the_one(const Ints& token_ids);

    const Bundle& bundle_;
    const std::optional<EncoderEntry>& encoder_;  // of the target
    std::mutex mutex_;
    std::map<Ints, std::weak_ptr<const Source>> sources_;  // so that equal ones are one object
};

}  // namespace dsbd
