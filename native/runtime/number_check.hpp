// Check of an engine's numbers when it is opened: some GPU drivers compute wrong ones.
#pragma once

#include <memory>
#include <string>

#include "runtime/ort_engine.hpp"

namespace dsbd {

/// Open an engine, as the constructor of OrtEngine. Error also if it is on a device and does not
/// compute the processor's numbers: of a prompt, of a forest with more rows than a subgroup, and of
/// rows after a prune, whose last calls are replayed.
std::unique_ptr<OrtEngine> checked_engine(const Ort::Env& env, const Bundle& bundle,
                                          const std::string& role, const EngineSettings& settings,
                                          const OrtEngine* target = nullptr);

}  // namespace dsbd
