"""Prompts: token ids, the check of the context length, chat messages, drawn seeds."""

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.text.tokenizer import Tokenizer

Messages = list[dict[str, str]]

Prompt = str | Sequence[int]
"""Text, or token ids."""

Prompts = list[str] | list[list[int]]
"""Several of them; a list of ints is one prompt."""


def is_several(prompt: object) -> bool:
    """Return whether a prompt is a list of prompts: of texts, or of lists of token ids."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return isinstance(prompt[0], str | list | tuple)


def prompt_ids(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | NDArray[np.integer],
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Return the token ids of a text; token ids are returned as they are.

    Ids are a sequence (list, tuple, range) or an array of one dimension, whose order is defined:
    not a set or a dict view, and not an iterator, which one request would exhaust.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1:
            raise InputError(
                f"the prompt is an array of {prompt.ndim} dimensions; expected a text, or token "
                "ids in one dimension; pass one row of it"
            )
    elif isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Sequence):
        raise InputError(
            f"the prompt is a {type(prompt).__name__}; expected a text, or a list of token ids; "
            "for other collections pass list(...) of the ids in their order"
        )
    return list(prompt)


def check_context(bundle: Bundle, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise CapacityError unless prompt and new tokens fit the models' contexts."""
    limit = bundle.context_length
    of_target = bundle.manifest.target.context_length
    whose = f" (the draft's; the target's has {of_target})" if limit < of_target else ""
    if num_prompt_tokens >= limit:
        raise CapacityError(
            f"the prompt has {num_prompt_tokens} tokens, the context of this bundle holds "
            f"{limit}{whose}; shorten the prompt"
        )
    if num_prompt_tokens + max_new_tokens > limit:
        raise CapacityError(
            f"the prompt's {num_prompt_tokens} tokens and max_new_tokens {max_new_tokens} exceed "
            f"the context of {limit}{whose}; use max_new_tokens {limit - num_prompt_tokens} or "
            "less, or a shorter prompt"
        )


def new_seed() -> int:
    """Return a random seed, for a request without one."""
    return secrets.randbelow(2**32)  # short to type, and a number that JavaScript can hold


def user_messages(text: str, system: str | None = None) -> Messages:
    """Return a conversation of one user message, after the system message if there is one."""
    begun = [] if system is None else [{"role": "system", "content": system}]
    return [*begun, {"role": "user", "content": text}]


def with_answer(messages: Messages, text: str) -> Messages:
    """Return the conversation with the model's answer appended."""
    return [*messages, {"role": "assistant", "content": text}]
