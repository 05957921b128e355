"""Chats to learn from: lines {"messages": [...]}, the prompts in them, and their tokens on disk.

Every turn that the model would answer is a prompt: the messages before each answer, or a whole chat
that ends with a user's message. The target's template renders prompts. The draft learns from the
target's answers; it learns the answers in the data only on request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_export.errors import ExportError
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.tokenizer import Tokenizer

MOST_NEW = 128  # maximum tokens of an answer
MOST_PROMPT = 1024  # maximum tokens of a prompt, if the context is long enough
_ANSWERS = "assistant"  # role of answers


@dataclass(frozen=True)
class Chat:
    """The messages of one chat, and its file and line."""

    messages: list[dict[str, Any]]
    where: str

    def __iter__(self) -> Iterator[str]:
        for message in self.messages:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, str):
                yield content

    @property
    def ends_with_answer(self) -> bool:
        return bool(self.messages) and self._is_answer(len(self.messages) - 1)

    def prompts(self) -> list[list[dict[str, Any]]]:
        """Return the messages before every answer, and the whole chat if it ends without one."""
        ends = [index for index in range(1, len(self.messages)) if self._is_answer(index)]
        if not self.ends_with_answer:
            ends.append(len(self.messages))
        return [self.messages[:end] for end in ends]

    def _is_answer(self, index: int) -> bool:
        message = self.messages[index]
        return isinstance(message, dict) and message.get("role") == _ANSWERS


@dataclass
class ChatTokens:
    """Converts chats to token ids, as for a request."""

    folder: Path
    tokenizer: Tokenizer
    longest: int  # maximum tokens of a prompt; longer prompts are counted and left out
    learns_answers: bool
    num_left_out: int = 0

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.from_folder(self.folder)

    def prompts(self, chat: Chat) -> list[list[int]]:
        """Return the prompts of a chat; raise ExportError if its template refuses them."""
        prompts = [self._ids(chat, messages, is_prompt=True) for messages in chat.prompts()]
        kept = [ids for ids in prompts if len(ids) <= self.longest]
        self.num_left_out += len(prompts) - len(kept)
        return kept

    def text(self, chat: Chat) -> list[int]:
        """Return the tokens of the whole chat if its answers are learned as text, else []."""
        if not (self.learns_answers and chat.ends_with_answer):
            return []
        return self._ids(chat, chat.messages, is_prompt=False)

    def _ids(self, chat: Chat, messages: list[dict[str, Any]], *, is_prompt: bool) -> list[int]:
        try:
            text = self._template.render(messages, add_generation_prompt=is_prompt)
        except InputError as error:
            raise ExportError(f"{chat.where}: {error}") from error
        except BundleError as error:
            raise ExportError(
                f"{chat.where} is a chat, but the target has no chat template that renders it "
                f"({error}); give texts, or a target that chats"
            ) from error
        return self.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class Prompts:
    """Token ids of prompts, one after the other, memory-mapped."""

    tokens: NDArray[np.uint32]  # (num_tokens,) uint32
    ends: NDArray[np.int64]  # (num_prompts,) int64. End of each prompt in ``tokens``.

    def __len__(self) -> int:
        return len(self.ends)

    def chosen(self, count: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        """Draw ``count`` different prompts, or all in random order if there are fewer."""
        return self.at(rng.permutation(len(self))[:count])

    def at(self, indices: Sequence[int] | NDArray[np.int64]) -> list[NDArray[np.int64]]:
        begins = np.concatenate([[0], self.ends])
        return [
            np.array(self.tokens[begins[index] : begins[index + 1]], np.int64) for index in indices
        ]

    def without_end(self, count: int) -> tuple[Prompts, Prompts]:
        """Return all prompts except the last ``count``, and the last ``count``."""
        place = len(self) - count
        begin = int(self.ends[place - 1]) if place else 0
        first = Prompts(self.tokens[:begin], self.ends[:place])
        return first, Prompts(self.tokens[begin:], self.ends[place:] - begin)


NO_PROMPTS = Prompts(np.zeros(0, np.uint32), np.zeros(0, np.int64))
