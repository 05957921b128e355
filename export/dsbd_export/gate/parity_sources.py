"""Inputs of the parity gate's calls that say what the sources are and which rows read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.parts.encoder_entry import (
    HIDDEN_STATES,
    INPUT_FEATURES,
    SOURCE_IDS,
    SOURCE_LENGTHS,
    SOURCE_PLACES,
    SOURCE_ROWS,
    EncoderEntry,
)
from dsbd_runtime.parts.speech_entry import SoundFeatures

_SPARE_TOKENS = 3  # behind the longest of several sources: noise that no row may see


class ParitySources:
    """Reads sources by the encoder's graph, and puts those of a call beside each other."""

    def __init__(self, session: Any, encoder: EncoderEntry, shared: Any = None) -> None:
        """shared: of the target's encoder, for a draft whose own graph reads its hidden states."""
        self._session, self._shared = session, shared
        self._names = list(encoder.cross_shapes)
        self._heard: tuple[SoundFeatures | None, dict[str, NDArray[Any]]] = None, {}

    def inputs(
        self, sources: Sequence[NDArray[np.int64] | SoundFeatures], index: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """Return the inputs of a call, of which one source is as it is.

        Several are padded with noise, before them stands one that no row reads, and their places
        are filled up with rows of others: a graph that looks at any of that cannot pass.

        sources: (N,) int64 or a sound each. index: (S,) int64, the source of each row of the call.
        """
        by_source = [self._cross_rows(source) for source in sources]
        of_sources = [cross[self._names[0]].shape[2] for cross in by_source]
        if len(sources) == 1:
            rows, places = np.arange(len(index))[None], np.arange(len(index))
            return {**by_source[0], **_named(rows, places, np.array(of_sources))}
        lengths = np.array([1, *of_sources])
        index = index + 1
        num_places = int(np.bincount(index).max()) + 1
        rng = np.random.default_rng(0)
        rows = rng.integers(0, len(index), (len(lengths), num_places))
        places = np.zeros(len(index), np.int64)
        for item in range(1, len(lengths)):
            found = np.flatnonzero(index == item)
            rows[item, : len(found)] = found
            places[found] = item * num_places + np.arange(len(found))
        cross = {}
        for name in self._names:
            first = by_source[0][name]
            shape = len(lengths), first.shape[1], lengths.max() + _SPARE_TOKENS, first.shape[3]
            joined = rng.standard_normal(shape, dtype=np.float32).astype(first.dtype)
            for item, found_rows in enumerate(by_source, start=1):
                joined[item, :, : lengths[item]] = found_rows[name][0]
            cross[name] = joined
        return {**cross, **_named(rows, places, lengths)}

    def _cross_rows(self, source: NDArray[np.int64] | SoundFeatures) -> dict[str, NDArray[Any]]:
        if not isinstance(source, SoundFeatures):
            return self._read({SOURCE_IDS: source[None]})
        if source != self._heard[0]:  # a window of sound is long
            self._heard = source, self._read({INPUT_FEATURES: source.values[None]})
        return self._heard[1]

    def _read(self, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if self._shared is not None:
            [hidden] = self._shared.run([HIDDEN_STATES], inputs)
            inputs = {HIDDEN_STATES: hidden}
        found = self._session.run(self._names, inputs)
        return dict(zip(self._names, found, strict=True))


def _named(
    rows: NDArray[np.int64], places: NDArray[np.int64], lengths: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    return {SOURCE_ROWS: rows, SOURCE_PLACES: places, SOURCE_LENGTHS: lengths}
