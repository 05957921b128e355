// Rendering by minja, with the filters and functions of transformers.
#include "minja_template.hpp"

#include "../core/error.hpp"

#ifdef DSBD_HAS_CHATS

#include <ctime>

#include <minja/minja.hpp>

namespace dsbd {

namespace {

using minja::ArgumentsValue;
using minja::Context;
using minja::Value;

/// The filter `tojson`, with Python's separators, which escapes no HTML.
Value tojson(const std::shared_ptr<Context>&, ArgumentsValue& arguments) {
    arguments.expectArgs("tojson", {1, 3}, {0, 4});
    const auto given = [&](std::size_t index, const std::string& name) {
        return index < arguments.args.size() ? arguments.args[index] : arguments.get_named(name);
    };
    if (given(1, "ensure_ascii").to_bool() || !given(3, "separators").is_null() ||
        given(4, "sort_keys").to_bool()) {
        throw std::runtime_error("tojson with ensure_ascii, separators or sort_keys");
    }
    const Value indent = given(2, "indent");
    if (indent.is_null()) return arguments.args[0].dump(-1, true);
    return arguments.args[0].get<Json>().dump(indent.get<int>());
}

Value strftime_at(std::optional<std::size_t> now, ArgumentsValue& arguments) {
    arguments.expectArgs("strftime_now", {1, 1}, {0, 0});
    const std::time_t time = now ? static_cast<std::time_t>(*now) : std::time(nullptr);
    std::tm parts{};
    now ? gmtime_r(&time, &parts) : localtime_r(&time, &parts);
    char text[256];
    const std::string format = arguments.args[0].get<std::string>();
    return std::string(text, std::strftime(text, sizeof text, format.c_str(), &parts));
}

}  // namespace

MinjaTemplate::MinjaTemplate(const std::string& source, const std::string& name) {
    try {
        root_ = minja::Parser::parse(source, {true, true, false});  // trims and strips blocks
    } catch (const std::exception& error) {
        throw Error("the chat template '" + name + "' is not understood by minja: " + error.what() +
                    "; use the C library for chats of this model");
    }
}

std::string MinjaTemplate::rendered(const Json& variables, std::optional<std::size_t> now) const {
    try {
        Value values(variables);
        values.set("tojson", Value::callable(tojson));
        values.set("strftime_now", Value::callable([now](const auto&, ArgumentsValue& arguments) {
                       return strftime_at(now, arguments);
                   }));
        const auto context = Context::make(std::move(values));
        return static_cast<const minja::TemplateNode*>(root_.get())->render(context);
    } catch (const std::exception& error) {
        std::string reason = error.what();
        reason = reason.substr(0, reason.find('\n'));
        throw Error("the chat template refuses these messages: " + reason +
                    "; give roles and contents that the checkpoint's template takes");
    }
}

std::string shown(const Json& value) { return Value(value).dump(); }

}  // namespace dsbd

#else

namespace dsbd {

MinjaTemplate::MinjaTemplate(const std::string&, const std::string&) {
    throw Error(
        "this build has no chats, because minja was absent; build it with DSBD_MINJA_DIR, "
        "or give a rendered prompt");
}

std::string MinjaTemplate::rendered(const Json&, std::optional<std::size_t>) const { return ""; }
std::string shown(const Json& value) { return in_short(value); }

}  // namespace dsbd

#endif
