"""Cases of the parity gate: small forests and real text, with the checkpoint's logits.

The logits are computed in fp32 or float64, but the model's weights stay in a lower precision. A
widened copy would double or triple the memory. So every operation widens its inputs piece by piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.tokenizers.tokenizer_files import (
    highest_token_id,
    read_tokenizer,
    tokenizer_json,
)
from dsbd_export.tokenizers.tokenizer_gate import reads_little
from dsbd_forward.forward import Source
from dsbd_runtime.parts.source.source_values import SourceValues

_NARROWER = {
    torch.float32: (torch.float16, torch.bfloat16),
    torch.float64: (torch.float16, torch.bfloat16, torch.float32),
}
_CHUNK_ELEMENTS = 16 * 2**20  # elements of a weight that are widened at once: 64 MiB in fp32

# Functions that only inspect a tensor or select a part: widening first would copy whole weights.
_VIEWS = frozenset(
    {"__getitem__", "chunk", "detach", "expand", "permute", "select", "size", "split", "squeeze"}
    | {"t", "transpose", "unbind", "unsqueeze", "view"}
)


class ComputeIn(TorchFunctionMode):
    """In the block, every operation converts tensors of narrower types to ``dtype``."""

    def __init__(self, dtype: torch.dtype, chunk_elements: int = _CHUNK_ELEMENTS) -> None:
        """Widen at most ``chunk_elements`` of a linear layer's weight to ``dtype`` at once."""
        super().__init__()
        self._dtype = dtype
        self._narrower = _NARROWER[dtype]
        self._chunk_elements = chunk_elements
        self._default_dtype = torch.get_default_dtype()

    def __enter__(self) -> Any:
        torch.set_default_dtype(self._dtype)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default_dtype)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]  # a C getter
            return self._widened(func(*args))
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.embedding:
            return self._widened(func(*args, **kwargs))
        if _name_of(func) in _VIEWS or _name_of(func) == "__get__":
            return func(*args, **kwargs)
        if func is Tensor.float:
            func = Tensor.to
            kwargs = {**kwargs, "dtype": self._dtype}
        args, kwargs = tree_map(self._widened, (args, kwargs))
        return func(*args, **kwargs)

    def _linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``inputs @ weight.T + bias``, widening a few rows of the weight at a time.

        inputs: (..., in). weight: (out, in). bias: (out,).
        """
        inputs, bias = self._widened(inputs), self._widened(bias)
        if weight.dtype not in self._narrower:
            return F.linear(inputs, weight, bias)
        num_rows = max(1, self._chunk_elements // weight.shape[1])
        result = inputs.new_empty(*inputs.shape[:-1], weight.shape[0])
        for start in range(0, weight.shape[0], num_rows):
            rows = slice(start, start + num_rows)
            result[..., rows] = F.linear(
                inputs, weight[rows].to(self._dtype), None if bias is None else bias[rows]
            )
        return result

    def _widened(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._dtype) if value.dtype in self._narrower else value
        is_narrower = isinstance(value, torch.dtype) and value in self._narrower
        return self._dtype if is_narrower else value


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")


PROMPT_LENGTHS = (1, 17, 128)
TREE_PARENTS = (-1, -1, 0, 0, 1, 2, 2)  # pairs of siblings, three levels deep
TREE_DEPTH = 3
_MAX_PREFILL_ROWS = 32  # compared rows of a prefill: the last ones

TEXT_FILE = Path(__file__).parent / "parity_text.txt"
TEXT, PREFILL, DECODE, TREE = "text", "prefill", "decode", "tree"
_MAX_TOKENS = 320  # enough for the whole text with the tokenizers of common models
_MAX_TEXT_ROWS = 128  # compared rows, evenly spread: 128 rows of 128,256 logits are 66 MB
_NUMPY_DTYPES: dict[torch.dtype, type] = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True, kw_only=True)
class ForestCase:
    """One comparison: S nodes on a cached prefix."""

    name: str  # "prefill", "decode" or "tree"; "sources": ``together`` with others
    prefix_ids: NDArray[np.int64]  # (n,) int64. Tokens whose rows are already in the cache.
    node_ids: NDArray[np.int64]  # (S,) int64. Tokens of the nodes.
    parents: NDArray[np.int64]  # (S,) int64. Node that each node follows; -1 for the prefix.
    rows: NDArray[np.int64]  # (R,) int64. Nodes whose logits are compared.
    # (n + S, width) float32. For a feature draft: the target's feature of the token before each
    # prefix token and node. None for other models.
    features: NDArray[np.float32] | None = None
    # whether nodes whose parent is a node read the draft's own feature of the parent instead
    uses_own: bool = False
    # (N,) int64. Source of an encoder-decoder; None for other models.
    source_ids: NDArray[np.int64] | None = None
    # other requests, each with a separate prefix and source; their nodes are computed in the same
    # call and compared after the nodes of this case
    together: tuple[ForestCase, ...] = ()
    # source of a model that reads sound or pictures; None for other models
    values: SourceValues | None = None

    @property
    def requests(self) -> tuple[ForestCase, ...]:
        return (self, *self.together)

    @property
    def source(self) -> Source:
        """The source in the form of a forward; None without a source."""
        return self.values if self.source_ids is None else tuple(self.source_ids.tolist())

    def arguments_of(self, paths: Tensor) -> dict[str, Tensor]:
        """Return further arguments of the model's own forward over paths, (P, n) tokens."""
        return {}

    @property
    def prompt_length(self) -> int:
        """Return the length of the prompt: the prefix, or the nodes of a prefill."""
        return len(self.prefix_ids) or len(self.node_ids)

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the root to ``node``: with TREE_PARENTS, 6 gives [0, 2, 6]."""
        path = [node]
        while (parent := int(self.parents[path[-1]])) >= 0:
            path.append(parent)
        return path[::-1]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A case and the result of transformers: logits (R, V), features of a text (S, width)."""

    case: ForestCase
    logits: NDArray[Any]
    features: NDArray[np.float32] | None = None


def forest_cases(checkpoint: Checkpoint, num_tokens: int | None = None) -> list[ForestCase]:
    """Return prefill, cached decode and tree at prompt lengths up to beyond a sliding window."""
    num_tokens = num_tokens or num_drawn(checkpoint)
    longest = checkpoint.context_length - TREE_DEPTH
    wanted = [*PROMPT_LENGTHS, (checkpoint.sliding_window or 0) + PROMPT_LENGTHS[1]]
    rng = np.random.default_rng(0)
    cases = []
    for length in sorted({min(length, longest) for length in wanted}):
        tokens = rng.integers(0, num_tokens, length + len(TREE_PARENTS), dtype=np.int64)
        prompt, continuation = tokens[:length], tokens[length:]
        cases += [
            _case(PREFILL, prompt[:0], prompt, range(-1, length - 1)),
            _case(DECODE, prompt, continuation[:1], (-1,)),
            _case(TREE, prompt, continuation, TREE_PARENTS),
        ]
    return cases


def differences(
    values: NDArray[np.float32], expected: NDArray[np.float32] | NDArray[np.float64]
) -> NDArray[Any]:
    """Return |values - expected|; 0 if both are -inf, as for tokens that no draft proposes."""
    with np.errstate(invalid="ignore"):
        distances: NDArray[Any] = np.abs(values - expected)
    distances[(values == -np.inf) & (expected == -np.inf)] = 0
    return distances


Heard = dict[tuple[torch.dtype, SourceValues], Tensor]
"""Encoder outputs of sounds or pictures, (1, N, width) each, by dtype and source."""


def reference_logits(
    model: PreTrainedModel,
    case: ForestCase,
    dtype: torch.dtype = torch.float32,
    heard: Heard | None = None,
) -> NDArray[Any]:
    """Return each node's logits, (R, V) of ``dtype``, from a plain causal pass over its path."""
    alone = dataclasses.replace(case, together=())
    heard = {} if heard is None else heard
    logits = [_request_logits(model, each, dtype, heard) for each in (alone, *case.together)]
    return np.concatenate(logits)


def _request_logits(
    model: PreTrainedModel, case: ForestCase, dtype: torch.dtype, heard: Heard
) -> NDArray[Any]:
    row_of_node = {int(node): row for row, node in enumerate(case.rows)}
    num_tokens = model.get_output_embeddings().weight.shape[0]
    logits = np.full((len(case.rows), num_tokens), np.nan, _NUMPY_DTYPES[dtype])
    source = None if case.values is None else (dtype, case.values)
    if source is not None and source not in heard:
        with torch.no_grad(), ComputeIn(dtype):
            values = torch.from_numpy(source[1].values.copy())[None]
            heard[source] = model.get_encoder()(values).last_hidden_state
    of_case = None if source is None else heard[source]
    for paths in _paths_by_length(case):
        ids = [np.concatenate([case.prefix_ids, case.node_ids[path]]) for path in paths]
        steps = [i for i, nodes in enumerate(paths.T) if row_of_node.keys() & nodes.tolist()]
        wanted = torch.tensor(steps) + len(case.prefix_ids)
        with torch.no_grad(), ComputeIn(dtype):
            logits_by_path = _path_logits(
                model, case, torch.from_numpy(np.stack(ids)), wanted, of_case
            )
        for path_logits, nodes in zip(
            logits_by_path.numpy(), paths[:, steps].tolist(), strict=True
        ):
            for values, node in zip(path_logits, nodes, strict=True):
                if node in row_of_node:
                    logits[row_of_node[node]] = values
    return logits


def _path_logits(
    model: PreTrainedModel, case: ForestCase, ids: Tensor, wanted: Tensor, heard: Tensor | None
) -> Tensor:
    """Return the logits (paths, n, V) at the places ``wanted``, (n,), of paths (paths, length)."""
    if heard is not None:
        outputs = BaseModelOutput(last_hidden_state=heard.expand(len(ids), -1, -1))
        output = model(encoder_outputs=outputs, decoder_input_ids=ids, use_cache=False)
        return cast(Tensor, output.logits[:, wanted])
    if case.source_ids is None:
        more = case.arguments_of(ids)
        output = model(input_ids=ids, use_cache=False, logits_to_keep=wanted, **more)
        return cast(Tensor, output.logits)
    source = torch.from_numpy(case.source_ids).expand(len(ids), -1)
    output = model(input_ids=source, decoder_input_ids=ids, use_cache=False)
    return cast(Tensor, output.logits[:, wanted])


def _paths_by_length(case: ForestCase) -> list[NDArray[np.int64]]:
    """Return the paths to all leaves; paths of equal length are one array (paths, length)."""
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
        rows=np.arange(len(node_ids), dtype=np.int64)[-_MAX_PREFILL_ROWS:],
    )


def text_case(checkpoint: Checkpoint) -> ForestCase:
    """Return this package's text as the checkpoint's tokens, cut to its context."""
    return prefill_case(checkpoint, own_text_ids(checkpoint, TEXT_FILE, _MAX_TOKENS))


def prefill_case(checkpoint: Checkpoint, token_ids: NDArray[np.int64]) -> ForestCase:
    """Return tokens as one prefill, cut to the context; some rows are compared."""
    token_ids = token_ids[: checkpoint.context_length]
    num_rows = min(len(token_ids), _MAX_TEXT_ROWS)
    return ForestCase(
        name=TEXT,
        prefix_ids=token_ids[:0],
        node_ids=token_ids,
        parents=np.arange(-1, len(token_ids) - 1),
        rows=np.linspace(0, len(token_ids) - 1, num_rows).astype(np.int64),
    )


def num_drawn(checkpoint: Checkpoint) -> int:
    """Return the vocabulary size for random tokens, which is the tokenizer's."""
    return min(checkpoint.vocab_size, highest_token_id(read_tokenizer(checkpoint)) + 1)


def own_text_ids(checkpoint: Checkpoint, file: Path, max_tokens: int) -> NDArray[np.int64]:
    """Return the first tokens of an English text, or random tokens for other alphabets."""
    text = file.read_text("utf-8")
    tokenizer = Tokenizer.from_str(tokenizer_json(checkpoint))
    if reads_little(text, tokenizer.decode(tokenizer.encode(text).ids)):
        return np.random.default_rng(1).integers(
            0, num_drawn(checkpoint), max_tokens, dtype=np.int64
        )
    return text_ids(checkpoint, [text], max_tokens)


def text_ids(checkpoint: Checkpoint, texts: Sequence[str], max_tokens: int) -> NDArray[np.int64]:
    """Return the first tokens of texts, equally many of each; ExportError if they are unusable."""
    tokenizer = Tokenizer.from_str(tokenizer_json(checkpoint))
    share = max_tokens // len(texts)
    parts = [np.array(tokenizer.encode(text).ids[:share], np.int64) for text in texts]
    token_ids = np.concatenate(parts)
    if len(token_ids) == 0 or token_ids.max() >= checkpoint.vocab_size:
        raise ExportError(
            f"the tokenizer of the {checkpoint.role} at {checkpoint.folder} turns text into "
            f"{len(token_ids)} tokens up to {token_ids.max(initial=-1)}, expected tokens below the "
            f"vocabulary size {checkpoint.vocab_size}; copy the tokenizer of its base model there"
        )
    if not tokenizer.decode(token_ids.tolist()).strip():
        raise ExportError(
            f"the tokenizer of the {checkpoint.role} at {checkpoint.folder} reads {len(texts)} "
            f"texts as nothing, the first is {texts[0][:40]!r}; give texts of its own tokens"
        )
    return token_ids
