"""The oracle of hosts: model.onnx run by hand, with numpy alone, gives what CausalLM gives.

The parity gate runs engines as hosts do, so a mistake in the host could pass it together with a
graph. Here a call has all tokens of a path at once, in zero caches, by the tensors' names as the
contract writes them: no cache is kept, moved or folded, and no code of the runtime is used.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from dsbd_export.gate.unwritten_bundle import unwritten_bundle
from dsbd_forward.forward import Forward
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm
from scripts.family_checkpoints import VOCAB_SIZE, write_family_checkpoint
from tests.export.gate import export_alone
from tests.ort_sessions import cpu_session

NUM_PREFIX = 56  # whose first 40 rows are folded
PARENTS = (-1, -1, 0, 0, 1, 2, 2)  # nodes of a tree after the prefix
CAPACITY = 80
FIRST_ROW = 5  # in the caches: no row is its own position
FIRST_RECENT_ROW = 3


@pytest.fixture(scope="module", params=["qwen3", "granite_hybrid"])
def bundle(request, tmp_path_factory, captures):
    """A plain decoder, and a model with convolutions, recurrences and attention."""
    folder = tmp_path_factory.mktemp(request.param)
    source = write_family_checkpoint(request.param, folder / "checkpoint")
    _, entry, _ = export_alone(source, folder, captures, logits="full")
    return unwritten_bundle(folder, "target", entry)


def logits_by_hand(session: ort.InferenceSession, path: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of the last row of a path, (V,)."""
    length = len(path)
    rows, chain = np.arange(length), np.tri(length, dtype=np.bool_)
    mask = np.zeros((1, 1, length, CAPACITY), np.bool_)
    mask[0, 0, :, FIRST_ROW : FIRST_ROW + length] = chain
    recent_mask = np.zeros((1, 1, length, CAPACITY), np.bool_)
    recent_mask[0, 0, :, FIRST_RECENT_ROW : FIRST_RECENT_ROW + length] = chain
    arrays: dict[str, NDArray[Any]] = {
        "input_ids": path[None],
        "position_ids": rows[None],
        "attention_mask": mask,
        "write_indices": np.array([FIRST_ROW]),
        "logit_rows": rows[-1:],
        "recent_write_indices": np.array([FIRST_RECENT_ROW]),
        "recent_mask": recent_mask,
        "checkpoint_rows": rows[None],
        "row_places": rows,
    }
    feeds = {}
    for tensor in session.get_inputs():
        if tensor.name == "ancestors":
            above = rows[:, None] - np.arange(tensor.shape[1], 0, -1)
            feeds[tensor.name] = np.where(above < 0, -1, above + FIRST_RECENT_ROW)
        elif tensor.name in arrays:
            feeds[tensor.name] = arrays[tensor.name]
        elif tensor.name.startswith("state"):  # of the checkpoint where paths begin
            feeds[tensor.name] = np.zeros((1, *tensor.shape[1:]), np.float32)
        else:
            assert tensor.name.startswith("past_key_values.")
            _, num_heads, _, width = tensor.shape
            feeds[tensor.name] = np.zeros((1, num_heads, CAPACITY, width), np.float32)
    [[logits]] = session.run(["logits"], feeds)
    return np.asarray(logits)


def append(model: CausalLM, token_ids: NDArray[np.int64], parents: list[int]) -> NDArray[Any]:
    """Append rows below rows of the cache, -1 where a path begins; return all of their logits."""
    first_row, num_new = model.num_rows, len(token_ids)
    mask = np.zeros((num_new, first_row + num_new), np.bool_)
    for row, parent in enumerate(parents):
        if parent >= first_row:
            mask[row] = mask[parent - first_row]
        else:
            mask[row, : parent + 1] = True  # the rows of the prefix are a path
        mask[row, first_row + row] = True
    rows = np.arange(num_new)
    result = model.forward(Forward(token_ids, mask.sum(axis=1) - 1, mask, rows))
    assert result.logits.whole is not None
    return result.logits.whole


def test_the_host_gives_what_the_graph_gives_by_hand(bundle):
    drawn = np.random.default_rng(0).integers(0, VOCAB_SIZE, NUM_PREFIX + len(PARENTS) + 1)
    prefix, nodes, more = np.split(drawn, [NUM_PREFIX, NUM_PREFIX + len(PARENTS)])
    session = cpu_session(Path(bundle.model_path("target")))
    paths = []
    for node, parent in enumerate(PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else prefix), nodes[node]])
    last = NUM_PREFIX - 1
    with load_causal_lm(bundle, "target", settings=EngineSettings(num_threads=1)) as model:
        append(model, prefix, list(range(-1, last)))
        below = [last if parent < 0 else NUM_PREFIX + parent for parent in PARENTS]
        found = append(model, nodes, below)
        kept = np.array([*range(NUM_PREFIX), *(NUM_PREFIX + node for node in (0, 2, 6))])
        model.keep(kept)  # the path to node 6, whose rows move
        again = append(model, more[:1], [model.num_rows - 1])
    for path, logits in zip(paths, found, strict=True):
        np.testing.assert_allclose(logits, logits_by_hand(session, np.array(path)), atol=2e-5)
    wanted = logits_by_hand(session, np.array([*paths[6], more[0]]))
    np.testing.assert_allclose(again[0], wanted, atol=2e-5)
