"""The draft engine's rows of the forest, if it reads the prompt just before its first node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsbd_ort.decoding.beams import Beams, Hypotheses
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.computed_distributions import ComputedDistributions
from dsbd_ort.decoding.engine_call import EngineCalls
from dsbd_ort.decoding.forest import NOT_COMPUTED, Forest
from dsbd_ort.decoding.forest_runner import ForestRunner
from dsbd_ort.decoding.kv_cache import RowIdentity

_LONG_REST = 8
"""From this many iterations without a draft, recomputing the draft's rows and what the target knows
of them is cheaper than keeping them up to date."""


class LateRunner(ForestRunner):
    """Reads the prompt if a node is wanted: a request that drafts nothing never has it read.

    A draft that will not be wanted for long is *put off*: nothing is kept for it, and its next rows
    are computed as a prompt is, all at once.
    """

    def __init__(
        self,
        view: CacheView,
        forest: Forest,
        distributions: ComputedDistributions,
        prompt_ids: Sequence[int],
        hypotheses: Hypotheses,
    ) -> None:
        super().__init__("draft", view, forest, distributions)
        self._prompt_ids = prompt_ids
        self._hypotheses = hypotheses
        self.prefill_later(Beams.initial())

    def prefill_later(self, beams: Beams) -> None:
        """Compute the tokens of the only beam, except the last, just before its node is wanted."""
        (node,) = beams.nodes.tolist()
        forest = self.forest
        self._is_unread = True
        self._read_to = beams
        self._num_to_read = int(forest.positions[node])
        self.slots[forest.parents[node]] = 0  # what it sees is that prompt

    def rest(self, num_iterations: int, beams: Beams) -> None:
        """Be put off if that costs less than to stay up to date in iterations without a draft.

        With 0 iterations, be ready for a draft below these beams.
        """
        if not num_iterations:
            if self._is_put_off:
                self.prefill_later(beams)
        elif not self._is_put_off and (num_iterations >= _LONG_REST or self._is_unread):
            self._put_off(beams)

    def _put_off(self, beams: Beams) -> None:
        """Keep nothing for a next call but the rows of the one path, until ``resume``."""
        self._is_put_off = True
        if self._is_unread:
            return
        slots = self.slots[: len(self.forest)]
        computed = (slots > 0).nonzero()[0]
        self._view.keep(slots[computed])
        self._is_unread, self._read_to = True, beams
        self._view.end(self._tokens())
        slots[computed] = NOT_COMPUTED
        self._slots_above = {}
        self.distributions.forget()

    def unread(self) -> tuple[int, int]:
        """Return how many tokens of prompt and source are read before the first node."""
        prefix, num_tokens, num_source = self._view.prefix, 0, 0
        if self._is_unread:
            num_tokens = self._num_to_read - len(prefix.tokens)
        if self._view.spec.reads_source and not self._num_calls:
            num_source = len(prefix.source) if isinstance(prefix.source, tuple) else 0
        return num_tokens, num_source

    def _tokens(self) -> list[int]:
        """Return the prompt and the new tokens of the only beam that are read."""
        (path,) = self._hypotheses.paths(self._read_to.hypotheses)
        return [*self._prompt_ids, *self._hypotheses.tokens[path].tolist()]

    def finish(self, agreed_tokens: list[int]) -> None:
        """See ForestRunner.finish; rows of an earlier prompt that began alike stay as they are."""
        if not self._is_unread:
            super().finish(agreed_tokens)

    def _read_prompt(self) -> EngineCalls[None]:
        """See ForestRunner; rows that another request has by now are shared."""
        view, token_ids = self._view, self._tokens()[:-1]
        self._is_unread = self._is_put_off = False
        shared = view.row_cache.longest_prefix(RowIdentity(token_ids, view.prefix.source))
        if len(shared.tokens) > len(view.prefix.tokens):
            view.prefix = shared
        yield from self.prefill(np.array(token_ids, dtype=np.int64))
