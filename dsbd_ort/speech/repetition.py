"""Measure of repetition in a text: the size of its token ids over their compressed size."""

import math
import zlib
from collections.abc import Sequence

_AT_THE_SEAM = 16  # bytes


def compression_ratio(token_ids: Sequence[int], vocab_size: int) -> float:
    """Return the size of token ids over their compressed size; it is high if they repeat."""
    content = _bytes(token_ids, vocab_size)
    return len(content) / len(zlib.compress(content))


def least_compression_ratio(token_ids: Sequence[int], most_tokens: int, vocab_size: int) -> float:
    """Return a lower bound of the compression ratio of all texts that begin with token ids.

    zlib uses the shortest of its codes for a block, and a text of at most ``most_tokens`` is one
    block. So the compressed text is never longer than in the fixed code: the given tokens in that
    code, plus 9 bits for every further byte. At the seam the size may differ by ``_AT_THE_SEAM``.
    """
    content = _bytes(token_ids, vocab_size)
    coder = zlib.compressobj(strategy=zlib.Z_FIXED)
    size = len(coder.compress(content)) + len(coder.flush()) + _AT_THE_SEAM
    more = max(0, most_tokens - len(token_ids)) * _num_bytes(vocab_size)
    return min(len(content) / size, (len(content) + more) / (size + more * 9 / 8))


def _bytes(token_ids: Sequence[int], vocab_size: int) -> bytes:
    length = _num_bytes(vocab_size)
    return b"".join(token.to_bytes(length, "little") for token in token_ids)


def _num_bytes(vocab_size: int) -> int:
    return int(math.log2(vocab_size) / 8) + 1
