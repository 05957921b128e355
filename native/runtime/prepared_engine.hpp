// Cache of prepared engines (prepared_engine.py): optimized and packed on disk, mapped by openings.
#pragma once

#include <string>

#include "runtime/ort_graph.hpp"

namespace dsbd {

/// Open "target" or "draft" from its prepared form in `settings.engine_cache`, which is made if it
/// is absent or damaged: FOLDER/<name>/ with model.onnx, model.bin and whole.json, written last.
///
/// The name covers the engine's files, the version of ONNX Runtime, the processor and this format,
/// which is not Python's. If it cannot be written, a line on stderr says so and the original is
/// opened. Error: the engine cannot be loaded, or `engine_cache` is a file.
Ort::Session open_prepared(const Ort::Env& env, const Bundle& bundle, const std::string& role,
                           const EngineSettings& settings);

}  // namespace dsbd
