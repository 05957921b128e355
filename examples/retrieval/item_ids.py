"""Ids of documents by hierarchical clustering: similar documents have ids with a common beginning.

Documents are clustered by their words, and each cluster again until it is small. The last number of
an id is the document's number in its cluster. So ids are longer in dense regions, and no id is the
beginning of another id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_DIMENSIONS = 64
_ITERATIONS = 4  # subspace iterations for the principal directions
_ROUNDS = 10
Vectors = NDArray[np.float32]


def vectors_of(texts: Sequence[Sequence[str]], seed: int = 0) -> Vectors:
    """Return a vector of length 1 for each text, (num_texts, at most 64) float32.

    Words are weighted by their rarity (tf-idf). The weights are projected to their principal
    directions (latent semantic analysis), which words that often occur together share.
    """
    frequencies = Counter(word for text in texts for word in set(text))
    index = {word: i for i, word in enumerate(sorted(frequencies))}
    counts = np.array([frequencies[word] for word in index], dtype=np.float32)
    rarities = np.log((1 + len(texts)) / (1 + counts))
    weights = np.zeros((len(texts), len(index)), dtype=np.float32)
    for row, text in enumerate(texts):
        columns = [index[word] for word in set(text)]
        weights[row, columns] = rarities[columns]
    weights = _normalised(weights)
    directions = np.random.default_rng(seed).standard_normal((len(index), _DIMENSIONS))
    for _ in range(_ITERATIONS):
        directions, _ = np.linalg.qr(weights.T @ (weights @ directions.astype(np.float32)))
    return _normalised(weights @ directions)


def _normalised(vectors: Vectors) -> Vectors:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    normalised: Vectors = vectors / np.maximum(norms, 1e-9)
    return normalised


def hierarchical_ids(vectors: Vectors, branching: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Return the id of each vector: numbers below ``branching``, one per level."""
    ids: list[tuple[int, ...]] = [()] * len(vectors)
    rng = np.random.default_rng(seed)
    waiting = [((), np.arange(len(vectors)))]
    while waiting:
        prefix, members = waiting.pop()
        if len(members) <= branching:
            for number, member in enumerate(members.tolist()):
                ids[member] = (*prefix, number)
            continue
        clusters = _clusters(vectors[members], branching, rng)
        for cluster in range(branching):
            inside = members[clusters == cluster]
            if len(inside):
                waiting.append(((*prefix, cluster), inside))
    return ids


def _clusters(vectors: Vectors, number: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the k-means cluster of each vector, (num_vectors,) int64; there are at least two."""
    centres = vectors[rng.choice(len(vectors), size=number, replace=False)]
    clusters = np.zeros(len(vectors), dtype=np.int64)
    for _ in range(_ROUNDS):
        clusters = (vectors @ centres.T).argmax(axis=1)
        for cluster in range(number):
            inside = vectors[clusters == cluster]
            if len(inside):
                mean = inside.mean(axis=0)
                centres[cluster] = mean / max(float(np.linalg.norm(mean)), 1e-9)
    if len(np.unique(clusters)) == 1:  # equal vectors
        clusters = np.arange(len(vectors)) % number
    return clusters
