"""A portable graph and its form for WebGPU: the same path by both, on the CPU."""

from pathlib import Path

import numpy as np
import onnx_ir as ir

from dsbd_export.passes.webgpu_graph import use_webgpu_operators
from dsbd_runtime.bundle_files.manifest import ModelEntry
from scripts.path_ways import PathEngine, Way

NUM_TOKENS = 40  # beyond every sliding window


def write_form(model_file: Path, context_length: int) -> Path:
    """Write the form for WebGPU of a portable graph; return its file."""
    model, file = ir.load(model_file), model_file.parent / "webgpu.onnx"
    use_webgpu_operators(model, context_length)
    ir.save(model, file, external_data="webgpu.onnx.data")
    return file


def difference_of_forms(model_file: Path, entry: ModelEntry) -> float:
    """Return the largest difference of a logit: a prompt in one call, and calls of a forest."""
    files = (model_file, write_form(model_file, entry.context_length))
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, entry.vocab_size, NUM_TOKENS)
    ways = [Way.plain(NUM_TOKENS), Way.drawn(NUM_TOKENS, rng)]
    found = []
    for file in files:
        engine, same = PathEngine(file, entry), np.random.default_rng(1)
        found.append(np.concatenate([engine.logits(token_ids, way, same) for way in ways]))
    assert np.ptp(found[0]) > 0.1
    return float(np.abs(found[0] - found[1]).max())
