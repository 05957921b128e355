"""A user's function of the path as a constraint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.constraints.position import Position, object_states
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.logits_processing.constraint import States, TokenLists


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Constraint to the tokens that a function returns for a path.

    The function gets prompt and new tokens as one read-only array, (length,) int64, and returns
    the ids that may follow. If an end-of-sequence token is among them, the text may end there.
    The result must depend only on the path. The function is called once for each node, including
    drafted nodes.

    Attributes:
        function: ``allowed_tokens(path) -> ids``.
        eos_token_ids: one end-of-sequence token or several; stored as a tuple.
        takes_batch_id: whether the function is a ``prefix_allowed_tokens_fn(batch_id, input_ids)``
            of transformers. It is then called with ``batch_id`` 0 and the array as ``input_ids``.
    """

    function: Callable[..., Iterable[int]]
    eos_token_ids: int | Iterable[int]
    takes_batch_id: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConstraintError(f"allowed tokens of {self.function!r}; give a function")
        eos = self.eos_token_ids
        ids = (eos,) if isinstance(eos, int | np.integer) else tuple(eos)
        object.__setattr__(self, "eos_token_ids", tuple(int(token) for token in ids))

    @property
    def name(self) -> str:
        name = getattr(self.function, "__qualname__", None) or type(self.function).__qualname__
        return f"the allowed tokens of {name}"

    def start(self, prompt_ids: Sequence[int]) -> States:
        return object_states([_State(np.asarray(prompt_ids, dtype=np.int64), Position(None, -1))])

    def advance(self, states: States, tokens: NDArray[np.int64]) -> States:
        pairs = zip(states, tokens.tolist(), strict=True)
        return object_states(
            [_State(state.prompt_ids, Position(state.position, token)) for state, token in pairs]
        )

    def allowed(self, states: States) -> TokenLists:
        rows = [self._answer(state).tokens for state in states]
        return TokenLists(
            tokens=np.concatenate([np.empty(0, dtype=np.int64), *rows]),
            counts=np.array([len(row) for row in rows], dtype=np.int64),
        )

    def accepts(self, states: States) -> NDArray[np.bool_]:
        return np.array([self._answer(state).accepts for state in states], dtype=np.bool_)

    def has_ended(self, states: States) -> NDArray[np.bool_]:
        return np.zeros(len(states), dtype=np.bool_)

    def _answer(self, state: _State) -> _Answer:
        if state.answer is None:
            token_ids = state.token_ids()
            ids = self.function(0, token_ids) if self.takes_batch_id else self.function(token_ids)
            token_ids = self._checked(ids)
            is_eos = np.isin(token_ids, np.array(self.eos_token_ids, dtype=np.int64))
            state.answer = _Answer(token_ids[~is_eos], bool(is_eos.any()))
        return state.answer

    def _checked(self, ids: object) -> NDArray[np.int64]:
        """Return the ids that the function returned, each once, in increasing order."""
        array = np.asarray(list(ids) if isinstance(ids, Iterable) else ids)
        if array.shape == (0,):
            return np.empty(0, dtype=np.int64)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.min() < 0:
            raise ConstraintError(
                f"{self.name} are {ids!r}; return a list of token ids, which are 0 or more"
            )
        return np.unique(array.astype(np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """Tokens that may follow, (num_tokens,) int64 increasing, and whether the text may end."""

    tokens: NDArray[np.int64]
    accepts: bool


@dataclass(slots=True, eq=False)
class _State:
    """A path, its prompt (num_prompt,) int64, and the answer of the function after its call."""

    prompt_ids: NDArray[np.int64]
    position: Position
    answer: _Answer | None = None

    def token_ids(self) -> NDArray[np.int64]:
        """Return prompt and new tokens, (length,) int64, read-only."""
        tokens = np.array(self.position.tokens(), dtype=np.int64)
        path = np.concatenate([self.prompt_ids, tokens])
        path.flags.writeable = False
        return path
