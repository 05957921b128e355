"""BM25 (Robertson and Zaragoza 2009), the baseline of the example."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_K1, _B = 1.2, 0.75


class BM25:
    """Ranks texts by the words that they share with a query."""

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        """Index texts, each a list of words."""
        self._num_texts = len(texts)
        lengths = np.array([len(text) for text in texts])
        norms = _K1 * (1 - _B + _B * lengths / lengths.mean())
        entries_by_word: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for row, text in enumerate(texts):
            for word, count in Counter(text).items():
                entries_by_word[word].append((row, count * (_K1 + 1) / (count + norms[row])))
        self._weights = {word: np.array(entries) for word, entries in entries_by_word.items()}

    def ranked(self, query: Sequence[str], max_results: int) -> NDArray[np.int64]:
        """Return the rows of the best texts, best first, (max_results,) int64."""
        scores = np.zeros(self._num_texts)
        for word in set(query):
            entries = self._weights.get(word)
            if entries is not None:
                rarity = np.log1p((self._num_texts - len(entries) + 0.5) / (len(entries) + 0.5))
                scores[entries[:, 0].astype(np.int64)] += rarity * entries[:, 1]
        order: NDArray[np.int64] = np.argsort(-scores, kind="stable")[:max_results]
        return order
