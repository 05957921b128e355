"""What the parity gate compares: small forests on prompts, and what transformers says of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.fp32_reference import ComputeInFP32

PROMPT_LENGTHS = (1, 17, 128)
TREE_PARENTS = (-1, -1, 0, 0, 1, 2, 2)  # pairs of siblings, three levels deep
TREE_DEPTH = 3
_MAX_COMPARED_ROWS = 32  # of a prefill: the last ones


@dataclass(frozen=True, kw_only=True)
class ForestCase:
    """One comparison: S nodes on a cached prefix.

    Attributes:
        name: "prefill", "decode" or "tree".
        prefix_ids: (n,) int64. Tokens whose rows are in the cache already.
        node_ids: (S,) int64. Tokens of the nodes.
        parents: (S,) int64. Node that each node follows, -1 for the prefix.
        rows: (R,) int64. Nodes whose logits are compared.
    """

    name: str
    prefix_ids: NDArray[np.int64]
    node_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    rows: NDArray[np.int64]

    @property
    def prompt_length(self) -> int:
        """Return the tokens of the prompt: the prefix, or the nodes of a prefill."""
        return len(self.prefix_ids) or len(self.node_ids)

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the root to ``node``: with TREE_PARENTS, 6 gives [0, 2, 6]."""
        path = [node]
        while (parent := int(self.parents[path[-1]])) >= 0:
            path.append(parent)
        return path[::-1]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A case and its (R, V) float32 logits by transformers."""

    case: ForestCase
    logits: NDArray[np.float32]


def forest_cases(checkpoint: Checkpoint) -> list[ForestCase]:
    """Return prefill, cached decode and tree at each prompt length, the same at every call.

    A sliding window is always crossed, so that a layer with the wrong mask shows.
    """
    longest = checkpoint.context_length - TREE_DEPTH
    wanted = [*PROMPT_LENGTHS, (checkpoint.sliding_window or 0) + PROMPT_LENGTHS[1]]
    rng = np.random.default_rng(0)
    cases = []
    for length in sorted({min(length, longest) for length in wanted}):
        tokens = rng.integers(0, checkpoint.vocab_size, length + len(TREE_PARENTS), dtype=np.int64)
        prompt, continuation = tokens[:length], tokens[length:]
        cases += [
            _case("prefill", prompt[:0], prompt, range(-1, length - 1)),
            _case("decode", prompt, continuation[:1], (-1,)),
            _case("tree", prompt, continuation, TREE_PARENTS),
        ]
    return cases


def reference_logits(model: PreTrainedModel, case: ForestCase) -> NDArray[np.float32]:
    """Return (R, V) float32: each node's logits after a plain causal pass over its path.

    Computed in fp32 from the weights as they are, whatever their precision.
    """
    row_of_node = {int(node): row for row, node in enumerate(case.rows)}
    logits = np.full((len(case.rows), model.config.vocab_size), np.nan, np.float32)
    for paths in _paths_by_length(case):
        ids = [np.concatenate([case.prefix_ids, case.node_ids[path]]) for path in paths]
        steps = [i for i, nodes in enumerate(paths.T) if row_of_node.keys() & nodes.tolist()]
        with torch.no_grad(), ComputeInFP32():
            output = model(
                input_ids=torch.from_numpy(np.stack(ids)),
                use_cache=False,
                logits_to_keep=torch.tensor(steps) + len(case.prefix_ids),
            )
        for found, nodes in zip(output.logits.numpy(), paths[:, steps].tolist(), strict=True):
            for values, node in zip(found, nodes, strict=True):
                if node in row_of_node:
                    logits[row_of_node[node]] = values
    return logits


def references(model: PreTrainedModel, checkpoint: Checkpoint) -> list[Reference]:
    """Return all cases with the logits of the unmodified model."""
    return [
        Reference(case=case, logits=reference_logits(model, case))
        for case in forest_cases(checkpoint)
    ]


def _paths_by_length(case: ForestCase) -> list[NDArray[np.int64]]:
    """Return the paths to all leaves, those of equal length as one (paths, length) array.

    One pass for several paths reads the weights once, which is what a pass of few tokens costs.
    """
    leaves = set(range(len(case.parents))) - set(case.parents.tolist())
    paths = [case.path_to(leaf) for leaf in sorted(leaves)]
    lengths = sorted({len(path) for path in paths})
    return [np.array([path for path in paths if len(path) == length]) for length in lengths]


def _case(
    name: str,
    prefix_ids: NDArray[np.int64],
    node_ids: NDArray[np.int64],
    parents: tuple[int, ...] | range,
) -> ForestCase:
    return ForestCase(
        name=name,
        prefix_ids=prefix_ids,
        node_ids=node_ids,
        parents=np.array(parents, np.int64),
        rows=np.arange(len(node_ids), dtype=np.int64)[-_MAX_COMPARED_ROWS:],
    )
