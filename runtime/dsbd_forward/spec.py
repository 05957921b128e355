"""Specification of an engine, which a request reads before it begins."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The logits that a forward returns."""

    num_top_logits: int = 0  # K of a top-k head; 0: all logits of a row
    keeps_full_logits: bool = False  # whether all logits of a top-k head's forward can be read


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """State that an engine keeps from one forward to the next.

    kept: kinds of state of rows: "attention rows", "convolution rows", "recurrent rows". The last
        two are kept only for recent rows; a path can nevertheless continue from any of its rows.
    grows_at_a_cost: see ``GrowingEngine``.
    grows_in_steps: see ``SteppedEngine``.
    """

    kept: frozenset[str] = frozenset(["attention rows"])
    grows_at_a_cost: bool = False
    grows_in_steps: bool = False

    @property
    def folds_rows(self) -> bool:
        """Whether rows that all paths share are folded into a state.

        They are folded sooner if no unused rows are between them.
        """
        return bool(self.kept & {"convolution rows", "recurrent rows"})


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine: its inputs, its outputs and its state.

    Attributes:
        context_length: number of positions of the engine; None: no limit.
        returns_features: whether it is a target that returns the features of requested rows.
        reads_features: whether it is a feature draft: each of its rows needs its parent's feature.
        reads_source: whether every forward needs a source, on which its rows depend.
        joins_sources: whether the rows of a forward may have different sources; see
            ``SourceReader``.
    """

    vocab_size: int
    context_length: int | None = None
    head: HeadSpec = field(default_factory=HeadSpec)
    returns_features: bool = False
    reads_features: bool = False
    reads_source: bool = False
    joins_sources: bool = False
    memory: MemorySpec = field(default_factory=MemorySpec)
