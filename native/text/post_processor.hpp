// Post-processors of tokenizer.json: the special tokens around a text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "json_fields.hpp"

namespace dsbd {

class PostProcessor {
public:
    /// Read the field `post_processor` of tokenizer.json.
    explicit PostProcessor(const JsonObject& tokenizer);

    /// Append the ids of a text with the tokens around them.
    void append(const std::vector<std::int64_t>& ids, std::vector<std::int64_t>& all) const;

private:
    static constexpr std::int64_t text_ = -1;

    void read_template(const JsonObject& step);
    void read_ends(const JsonObject& step);

    std::vector<std::int64_t> parts_{text_};  // ids, and `text_` for those of the text
};

}  // namespace dsbd
