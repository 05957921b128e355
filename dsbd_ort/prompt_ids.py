"""A prompt as token ids, and whether it fits the context of a bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dsbd_runtime.bundle import ROLES, Bundle
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.tokenizer import Tokenizer


def prompt_ids(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """Return the token ids of a text; ids stay what they are."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
        raise InputError(
            f"the prompt is a {type(prompt).__name__}; expected a text, or a list of token ids"
        )
    return list(prompt)


def check_context(bundle: Bundle, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise CapacityError unless prompt and new tokens fit both models' contexts."""
    limit = min(bundle.entry(role).context_length for role in ROLES)
    if num_prompt_tokens >= limit:
        raise CapacityError(
            f"the prompt has {num_prompt_tokens} tokens, the context of this bundle holds "
            f"{limit}; shorten the prompt"
        )
    if num_prompt_tokens + max_new_tokens > limit:
        raise CapacityError(
            f"the prompt's {num_prompt_tokens} tokens and max_new_tokens {max_new_tokens} exceed "
            f"the context of {limit}; use max_new_tokens {limit - num_prompt_tokens} or less, or "
            "a shorter prompt"
        )
