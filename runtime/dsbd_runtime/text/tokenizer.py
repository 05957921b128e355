"""Tokenizer of a bundle, and how its tokens join into text.

A decoder of tokenizer.json is a chain of steps. Most treat each token by itself; some join the
tokens first (``Fuse``, ``ByteLevel``), and the steps after those see one long text.
``TextJoints`` describes which text a later token can still change, for ``stream_decoder``:

* ``ByteLevel`` (GPT-2, Llama 3, Qwen): tokens are bytes. A character begun at the end of the text
  is one U+FFFD until its last byte arrives; all text before it is certain.
* ``ByteFallback`` (Llama 2, Mistral, Gemma): tokens such as ``<0xE2>`` are bytes. A run of them is
  decoded as a whole: to its text if all of it is UTF-8, else to one U+FFFD a byte.
* A step that looks for text across tokens (``Replace`` of a regular expression after ``Fuse``, for
  example) can change anything: nothing is certain before the end.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tokenizers

from dsbd_runtime.bundle_files.bundle import (
    SOURCE_TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Bundle,
)
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.typed_json import json_object_in

# The library raises plain Exception, and a BaseException if its Rust code panics: all are caught
# except those that are not the library's.
_PASSED_ON = (KeyboardInterrupt, SystemExit, MemoryError)
_CODE = re.compile(r"\s*(>>[^\s<>]+<<)")
_NO_TEXT = "\N{REPLACEMENT CHARACTER}"  # begins the names of pieces that never occur in a text
_NUM_SHOWN = 12  # codes, in a message
_LONG = 4096
"""Longer texts, in characters, and longer token sequences are passed as a batch with one item.

During batches the library lets other Python threads run. A million takes a second.
"""
_BYTE = re.compile("<0x([0-9a-fA-F+][0-9a-fA-F])>")  # the library reads "+A" as 10 as well

MOST_STRIPPED = 2
"""Characters that a ``Strip`` may take from the beginning of the joined text."""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_BY_SYMBOL = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(_OTHERS)
}
"""How byte-level BPE (GPT-2) spells bytes: printable Latin-1 as itself, others from U+0100 on."""

_SPELLING_OF_BYTES = frozenset("<0x123456789abcdefABCDEF+>")
_BY_TOKEN = ("Replace", "Strip", "Metaspace", "WordPiece", "BPEDecoder", "ByteFallback")


class Tokenizer:
    """The tokenizer of a bundle, for target and draft alike."""

    def __init__(
        self, folder: Path, *, bos_token_id: int | None, file: str = TOKENIZER_FILE
    ) -> None:
        """Read ``file`` and, if present, tokenizer_config.json in ``folder``.

        ``bos_token_id``: of the manifest. ``encode`` adds it if the tokenizer's post-processor does
        not and tokenizer_config.json has ``"add_bos_token": true``.
        """
        self._backend = _read_backend(folder / file)
        self._id_by_code: dict[str, int] | None = None
        if file == SOURCE_TOKENIZER_FILE:
            self._backend, self._id_by_code = _without_codes(self._backend)
        self.skips_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self._adds_text_by_token: dict[int, bool] = {}
        self._bytes_by_token: dict[int, bytes] = {}
        self._added_first: list[int] = []
        config = folder / TOKENIZER_CONFIG_FILE
        if bos_token_id is not None and json_object_in(config).get("add_bos_token") is True:
            if bos_token_id not in self._backend.encode("").ids:
                self._added_first = [bos_token_id]

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> Tokenizer:
        return cls(bundle.path, bos_token_id=bundle.manifest.target.bos_token_id)

    @classmethod
    def of_sources(cls, bundle: Bundle) -> Tokenizer:
        if SOURCE_TOKENIZER_FILE not in bundle.manifest.files:
            return cls.from_bundle(bundle)
        return cls(bundle.path, bos_token_id=None, file=SOURCE_TOKENIZER_FILE)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, with the special tokens that belong around it.

        Pass ``add_special_tokens=False`` for a text that already contains them, such as a rendered
        chat template. A code such as ``>>deu<<``, the target language of an OPUS-MT model, is a
        token only at the beginning of a source.

        Raises:
            InputError: the text is invalid, or begins with a code that the model lacks.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has a lone surrogate U+{ord(text[error.start]):04X} at index "
                f"{error.start}, which is not a character; decode the input as UTF-8 before"
            ) from error
        first = list(self._added_first) if add_special_tokens else []
        if self._id_by_code is not None and (match := _CODE.match(text)):
            first.append(_id_of_code(match[1], self._id_by_code))
            text = text[match.end() :]
        try:
            ids = self._ids_of(text, add_special_tokens)
        except _PASSED_ON:
            raise
        except BaseException as error:
            raise InputError(
                f"the bundle's tokenizer refuses this text of {len(text)} characters "
                f"({_reason(error)}); change the text, or export the bundle again"
            ) from error
        return [*first, *ids]

    def _ids_of(self, text: str, adds: bool) -> list[int]:
        if len(text) <= _LONG:
            return self._backend.encode(text, add_special_tokens=adds).ids
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=adds)
        return encoding.ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens; bytes that are not UTF-8 become U+FFFD."""
        ids, skips = [int(i) for i in token_ids], self.skips_special_tokens
        if not ids:  # some decoders panic
            return ""
        try:
            if len(ids) <= _LONG:
                return self._backend.decode(ids, skip_special_tokens=skips)
            (text,) = self._backend.decode_batch([ids], skip_special_tokens=skips)
            return text
        except _PASSED_ON:
            raise
        except BaseException as error:
            raise InputError(
                f"the bundle's tokenizer refuses these {len(token_ids)} token ids "
                f"({_reason(error)}); give ids of its vocabulary, or export the bundle again"
            ) from error

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's own bytes, which it adds in the middle of a text.

        A special token is spelled out, even if ``decode`` skips it; an id outside the vocabulary
        has no bytes. A token that is part of a character has only the bytes of its part.
        """
        content = self._bytes_by_token.get(token_id)
        if content is None:
            content = self._bytes_by_token[token_id] = self._own_bytes(token_id)
        return content

    def _own_bytes(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(int(token_id))
        if piece is None:
            return b""
        if (byte := self.byte_of(token_id)) is not None:
            return bytes((byte,))
        if self.joints.joins_bytes and all(symbol in BYTE_BY_SYMBOL for symbol in piece):
            return bytes(map(BYTE_BY_SYMBOL.__getitem__, piece))
        tokenizer, letter = self.with_special_tokens, self.letter
        before, after = tokenizer.decode((letter,)), tokenizer.decode((letter, letter))
        try:
            text = tokenizer.decode((letter, token_id, letter))
        except InputError:  # a decoder that needs other tokens next to it
            return b""
        return text.removeprefix(before).removesuffix(after.removeprefix(before)).encode()

    def name_of(self, token_id: int) -> str:
        r"""Return a token's text, ``\xe2\x82`` for a part of a character, else its ``piece``."""
        content = self.bytes_of(token_id)
        try:
            return content.decode() or self.piece(token_id)
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in content)

    def piece(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it, ``<id>`` for an unknown id."""
        piece: str | None = self._backend.id_to_token(int(token_id))
        return f"<{token_id}>" if piece is None else piece

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; with holes, ids may be larger."""
        return int(self._backend.get_vocab_size())

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that are not text, such as the end of a sequence."""
        return frozenset(token_id for token_id, _ in self._special_by_text.values())

    @functools.cached_property
    def _special_by_text(self) -> dict[str, tuple[int, tokenizers.AddedToken]]:
        added = self._backend.get_added_tokens_decoder()
        return {token.content: (i, token) for i, token in added.items() if token.special}

    @functools.cached_property
    def _lengths_of_special(self) -> dict[str, list[int]]:
        """The lengths of the texts of special tokens by first character, longest first."""
        lengths_by_first: dict[str, set[int]] = {}
        for text in self._special_by_text:
            lengths_by_first.setdefault(text[:1], set()).add(len(text))
        return {first: sorted(lengths, reverse=True) for first, lengths in lengths_by_first.items()}

    def split_at_special_tokens(self, text: str) -> list[str | int]:
        """Return the special tokens of a text as their ids, and the texts around them.

        If several special tokens begin at one character, the longest is taken, with the spaces
        around it that its entry in tokenizer.json strips.
        """
        pieces: list[str | int] = []
        at = 0
        while at < len(text):
            lengths = self._lengths_of_special.get(text[at], ())
            parts = (text[at : at + length] for length in lengths)
            piece = next((part for part in parts if part in self._special_by_text), None)
            if piece is None:
                at += 1
                continue
            token_id, token = self._special_by_text[piece]
            before, text, at = text[:at], text[at + len(piece) :], 0
            text = text.lstrip() if token.rstrip else text
            pieces += before.rstrip() if token.lstrip else before, token_id
        return [*pieces, text]

    @functools.cached_property
    def with_special_tokens(self) -> Tokenizer:
        """The same tokenizer, but its texts have special tokens as the vocabulary spells them."""
        other = copy.copy(self)
        other.skips_special_tokens, other._adds_text_by_token = False, {}
        return other

    def with_renamed(self, piece: str, name: str) -> Tokenizer:
        """Return the tokenizer in which a special token is spelled ``name``; ``piece`` is text."""
        content = json.loads(self._backend.to_str())
        for token in content["added_tokens"]:
            if token["content"] == piece:
                token["content"] = name
        vocab = content["model"]["vocab"]
        if isinstance(vocab, dict) and piece in vocab:
            vocab[name] = vocab.pop(piece)
        elif isinstance(vocab, list):
            for entry in vocab:
                entry[0] = name if entry[0] == piece else entry[0]
        other = copy.copy(self)
        other._backend = tokenizers.Tokenizer.from_str(json.dumps(content))
        other._adds_text_by_token, other._bytes_by_token = {}, {}
        return other

    @functools.cached_property
    def joints(self) -> TextJoints:
        decoder = self._backend.decoder
        return joints_of(None if decoder is None else json.loads(decoder.__getstate__()))

    def byte_of(self, token_id: int) -> int | None:
        """Return the byte of a token that is decoded in a run of bytes; None for other tokens."""
        if not self.joints.has_byte_runs:
            return None
        match = _BYTE.fullmatch(self._backend.id_to_token(int(token_id)) or "")
        return None if match is None else int(match[1], 16)

    def adds_text(self, token_id: int) -> bool:
        """Return whether a token ever changes a text; special and unknown tokens do not."""
        adds = self._adds_text_by_token.get(token_id)
        if adds is None:
            letter, token = (self.letter,), (token_id,)
            contexts = (((), letter), (letter, ()), (letter, letter))
            adds = any(
                self.decode(before + token + after) != self.decode(before + after)
                for before, after in contexts
            )
            self._adds_text_by_token[token_id] = adds
        return adds

    @functools.cached_property
    def letter(self) -> int:
        """The first token that is text by itself, not part of a character."""
        for token_id in range(self.vocab_size):
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
            f"{file} is not a tokenizer ({_reason(error)}); export the bundle again"
        ) from error


def _without_codes(backend: tokenizers.Tokenizer) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    """Return a tokenizer of sources that reads codes as text, and the tokens of the codes."""
    content = json.loads(backend.to_str())
    codes = {each["content"]: each["id"] for each in content["added_tokens"]}
    codes = {piece: index for piece, index in codes.items() if _CODE.fullmatch(piece)}
    if not codes:
        return backend, {}
    content["added_tokens"] = [x for x in content["added_tokens"] if x["content"] not in codes]
    for piece, index in codes.items():
        content["model"]["vocab"][index][0] = f"{_NO_TEXT}{piece}"
    return tokenizers.Tokenizer.from_str(json.dumps(content)), codes


def _id_of_code(code: str, id_by_code: Mapping[str, int]) -> int:
    if code in id_by_code:
        return id_by_code[code]
    close = get_close_matches(code, id_by_code, n=3)
    shown = list(dict.fromkeys([*close, *sorted(id_by_code)]))[:_NUM_SHOWN]
    more = f" and {len(id_by_code) - len(shown)} more" if len(id_by_code) > len(shown) else ""
    expected = f"it has {', '.join(shown)}{more}" if shown else "it has none: leave the code out"
    raise InputError(f"the source begins with {code}, a code that this model lacks; {expected}")


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


@dataclass(frozen=True, kw_only=True)
class TextJoints:
    """How later tokens can change the text of earlier ones.

    is_local: whether no step looks for text across tokens; if not, anything can change.
    joins_bytes: whether tokens are bytes (``ByteLevel``).
    has_byte_runs: whether some tokens are bytes, decoded a run at a time (``ByteFallback``).
    num_dropped_spaces: number of spaces dropped at the beginning of a text.
    """

    is_local: bool
    joins_bytes: bool = False
    has_byte_runs: bool = False
    num_dropped_spaces: int = 0


def joints_of(decoder: Mapping[str, Any] | None) -> TextJoints:
    """Return the joints of a decoder, given as its JSON in tokenizer.json; None: no decoder."""
    steps = list(_steps(decoder))
    kinds = [step.get("type") for step in steps]
    joins_bytes, has_byte_runs = "ByteLevel" in kinds, "ByteFallback" in kinds
    num_by_token = next((i for i, k in enumerate(kinds) if k in ("Fuse", "ByteLevel")), len(kinds))
    num_before_bytes = kinds.index("ByteFallback") if has_byte_runs else 0
    is_local = (
        all(kind in _BY_TOKEN for kind in kinds[:num_by_token])
        and all(_keeps_bytes(step) for step in steps[:num_before_bytes])
        and kinds.count("ByteFallback") <= 1
        and not (joins_bytes and has_byte_runs)
        and all(_is_by_character(step) for step in steps[num_by_token + 1 :])
    )
    return TextJoints(
        is_local=is_local,
        joins_bytes=is_local and joins_bytes,
        has_byte_runs=is_local and has_byte_runs,
        num_dropped_spaces=sum(map(_num_dropped_spaces, steps)),
    )


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _steps(step)


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    """Return whether a step before ``ByteFallback`` leaves every ``<0xE2>`` as it is."""
    pattern = _replaced_text(step)
    return bool(pattern) and _SPELLING_OF_BYTES.isdisjoint(f"{pattern}{step['content']}")


def _num_dropped_spaces(step: Mapping[str, Any]) -> int:
    if step.get("type") == "Strip":
        return int(step["start"]) if step["content"] == " " else 0
    return int(step.get("type") == "Metaspace" and step["prepend_scheme"] != "never")


def _is_by_character(step: Mapping[str, Any]) -> bool:
    """Return whether a step on the joined text treats each character by itself."""
    if step.get("type") == "Strip":
        return int(step["start"]) <= MOST_STRIPPED and not step["stop"]
    return step.get("type") in ("Fuse", "Metaspace") or len(_replaced_text(step)) == 1


def _replaced_text(step: Mapping[str, Any]) -> str:
    """Return the plain text that a ``Replace`` looks for; "" for every other step."""
    pattern = step.get("pattern") if step.get("type") == "Replace" else None
    return str(pattern.get("String", "")) if isinstance(pattern, dict) else ""
