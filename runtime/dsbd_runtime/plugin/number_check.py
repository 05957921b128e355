"""Check that an engine computes right numbers when it is opened: some GPU drivers do not.

It runs a prompt, a forest with more rows than a subgroup, a prune and further rows. The last calls
are replayed ones. The engine must return the CPU's numbers.
"""

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.features import ZEROS, ParentFeatures
from dsbd_forward.forward import Forward
from dsbd_forward.logits import DenseLogits, TopLogits
from dsbd_forward.rows import Ints
from dsbd_runtime.device.device_session import DeviceSession
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.session import EngineOptions
from dsbd_runtime.errors import CapacityError, EngineError, ProviderError
from dsbd_runtime.ort.ort_module import without_packing
from dsbd_runtime.ort.ort_session import OrtSession

_NUM_PROMPT, _NUM_NODES = 9, 35
_NUM_LAST = 4  # calls of one size: two are queued and the second is recorded, two are replayed
_MOST_DIFFERENCE = {"fp32": 1e-3, "fp16": 5e-2}  # by type, as a fraction of the largest logit


def check_numbers(session: DeviceSession, request: EngineOptions) -> None:
    """Raise ProviderError unless an open engine computes the CPU's numbers; leave it empty."""
    entry, place = request.bundle.entry(request.role), request.placement
    name = f"{place.provider.name}:{place.device_id}"
    model = CausalLM(session, entry)
    try:
        computed = _numbers(model)
    except (CapacityError, EngineError) as error:
        raise ProviderError(
            f"{name} cannot run {request.bundle.model_path(request.role)}: {error}; use provider "
            "'cpu', or export with another --dtype"
        ) from error
    finally:
        model.keep(np.zeros(0, np.int64))
    wanted = _numbers_on_cpu(request)
    size = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0))
    others = computed != wanted  # -inf of tokens that a draft never proposes is equal
    difference = float(np.abs(computed[others] - wanted[others]).max(initial=0.0))
    if not difference <= _MOST_DIFFERENCE[entry.dtype] * size:  # true for NaN too
        raise ProviderError(
            f"{name} computes wrong logits: they differ by {difference:.3g} from the CPU's, whose "
            f"largest is {size:.3g}; update the GPU's driver, or use provider 'cpu'"
        )


def _numbers_on_cpu(request: EngineOptions) -> NDArray[np.float32]:
    bundle, role = request.bundle, request.role
    entry, path = bundle.entry(role), bundle.model_path(role)
    # The weights stay in the file, which is mapped: the check needs no second copy of them.
    session = OrtSession(path, entry, adapt=lambda options: without_packing(options, entry))
    with CausalLM(session, entry) as model:
        return _numbers(model)


def _numbers(model: CausalLM) -> NDArray[np.float32]:
    """Return logits of a prompt's last row, a forest, and rows after a prune, (rows, n)."""
    nodes = np.arange(_NUM_NODES)
    prompt, forest = np.arange(_NUM_PROMPT) - 1, _NUM_PROMPT + (nodes - 1) // 2  # a binary tree
    forest[0] = _NUM_PROMPT - 1
    seen = np.zeros((_NUM_PROMPT + _NUM_NODES,) * 2, np.bool_)
    for row, parent in enumerate([*prompt, *forest]):
        seen[row] = seen[parent]
        seen[row, row] = True
    logits = [
        _logits(model, seen[:_NUM_PROMPT, :_NUM_PROMPT], np.array([_NUM_PROMPT - 1])),
        _logits(model, seen[_NUM_PROMPT:], nodes),
    ]
    model.keep(seen[-1].nonzero()[0])
    for _ in range(_NUM_LAST):
        logits.append(_logits(model, np.ones((1, model.num_rows + 1), np.bool_), np.array([0])))
    return np.concatenate(logits)


def _logits(model: CausalLM, mask: NDArray[np.bool_], rows: Ints) -> NDArray[np.float32]:
    """Append rows with the mask (S, N); return the logits of ``rows``, (rows, n)."""
    num_new = len(mask)
    token_ids = (np.arange(num_new) * 7919 + model.num_rows) % model.spec.vocab_size
    positions = np.minimum(mask.sum(axis=1) - 1, model.context_length - 1)
    forward = Forward(token_ids, positions, mask, rows)
    if model.spec.reads_features:
        none = np.full(num_new, ZEROS)
        forward.parent_features = ParentFeatures((), none, none)
    logits = model.forward(forward).logits
    if isinstance(logits, TopLogits):
        return np.column_stack([logits.top_logits, logits.logsumexp])
    assert isinstance(logits, DenseLogits)
    return logits.values
