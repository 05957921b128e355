"""Oracle of early stopping (docs/algorithm.md 3.13): its result, found in a run to the end."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.result import IterationOutput

HasEnded = Callable[[tuple[int, ...]], bool]


@dataclass(frozen=True)
class Beam:
    """A beam of a layer: its new tokens and their raw log-probability."""

    tokens: tuple[int, ...]
    logprob: float

    def score(self, length_penalty: float, num_tokens: int | None = None) -> float:
        """Return the score, of another length where one is given."""
        return self.logprob / (num_tokens or len(self.tokens)) ** length_penalty


def beams_of(step: IterationOutput) -> list[Beam]:
    """Return the live hypotheses as beams."""
    beams = []
    for hypothesis in step.hypotheses:
        tokens = tuple(entry.token for entry in hypothesis.chain())
        beams.append(Beam(tokens, hypothesis.logprob))
    return beams


def returned_at(
    layer: Sequence[Beam], depth: int, config: DecodingConfig, has_ended: HasEnded
) -> list[Beam] | None:
    """Return what a request returns that ends with this layer, None where it goes on."""
    wanted, penalty = config.num_return_sequences, config.length_penalty
    finished: list[Beam] = []
    live: list[Beam] = []
    for beam in layer:
        is_complete = depth == config.max_new_tokens or has_ended(beam.tokens)
        (finished if is_complete else live).append(beam)
    finished.sort(key=lambda beam: -beam.score(penalty))  # equal ones stay in their order
    if live and len(finished) < wanted:
        return None
    last = finished[wanted - 1].score(penalty) if live else -math.inf
    length = config.max_new_tokens if config.early_stopping == "never" and penalty > 0 else depth
    is_hopeful = any(beam.score(penalty, length) > last for beam in live)
    return None if is_hopeful and config.early_stopping is not True else finished[:wanted]


def first_end(
    layers: Sequence[Sequence[Beam]], config: DecodingConfig, has_ended: HasEnded
) -> tuple[int, list[Beam]]:
    """Return the layer with which a request ends, counted from 1, and what it returns.

    layers: the beams of every layer until all have ended.
    """
    for depth, layer in enumerate(layers, start=1):
        if (returned := returned_at(layer, depth, config, has_ended)) is not None:
            return depth, returned
    raise AssertionError("the run did not end")
