"""Text to token ids and back, from the bundle's tokenizer.json."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from dsbd_runtime.bundle import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Bundle
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.text_joints import TextJoints, joints_of

# The library raises plain Exception, and where its Rust code panics no Exception at all: all is
# caught but what is not the library's.
_PASSED_ON = (KeyboardInterrupt, SystemExit, MemoryError)
_BYTE = re.compile("<0x([0-9a-fA-F+][0-9a-fA-F])>")  # the library reads "+A" as 10 as well


class Tokenizer:
    """The tokenizer of a bundle, for target and draft alike."""

    def __init__(self, folder: Path, *, bos_token_id: int | None) -> None:
        """Read tokenizer.json and, where there is one, tokenizer_config.json in ``folder``.

        ``bos_token_id`` is the manifest's. ``encode`` puts it first when the tokenizer's own
        post-processor adds none and tokenizer_config.json says ``"add_bos_token": true``.
        """
        self._backend = _read_backend(folder / TOKENIZER_FILE)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._adds_text_by_token: dict[int, bool] = {}
        self._added_first: list[int] = []
        if bos_token_id is not None and _says_add_bos_token(folder / TOKENIZER_CONFIG_FILE):
            if bos_token_id not in self._backend.encode("").ids:
                self._added_first = [bos_token_id]

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> Tokenizer:
        """Return the tokenizer of an opened bundle."""
        return cls(bundle.path, bos_token_id=bundle.manifest.target.bos_token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, with the special tokens that belong around it.

        A text that already spells them, as a filled chat template does, wants
        ``add_special_tokens=False``.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has a lone surrogate U+{ord(text[error.start]):04X} at index "
                f"{error.start}, which is no character; decode the input as UTF-8 before"
            ) from error
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except _PASSED_ON:
            raise
        except BaseException as error:
            raise InputError(
                f"the bundle's tokenizer refuses this text of {len(text)} characters "
                f"({_reason(error)}); change the text, or export the bundle again"
            ) from error
        return [*self._added_first, *ids] if add_special_tokens else list(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without special tokens.

        Bytes that are no UTF-8 become U+FFFD.
        """
        try:
            return self._backend.decode([int(i) for i in token_ids], skip_special_tokens=True)
        except _PASSED_ON:
            raise
        except BaseException as error:
            raise InputError(
                f"the bundle's tokenizer refuses these {len(token_ids)} token ids "
                f"({_reason(error)}); give ids of its vocabulary, or export the bundle again"
            ) from error

    def piece(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it, ``<id>`` where it has no such token."""
        piece: str | None = self._backend.id_to_token(int(token_id))
        return f"<{token_id}>" if piece is None else piece

    @functools.cached_property
    def joints(self) -> TextJoints:
        """What later tokens can change in the text of those before."""
        decoder = self._backend.decoder
        return joints_of(None if decoder is None else json.loads(decoder.__getstate__()))

    def byte_of(self, token_id: int) -> int | None:
        """Return the byte that a token is in a run of bytes, None for every other token."""
        if not self.joints.has_byte_runs:
            return None
        match = _BYTE.fullmatch(self._backend.id_to_token(int(token_id)) or "")
        return None if match is None else int(match[1], 16)

    def adds_text(self, token_id: int) -> bool:
        """Return whether a token ever makes a difference to the text around it.

        Special tokens and ids outside the vocabulary do not.
        """
        found = self._adds_text_by_token.get(token_id)
        if found is None:
            letter, token = (self._letter,), (token_id,)
            contexts = (((), letter), (letter, ()), (letter, letter))
            found = any(
                self.decode(before + token + after) != self.decode(before + after)
                for before, after in contexts
            )
            self._adds_text_by_token[token_id] = found
        return found

    @functools.cached_property
    def _letter(self) -> int:
        """The first token that is text by itself, no part of a character."""
        for token_id in range(self._backend.get_vocab_size()):
            text = self.decode((token_id,))
            if text.strip() and "\N{REPLACEMENT CHARACTER}" not in text:
                return token_id
        return 0


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except _PASSED_ON:
        raise
    except BaseException as error:
        raise BundleError(
            f"{file} is no tokenizer ({_reason(error)}); export the bundle again"
        ) from error


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def _says_add_bos_token(file: Path) -> bool:
    if not file.exists():
        return False
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise BundleError(f"{file} cannot be read as JSON ({error}); export again") from error
    return isinstance(config, dict) and config.get("add_bos_token") is True
