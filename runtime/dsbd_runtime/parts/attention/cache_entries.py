"""Rows that the layers of an engine keep: their kinds, tensors and names.

A layer keeps rows of one kind or of several, or none. The entry of a kind lists its tensors
[1, heads, C, width], which hold the rows. Layers that attend keep every row. Convolutions and
recurrences keep only *recent* rows, which are the rows after the checkpoints of their paths
(docs/algorithm.md 3.11). Their tensors have another capacity.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dsbd_runtime.parts.part import FLOAT_TYPES, GraphContract, TensorSpec

KEY, VALUE, CONVOLUTION = "key", "value", "convolution"
RECURRENT_KEY, RECURRENT_DELTA = "recurrent_key", "recurrent_delta"
RECURRENT_DECAY = "recurrent_decay"
ATTENTION_ROWS, CONVOLUTION_ROWS = "attention rows", "convolution rows"
RECURRENT_ROWS = "recurrent rows"


def past_name(layer: int, part: str) -> str:
    """Return the input name of one of the ``parts`` of a layer's cache."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Return the output name of one of the ``parts`` of a layer's cache."""
    return f"present.{layer}.{part}"


def source_name(past: str) -> str:
    """Return the name of the input with the rows to read, in the prune graph of WebGPU."""
    return past.replace("past_key_values", "source")


def state_name(layer: int) -> str:
    """Return the input name of the states of a layer's checkpoints."""
    return f"state.{layer}"


def state_decay_name(layer: int) -> str:
    """Return the input name of the decays at a layer's checkpoints."""
    return f"state_decay.{layer}"


def folded_name(name: str) -> str:
    """Return the output name of the fold graph for a new state, or the decay at it."""
    return f"folded_{name}"


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """The rows of one kind in one layer; each kind is a class, and a layer may keep several."""

    layer: int
    dtype: str  # "fp32", "fp16" or "bf16"

    @property
    def kind(self) -> str:
        """The name of the kind, a field of each class; a manifest selects the class by it."""
        raise NotImplementedError

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Number of heads and width of each tensor of the cache, by the last part of its name."""
        raise NotImplementedError

    def shape(self, part: str, capacity: int) -> tuple[int, int, int, int]:
        num_heads, width = self.parts[part]
        return 1, num_heads, capacity, width

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """Shape of each state of a checkpoint by input name."""
        return {}

    @property
    def numbers_a_row(self) -> int:
        return sum(num_heads * width for num_heads, width in self.parts.values())


@dataclass(frozen=True, kw_only=True)
class AttentionRows(CacheEntry):
    """The rows of a layer that attends: a key and a value for each head.

    The widths of one head's key and value differ in layers that cache latents.
    """

    num_heads: int
    key_width: int
    value_width: int
    kind: str = ATTENTION_ROWS

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        return {
            KEY: (self.num_heads, self.key_width),
            VALUE: (self.num_heads, self.value_width),
        }


@dataclass(frozen=True, kw_only=True)
class ConvolutionRows(CacheEntry):
    """The rows of a layer that is a short convolution over the path (docs/algorithm.md 3.11)."""

    width: int  # channels of its input
    num_ancestors: int  # rows that it reads in addition to a node's own; kernel size minus 1
    kind: str = CONVOLUTION_ROWS

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        return {CONVOLUTION: (1, self.width)}


@dataclass(frozen=True, kw_only=True)
class RecurrentRows(CacheEntry):
    """The rows of a layer with a recurrent state: what each token wrote (docs/algorithm.md 3.11).

    A row is the token's key, the delta that it wrote, and the logarithm of the decay from the
    beginning of the path to the token, as the sum of two numbers.

    num_heads: number of heads of the deltas and decays.
    num_key_heads: number of key heads; each serves the same number of heads.
    most_new_rows: the most new rows of one call.
    """

    num_heads: int
    value_width: int
    num_key_heads: int
    key_width: int
    most_new_rows: int
    kind: str = RECURRENT_ROWS

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        return {
            state_name(self.layer): (self.num_heads, self.key_width, self.value_width),
            state_decay_name(self.layer): (self.num_heads, 2),
        }

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        return {
            RECURRENT_KEY: (self.num_key_heads, self.key_width),
            RECURRENT_DELTA: (self.num_heads, self.value_width),
            RECURRENT_DECAY: (self.num_heads, 2),
        }


_RECENT = (ConvolutionRows, RecurrentRows)


def parts_of(caches: Sequence[CacheEntry]) -> list[tuple[CacheEntry, str]]:
    """Return every tensor of these caches: the entry of its layer, and the part of its name."""
    return [(cache, part) for cache in caches for part in cache.parts]


def cache_tensors(caches: Sequence[CacheEntry], capacity: str) -> GraphContract:
    """Return the tensors of these caches; ``capacity``: name of the dimension of their rows."""
    shapes = [
        (cache, part, TensorSpec(FLOAT_TYPES[cache.dtype], (1, heads, capacity, width)))
        for cache, part in parts_of(caches)
        for heads, width in (cache.parts[part],)
    ]
    return GraphContract(
        inputs={past_name(cache.layer, part): spec for cache, part, spec in shapes},
        outputs={present_name(cache.layer, part): spec for cache, part, spec in shapes},
    )


def attending(caches: Sequence[CacheEntry]) -> list[AttentionRows]:
    """Return the entries of layers that attend."""
    return [cache for cache in caches if isinstance(cache, AttentionRows)]


def every_row(caches: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Return the entries of the caches that keep every row, not only recent ones."""
    return [cache for cache in caches if not isinstance(cache, _RECENT)]


def recent(caches: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Return the entries of the caches that keep only recent rows."""
    return [cache for cache in caches if isinstance(cache, _RECENT)]


def recurrent(caches: Sequence[CacheEntry]) -> list[RecurrentRows]:
    """Return the entries of layers with a state; a checkpoint has one state of each."""
    return [cache for cache in caches if isinstance(cache, RecurrentRows)]


def num_ancestors(caches: Sequence[CacheEntry]) -> int:
    """Return A, how many ancestors of a node the convolutions read; 0 without any."""
    return max((c.num_ancestors for c in caches if isinstance(c, ConvolutionRows)), default=0)


def most_new_rows(caches: Sequence[CacheEntry], limit: int) -> int:
    """Return the most rows of one call of an engine with these caches: at most ``limit``."""
    return min((c.most_new_rows for c in caches if isinstance(c, RecurrentRows)), default=limit)


def equal_caches(num_layers: int, *, num_heads: int, head_dim: int, dtype: str) -> list[CacheEntry]:
    """Return the entries of layers that all cache rows of one shape."""
    return [
        AttentionRows(
            layer=layer,
            num_heads=num_heads,
            key_width=head_dim,
            value_width=head_dim,
            dtype=dtype,
        )
        for layer in range(num_layers)
    ]
