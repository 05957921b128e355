// Post-processors of tokenizer.json: special tokens around a text.
#include "steps.hpp"

namespace dsbd {

PostProcessor::PostProcessor(const JsonObject& tokenizer) {
    bool is_read = false;
    for (const JsonObject& step : tokenizer.steps("post_processor", "processors")) {
        const std::string type = step.text("type");
        if (type == "ByteLevel") continue;  // changes offsets alone
        if (is_read) step.refuse("type", "one post-processor that adds tokens");
        is_read = true;
        if (type == "TemplateProcessing") {
            read_template(step);
        } else if (type == "BertProcessing" || type == "RobertaProcessing") {
            read_ends(step);
        } else {
            step.refuse("type", "a post-processor that is known here");
        }
        step.check_all_read();
    }
}

void PostProcessor::read_template(const JsonObject& step) {
    parts_.clear();
    const JsonObject tokens = step.object("special_tokens");
    for (const JsonObject& part : step.objects("single")) {
        if (part.has("Sequence")) {
            const JsonObject sequence = part.object("Sequence");
            if (sequence.text("id") != "A") sequence.refuse("id", "A, the only text");
            parts_.push_back(text_);
        } else {
            const std::string name = part.object("SpecialToken").text("id");
            const std::vector<std::int64_t> ids = tokens.object(name).numbers("ids");
            parts_.insert(parts_.end(), ids.begin(), ids.end());
        }
        part.check_all_read();
    }
    step.skip({"pair"});
}

void PostProcessor::read_ends(const JsonObject& step) {
    const auto end = [&](const char* name) {
        const Json& pair = step.list(name);
        if (pair.size() != 2 || !is_whole(pair[1])) step.refuse(name, "a token and its id");
        return pair[1].get<std::int64_t>();
    };
    parts_ = {end("cls"), text_, end("sep")};
    step.skip({"trim_offsets", "add_prefix_space"});
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
