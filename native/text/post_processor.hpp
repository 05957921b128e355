// Post-processors of tokenizer.json: the special tokens around a text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "json_fields.hpp"

namespace dsbd {

class PostProcessor {
public:
    /// `json`: the entry `post_processor`, null without one.
    PostProcessor(const SortedJson& json, const std::string& where);

    /// Append the ids of a text with the tokens around them.
    void append(const std::vector<std::int64_t>& ids, std::vector<std::int64_t>& all) const;

private:
    static constexpr std::int64_t text_ = -1;

    void read_template(Fields& fields);
    void read_ends(Fields& fields);

    std::vector<std::int64_t> parts_{text_};  // ids, and `text_` for those of the text
};

}  // namespace dsbd
