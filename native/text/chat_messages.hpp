// Messages of a chat: checked, prepared for templates, and marked to find dropped ones.
//
// A template silently drops messages that it has no place for. A second rendering, with a unique
// number in every text, name and call's name, shows whether the template keeps everything; only
// numbers that are missing there need further renderings. Such numbers also show whether it reads
// contents part by part.
#pragma once

#include <functional>
#include <string>

#include "json_fields.hpp"

namespace dsbd {

/// How the arguments of calls are given to a template.
enum class Arguments { object, text };

using Render = std::function<std::string(const Json& messages)>;

/// Raise Error unless messages are a list of objects with a role.
void check_messages(const Json& messages);

/// Return checked messages as a template of this source reads them: without nulls, with arguments
/// in this form; the role `developer` becomes `system` if the template does not use it.
Json messages_for(const std::string& source, const Json& messages, Arguments form);

/// Return messages whose texts are one text each, a line end between two parts, except parts that
/// the template reads itself: all of them are in the prompt, and not as a list.
Json with_joined_parts(Json messages, const Render& render);

/// Raise Error for the first message, or call or name of one, that leaves no trace in a prompt.
///
/// messages: as the template reads them; text: the prompt.
/// render: returns the prompt of other messages; raises if the template refuses them.
void check_traces(const Json& messages, const std::string& text, const Render& render);

/// Return the arguments of all calls.
std::vector<Json> arguments_in(const Json& messages);

/// Return JSON as Python writes it: with a space after commas and colons.
std::string python_json(const Json& value);

}  // namespace dsbd
