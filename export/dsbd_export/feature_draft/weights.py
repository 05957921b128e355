"""Published weights of a feature draft, and weights that it takes from its target."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.weights import open_weights, safetensors_files
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.feature_draft.checkpoint import FeatureDraftCheckpoint
from dsbd_export.feature_draft.model import FeatureDraft

_OLD_FILE = "pytorch_model.bin"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_OF_TARGET = {
    _EMBEDDING: ["model.embed_tokens.weight"],
    _HEAD: ["lm_head.weight", "model.embed_tokens.weight"],  # the second one if they are tied
}
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")  # copies of the target's
_RENAMED = {"midlayer.": "layers.0."}


def load_feature_draft(checkpoint: FeatureDraftCheckpoint) -> FeatureDraft:
    """Return the draft in evaluation mode and fp32; raise ExportError if weights do not fit."""
    features = checkpoint.features
    weights = dict(_weights(checkpoint))
    known = weights.pop("t2d", None)
    draft = FeatureDraft(features)
    wanted = dict(draft.state_dict())
    if features.ties_head:
        del wanted[_HEAD]
        weights.pop(_HEAD, None)
    weights.setdefault("d2t", torch.zeros(features.draft_vocab_size, dtype=torch.int64))
    for name in (_EMBEDDING, _HEAD):
        if name in wanted and name not in weights:
            weights[name] = _of_target(checkpoint, name)
    _check(checkpoint, weights, {name: tuple(value.shape) for name, value in wanted.items()})
    _check_tokens(checkpoint, weights["d2t"], known)
    draft.load_state_dict(weights, strict=not features.ties_head)  # in fp32, as the module is
    draft.eval()
    return draft


def _weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by the names of the module."""
    folder = checkpoint.folder
    try:
        if safetensors_files(folder):
            with open_weights(folder) as readers:
                stored = {name: reader[:] for name, reader in readers.items()}
        else:
            stored = torch.load(folder / _OLD_FILE, weights_only=True, map_location="cpu")
    except Exception as error:
        raise ExportError(
            f"the draft at {folder} cannot be loaded: {reason_of(error)}; check its files"
        ) from error
    for name, value in stored.items():
        name = name.removeprefix("model.")
        for old, new in _RENAMED.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if name not in _UNUSED and not name.endswith("rotary_emb.inv_freq"):
            yield name, value


def _of_target(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a weight that a draft shares with its target; raise ExportError if there is none."""
    where = f"the draft at {checkpoint.folder} has no {name} and needs that of its target"
    if checkpoint.target_folder is None:
        raise ExportError(f"{where}; export both together, with --target and --draft")
    names = _OF_TARGET[name]
    with open_weights(checkpoint.target_folder) as readers:
        for found in names:
            if found in readers:
                weight: Tensor = readers[found][:]
                return weight
    raise ExportError(
        f"{where}, but {checkpoint.target_folder} has no {names[0]} in safetensors; copy the "
        "weight into the draft's checkpoint"
    )


def _check(
    checkpoint: Checkpoint, weights: Mapping[str, Tensor], shapes: Mapping[str, Any]
) -> None:
    """Raise ExportError unless the weights are those of the module, by name and shape."""
    where = f"the draft at {checkpoint.folder}"
    if missing := sorted(shapes.keys() - weights.keys()):
        raise ExportError(
            f"{where} lacks {len(missing)} weights, the first is {missing[0]}; the checkpoint is "
            "incomplete, copy or download it again"
        )
    if unknown := sorted(weights.keys() - shapes.keys()):
        raise ExportError(
            f"{where} has {len(unknown)} weights that this version does not support, the first is "
            f"{unknown[0]}; choose another checkpoint"
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ExportError(
                f"weight {name} of {where} has shape {tuple(weights[name].shape)}, expected "
                f"{shape} by its config and target; give the target that it was trained for"
            )


def _check_tokens(checkpoint: Checkpoint, d2t: Tensor, known: Tensor | None) -> None:
    """Raise ExportError unless d2t names distinct tokens of the target, and t2d the same ones."""
    num_tokens = checkpoint.vocab_size
    tokens = torch.arange(len(d2t)) + d2t
    is_named = torch.zeros(num_tokens, dtype=torch.bool)
    if tokens.min() >= 0 and tokens.max() < num_tokens:
        is_named[tokens] = True
    if is_named.sum() != len(d2t):
        raise ExportError(
            f"d2t of the draft at {checkpoint.folder} maps {len(d2t)} tokens to "
            f"{int(is_named.sum())} different ones below {num_tokens}; expected differences, "
            "target id = draft id + d2t"
        )
    if known is not None and not torch.equal(known.bool(), is_named):
        raise ExportError(
            f"d2t and t2d of the draft at {checkpoint.folder} name different tokens; copy or "
            "download the checkpoint again"
        )
