"""A request's beams, iteration by iteration, as text that is certain."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_ort.decoding import IterationOutput
from dsbd_ort.generated import GeneratedSequence, StreamStep
from dsbd_ort.stop_strings import StopFilter
from dsbd_runtime.stream_decoder import StreamDecoder
from dsbd_runtime.tokenizer import Tokenizer


class TextStream:
    """Makes of every step of the loop what is new in it, and of the end the rest."""

    def __init__(self, tokenizer: Tokenizer, stop_texts: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopFilter(stop_texts)
        self._num_shown = 0

    def push(self, step: IterationOutput) -> StreamStep:
        """Return what all beams of ``step`` agree on and did not before."""
        shown = self._num_shown
        tokens = step.agreed_tokens[shown:]
        if not tokens:
            return StreamStep([], "", [])
        self._num_shown += len(tokens)
        text = self._stops.push(self._decoder.push(tokens))
        return StreamStep(tokens, text, step.agreed_logprobs(shown))

    def finish(self, best: GeneratedSequence) -> StreamStep:
        """Return the rest of the best sequence."""
        tokens = best.token_ids[self._num_shown :]
        text = self._decoder.push(tokens) + self._decoder.finish()
        text = self._stops.push(text) + self._stops.finish()
        return StreamStep(tokens, text, best.token_logprobs[self._num_shown :])
