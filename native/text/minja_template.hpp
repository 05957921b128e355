// A chat template, by google/minja.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "json_fields.hpp"

namespace dsbd {

/// A compiled template. Threads may share it.
class MinjaTemplate {
public:
    /// Error: the source is not understood, or this build has no minja.
    MinjaTemplate(const std::string& source, const std::string& name);

    /// Return the text for variables, an object; Error if the template refuses them.
    /// now: see ChatTemplate::render.
    std::string rendered(const Json& variables, std::optional<std::size_t> now) const;

private:
    std::shared_ptr<const void> root_;
};

/// Return how a template shows a value that it writes out as it is.
std::string shown(const Json& value);

}  // namespace dsbd
