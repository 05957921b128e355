"""Prompts: token ids, sources, the check of the context length, chat messages, drawn seeds.

The prompt of a request to an encoder-decoder is its source: a text to be translated, corrected or
summarized. Decoding begins with the model's start token, and all its rows depend on the source too.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Source
from dsbd_ort.decoding.option_values import shown
from dsbd_ort.decoding.request import CopiedIds, check_prompt
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.parts.source.encoder_entry import EncoderEntry, check_length
from dsbd_runtime.text.chat_messages import Message
from dsbd_runtime.text.tokenizer import Tokenizer

Messages = list[dict[str, str]]

Prompt = str | Sequence[int]
"""Text, or token ids."""

Prompts = list[str] | list[list[int]]
"""Several prompts; a list of ints is one prompt."""


def is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Return whether a prompt is a list of messages."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(message, Mapping) for message in prompt)


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
    """Return the token ids of a text; token ids are returned unchanged.

    Token ids must be a sequence (list, tuple, range) or an array of one dimension. Sets and dict
    views are refused because they have no order, iterators because one request would exhaust them.
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
    # litellm looks for the context, langchain for the beginning.
    context = f"this model's maximum context length is {limit} tokens{whose}, the prompt has"
    if num_prompt_tokens >= limit:
        raise CapacityError(
            f"the prompt is too long: {context} {num_prompt_tokens}; shorten the prompt"
        )
    if num_prompt_tokens + max_new_tokens > limit:
        raise CapacityError(
            f"the prompt is too long for max_new_tokens {max_new_tokens}: {context} "
            f"{num_prompt_tokens}; use max_new_tokens {limit - num_prompt_tokens} or less, or a "
            "shorter prompt"
        )


def new_seed() -> int:
    """Return a random seed, for a request without one."""
    return secrets.randbelow(2**32)  # short to type, and a number that JavaScript can hold


def user_messages(text: str, system: str | None = None) -> Messages:
    """Return a conversation of one user message, with the system message before it if given."""
    begun = [] if system is None else [{"role": "system", "content": system}]
    return [*begun, {"role": "user", "content": text}]


SRC_LANG, TGT_LANG = LANGUAGE_OPTIONS = ("src_lang", "tgt_lang")
"""Names of the options that choose languages, for models that translate between several."""


def without_languages(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are fields of DecodingConfig."""
    return {name: value for name, value in options.items() if name not in LANGUAGE_OPTIONS}


@dataclass(frozen=True)
class RequestInputs:
    """A prompt as the engines read it."""

    prompt_ids: list[int]  # the tokens that decoding continues
    source: Source = None  # see ``Forward.source``
    # tokens of the source if both vocabularies are the same, or tokens that the encoder gives
    copied_ids: CopiedIds = ()


class MediaPrompt(list[int]):
    """Token ids of a prompt, with the sounds or pictures in it.

    It can be used like any list of token ids, but a copy as a plain list has no media.
    """

    def __init__(self, inputs: RequestInputs) -> None:
        super().__init__(inputs.prompt_ids)
        self.inputs = inputs


class PromptReader:
    """Turns prompts into inputs of the engines: the prompt itself, or a source."""

    def __init__(self, bundle: Bundle, tokenizer: Tokenizer) -> None:
        self._bundle = bundle
        self.encoder: EncoderEntry | None = bundle.manifest.target.encoder
        self.tokenizer = tokenizer if self.encoder is None else Tokenizer.of_sources(bundle)

    def read(
        self, prompt: str | Sequence[int] | NDArray[np.integer], src_lang: str | None = None
    ) -> RequestInputs:
        """Return the inputs of a request.

        InputError, DecodingError: the prompt or the language is invalid. CapacityError: the source
        is longer than the encoder reads.
        """
        if isinstance(prompt, MediaPrompt):
            check_prompt(prompt, self._bundle.manifest.target.vocab_size)
            return prompt.inputs
        token_ids = self.token_ids(prompt, src_lang)
        if self.encoder is None:
            return RequestInputs(token_ids)
        limit = self._bundle.source_length
        assert limit is not None  # as there is an encoder
        check_length(len(token_ids), limit)
        source = tuple(token_ids)
        vocab_size = self._bundle.manifest.target.vocab_size
        copied_ids = source if self.encoder.vocab_size == vocab_size else ()
        return RequestInputs([self.encoder.start_token_id], source, copied_ids)

    def token_ids(
        self,
        prompt: str | Sequence[int] | NDArray[np.integer],
        src_lang: str | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the tokens of a prompt or source; raise InputError or DecodingError."""
        if self.encoder is not None and self.encoder.fixed is not None:
            way = "transcribe, or --audio" if self.encoder.speech else "messages, or --image"
            raise InputError(
                f"the model of {self._bundle.path} reads {self.encoder.fixed.noun}, a "
                f"{type(prompt).__name__} is given as its prompt; use {way}"
            )
        token_ids = prompt_ids(self.tokenizer, prompt, add_special_tokens=add_special_tokens)
        if self.encoder is None:
            check_prompt(token_ids, self._bundle.manifest.target.vocab_size)
        else:
            size, unknown = self.encoder.vocab_size, self.encoder.unknown_token_id
            if isinstance(prompt, str) and unknown is not None:
                token_ids = [token if token < size else unknown for token in token_ids]
            check_prompt(token_ids, size, "source")
        token_ids = [int(token) for token in token_ids]  # numpy's numbers too
        if src_lang is None:
            return token_ids
        return self._in_language(token_ids, self._language(SRC_LANG, src_lang))

    def the_one(self, prompt: Any, source: Any) -> Any:
        """Return the prompt or the source, whichever is given; InputError: both or neither are."""
        if (prompt is None) == (source is None):
            given = "neither" if prompt is None else "both"
            raise InputError(f"prompt and source: {given} is given; expected one of them")
        if source is not None and self.encoder is None:
            raise InputError(
                f"source is given, but the model of {self._bundle.path} is not an encoder-decoder; "
                "give it as the prompt"
            )
        return prompt if source is None else source

    def with_language(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with a language as the first token; InputError: unknown language."""
        fields = without_languages(options)
        if options.get(SRC_LANG) is not None:
            self._language(SRC_LANG, options[SRC_LANG])
        if (name := options.get(TGT_LANG)) is not None:
            if fields.get("forced_bos_token_id") is not None:
                raise InputError(
                    f"tgt_lang is {shown(name)} and forced_bos_token_id "
                    f"{shown(fields['forced_bos_token_id'])}: both say how a target begins; leave "
                    "out one"
                )
            fields["forced_bos_token_id"] = self._language(TGT_LANG, name)
        return fields

    def _language(self, option: str, name: object) -> int:
        languages = None if self.encoder is None else self.encoder.languages
        if languages is None:
            raise InputError(
                f"{option} is {shown(name)}, but the model of {self._bundle.path} has no tokens "
                "for languages; leave it out"
            )
        if not isinstance(name, str) or name not in languages:
            close = get_close_matches(str(name), languages, n=3, cutoff=0.4)
            names = ", ".join(close or sorted(languages)[:6])
            raise InputError(
                f"{option} is {shown(name)}, expected one of the {len(languages)} languages of "
                f"this model, such as {names}"
            )
        return languages[name]

    def _in_language(self, token_ids: list[int], language: int) -> list[int]:
        assert self.encoder is not None and self.encoder.languages is not None  # as it is known
        languages = set(self.encoder.languages.values())
        for place in (0, -1):
            if token_ids and token_ids[place] in languages:
                changed = list(token_ids)
                changed[place] = language
                return changed
        raise InputError(
            "src_lang is given, but the source begins and ends with no token of a language; give "
            "it as a text, or with that token"
        )
