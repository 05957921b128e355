// The tokens that a constraint allows after a node of a forest.
#include "logits_processing/allowed_after.hpp"

#include <algorithm>

#include "logits_processing/constraint.hpp"
#include "logits_processing/path_states.hpp"

namespace dsbd {

AllowedAfter AllowedAfter::after(std::int64_t node, const ConstraintStates* states) {
    AllowedAfter found;
    if (!states) return found;
    const Constraint& constraint = states->constraint;
    const std::int64_t state = states->states[static_cast<std::size_t>(node)];
    found.is_listed = true;
    constraint.list_allowed(state, found.tokens);
    found.num_listed = found.tokens.size();
    if (constraint.accepts(state)) {
        found.tokens.insert(found.tokens.end(), states->eos.begin(), states->eos.end());
        std::ranges::sort(found.tokens);
    }
    return found;
}

bool AllowedAfter::allows(std::int64_t token) const {
    return !is_listed || std::ranges::binary_search(tokens, token);
}

}  // namespace dsbd
