#include "post_processor.hpp"

#include <limits>

namespace dsbd {

namespace {

std::int64_t token_id(const SortedJson& json, const Fields& fields, const char* name) {
    if (!json.is_number_unsigned() ||
        json.get<std::uint64_t>() > std::numeric_limits<std::int32_t>::max()) {
        fields.refuse(name, "token ids");
    }
    return json.get<std::int64_t>();
}

}  // namespace

PostProcessor::PostProcessor(const SortedJson& json, const std::string& where) {
    bool is_read = false;
    for (const auto& [step, place] : steps_of(json, where, "processors")) {
        Fields fields(*step, place);
        const std::string type = fields.text("type");
        if (type == "ByteLevel") {  // changes offsets alone
            continue;
        }
        if (is_read) fields.refuse("type", "one post-processor that adds tokens");
        is_read = true;
        if (type == "TemplateProcessing") {
            read_template(fields);
        } else if (type == "BertProcessing" || type == "RobertaProcessing") {
            read_ends(fields);
        } else {
            fields.refuse("type", "a post-processor that is known here");
        }
        fields.check_all_read();
    }
}

void PostProcessor::read_template(Fields& fields) {
    parts_.clear();
    Fields tokens(fields.at("special_tokens"), fields.place("special_tokens"));
    for (const SortedJson& part : fields.list("single")) {
        Fields kind(part, fields.place("single"));
        if (kind.find("Sequence") != nullptr) {
            Fields sequence(kind.at("Sequence"), kind.where());
            if (sequence.text("id") != "A") sequence.refuse("id", "A, the only text");
            parts_.push_back(text_);
        } else {
            Fields named(kind.at("SpecialToken"), kind.where());
            Fields token(tokens.at(named.text("id")), tokens.where());
            for (const SortedJson& id : token.list("ids")) parts_.push_back(token_id(id, token, "ids"));
        }
        kind.check_all_read();
    }
    fields.skip({"pair"});
}

void PostProcessor::read_ends(Fields& fields) {
    const auto end = [&](const char* name) {
        const SortedJson& pair = fields.list(name);
        if (pair.size() != 2) fields.refuse(name, "a token and its id");
        return token_id(pair[1], fields, name);
    };
    parts_ = {end("cls"), text_, end("sep")};
    fields.skip({"trim_offsets", "add_prefix_space"});
}

void PostProcessor::append(const std::vector<std::int64_t>& ids,
                           std::vector<std::int64_t>& all) const {
    for (const std::int64_t part : parts_) {
        if (part == text_) {
            all.insert(all.end(), ids.begin(), ids.end());
        } else {
            all.push_back(part);
        }
    }
}

}  // namespace dsbd
