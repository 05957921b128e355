// Check of an engine's numbers when it is opened: some GPU drivers compute wrong ones.
#pragma once

#include <string>

#include "runtime/ort_engine.hpp"

namespace dsbd {

/// Error unless an open engine on a device computes the processor's numbers: of a prompt, a forest
/// with more rows than a subgroup, and rows after a prune, whose last calls are replayed. It is
/// empty afterwards.
void check_numbers(OrtEngine& engine, const Ort::Env& env, const Bundle& bundle,
                   const std::string& role, const EngineSettings& settings);

}  // namespace dsbd
