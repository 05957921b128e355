"""The rows that a request leaves in both caches, for the next one that begins alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsbd_ort.decoding.forest_cache import PrefixCache
from dsbd_runtime.causal_lm import CausalLM


class KeptRows:
    """What the caches of a pair hold between two requests.

    Attributes:
        prefixes: of target and draft.
    """

    def __init__(self, target: CausalLM, draft: CausalLM, *, are_reused: bool) -> None:
        """Take both engines, caches empty; not ``are_reused``: every prompt is computed anew."""
        self._models = target, draft
        self._are_reused = are_reused
        self.forget()

    def forget(self) -> None:
        """Take no row for granted any more."""
        self.prefixes = PrefixCache(), PrefixCache()

    def drop_but_for(self, token_ids: Sequence[int]) -> None:
        """Give the last request's memory back, but for the rows that begin ``token_ids``."""
        if not self._are_reused:
            self.forget()
        for model, prefix in zip(self._models, self.prefixes, strict=True):
            prefix.tokens = list(token_ids[: prefix.num_common(token_ids)])
            model.keep(np.arange(len(prefix.tokens)))
            model.shrink()
            model.reset_peak()
