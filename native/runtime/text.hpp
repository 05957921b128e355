// Text of token ids (results.py): streams, stop strings, and who reads and writes it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config.hpp"
#include "logits_processing/path_states.hpp"
#include "runtime/manifest.hpp"
#include "text/special_marks.hpp"

namespace dsbd {

using TokenSpan = TokenIds;

/// Turns texts into token ids and back.
class Text {
public:
    virtual ~Text() = default;
    /// Token ids of a prompt, with special tokens; for an encoder-decoder it is the source.
    virtual Ints prompt(std::string_view text) const = 0;
    /// Token ids of a text that is generated, without special tokens.
    virtual Ints encode(std::string_view text) const = 0;
    /// Token ids of the messages of a chat.
    virtual Ints chat(const Json& messages) const = 0;
    virtual std::unique_ptr<TextRun> after(TokenSpan prompt_ids, bool skips_special) const = 0;
};

/// The text of a bundle; what it cannot do raises Error with the reason.
std::unique_ptr<const Text> text_of(const Bundle& bundle);

/// Callbacks of a program, instead of the bundle's own text. decode: the text of token ids.
struct TextCallbacks {
    std::function<Ints(std::string_view text)> encode;
    std::function<std::string(TokenSpan token_ids)> decode;
};
std::unique_ptr<const Text> text_by(TextCallbacks callbacks);

/// Text of new tokens, up to a stop string after the first `min_new_tokens`.
std::string text_until_stop(const TextRun& start, const Ints& token_ids,
                            const DecodingConfig& config);

/// The state of the empty continuation for the stop strings of a request; null without any.
std::shared_ptr<const StopState> stop_state(const TextRun& start, const DecodingConfig& config);

/// Streams text up to the first stop string; text that may begin one is held back.
class StopFilter {
public:
    explicit StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {}

    /// Take the next piece; return the text that can no longer be part of a stop string.
    std::string push(const std::string& piece);
    /// Return the rest, which began like a stop string that was never completed.
    std::string finish();

private:
    std::size_t num_begun(std::string_view text) const;

    std::vector<std::string> stops_;
    std::string held_;  // may begin a stop string
    bool is_over_ = false;
};

/// Streams the text of a sequence up to a stop string.
class TextStream {
public:
    TextStream(const TextRun& start, const DecodingConfig& config);

    /// Take the next tokens; return the text that is final.
    std::string push(TokenSpan token_ids);
    std::string finish();

private:
    std::unique_ptr<TextRun> run_;
    std::vector<StopFilter> filters_;  // two if there are special stop strings: theirs is first
    std::size_t num_exempt_;           // tokens whose text no stop string ends
};

}  // namespace dsbd
