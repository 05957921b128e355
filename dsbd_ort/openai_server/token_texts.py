"""The text that each token of a sequence adds."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_runtime.stream_decoder import StreamDecoder
from dsbd_runtime.tokenizer import Tokenizer


class TokenTexts:
    """Texts of a growing sequence's tokens; together they are its text.

    A character of several tokens belongs to the one that completes it, the others add nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = StreamDecoder(tokenizer)

    def of_next(self, token_ids: Sequence[int]) -> list[str]:
        """Return what each of the next tokens adds."""
        return [self._decoder.push([token_id]) for token_id in token_ids]
