"""Tokenizer described by the metadata of a GGUF file, interpreted as llama.cpp does.

``tokenizer.ggml.model`` names the kind:

kind         tokens are                            words                   built as
gpt2         bytes, as GPT-2 spells them           ``gguf_words``, by name  BPE, merges of the file
gemma4       characters, "▁" for a space           ``gguf_words``, by name  BPE, merges of the file
llama        characters, "▁" for a space           the whole text          BPE, merges by scores
others       refused by name

A text is first split at control and user-defined tokens.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerBase, TokenizersBackend
from transformers.tokenization_utils_base import generate_merges

from dsbd_export.checkpoints.gguf_ends import CLOSING_TAG, END_TEXTS, FILL_IN_TEXTS, ends_by_text
from dsbd_export.checkpoints.gguf_file import SENTENCEPIECE, GgufHeader, read_header
from dsbd_export.errors import ExportError
from dsbd_export.tokenizers.gguf_words import PRE_TOKENIZERS, PreTokenizer
from dsbd_runtime.text.tokenizer import BYTE_BY_SYMBOL

_GEMMA_4 = "gemma4"
_KINDS = ("gpt2", _GEMMA_4, SENTENCEPIECE)
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "mask": "mask"}
_STRIPPING = re.compile("phi-?3")
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")
# Some files mark these as plain tokens; llama.cpp recognizes them as control tokens by text.
_ALWAYS_CONTROL = END_TEXTS.union(*FILL_IN_TEXTS.values())


@dataclass(frozen=True, kw_only=True)
class _Metadata:
    """Checked metadata ``tokenizer.*`` of a file."""

    header: GgufHeader
    kind: str  # one of ``_KINDS``
    words: PreTokenizer | None  # for a BPE; None: sentencepiece
    tokens: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int]  # ids of the special tokens that the file names, by ggml's names

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.header.values.get(f"tokenizer.ggml.{name}", default))

    @property
    def adds_begin(self) -> bool:
        if (
            self.kind == _GEMMA_4
        ):  # some files deny it, but the model was trained with a begin token
            return True
        is_usual = self.words is None or (self.words.begins and "bos" in self.ids)
        return self.flag("add_bos_token", is_usual)

    def added(self) -> Iterator[AddedToken]:
        """Yield the tokens at which a text is split first."""
        strips = bool(_STRIPPING.search(str(self.header.values.get("general.name", "")).lower()))
        ends = {self.ids[name] for name in ("bos", "eos") if name in self.ids}
        for index, (text, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            is_special = kind in (_UNKNOWN, _CONTROL) or index in ends or text in _ALWAYS_CONTROL
            if is_special or kind == _USER_DEFINED or text == CLOSING_TAG:
                rstrip = strips and text not in _NOT_STRIPPING
                yield AddedToken(text, normalized=False, special=is_special, rstrip=rstrip)

    def special_tokens(self) -> dict[str, str]:
        """Return special tokens by their names in templates, such as bos_token."""
        special = {token.content for token in self.added() if token.special}
        named = {f"{_NAMED[name]}_token": self.tokens[index] for name, index in self.ids.items()}
        return {name: token for name, token in named.items() if token in special}


def gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a file; raise ExportError if it cannot be read reliably."""
    metadata = _metadata(file, read_header(file))
    backend = (_from_scores if metadata.words is None else _from_merges)(metadata)
    backend.add_tokens(list(metadata.added()))  # tokens keep their ids
    backend.post_processor = _ends(metadata)
    templates = _templates(metadata.header.values)
    return TokenizersBackend(
        tokenizer_object=backend,
        chat_template=templates or None,
        clean_up_tokenization_spaces=False,
        **metadata.special_tokens(),
    )


def gguf_tokenizer_warning(file: Path) -> str | None:
    """Return a warning if the file does not name its pre-tokenizer."""
    values = read_header(file).values
    if values["tokenizer.ggml.model"] != "gpt2" or values.get("tokenizer.ggml.pre"):
        return None
    return (
        f"{file} does not name its pre-tokenizer (tokenizer.ggml.pre), so texts are split into "
        "words by llama.cpp's default, which may differ from the training; a newer conversion of "
        "the model names it"
    )


def gguf_ends_line(file: Path, eos_token_ids: Sequence[int]) -> str | None:
    """Return a line with ends of an answer that a file does not name, None if there are none."""
    added = ends_by_text(read_header(file)).items()
    ends = ", ".join(f"{text} ({index})" for text, index in added if index in eos_token_ids)
    return f"answers also end at {ends}, known by their texts as in llama.cpp" if ends else None


def _metadata(file: Path, header: GgufHeader) -> _Metadata:
    values = header.values
    kind = values.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise ExportError(
            f"the tokenizer of {file} is of the kind {kind!r} (tokenizer.ggml.model), kinds that "
            f"can be read are {', '.join(_KINDS)}; export the checkpoint folder that the file was "
            "made from"
        )
    tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(values.get("tokenizer.ggml.tokens") or ())]
    kinds = values.get("tokenizer.ggml.token_type")
    kinds = [1] * len(tokens) if kinds is None else kinds.tolist()
    if len(set(tokens)) != len(tokens) or len(tokens) <= 2 or len(kinds) != len(tokens):
        raise ExportError(
            f"the tokenizer of {file} has {len(tokens)} tokens, {len(set(tokens))} different ones, "
            f"and kinds for {len(kinds)}; the three must be the same, and more than 2: convert the "
            "model again"
        )
    ids = {name: index for name in _NAMED if (index := header.token_id(name)) is not None}
    return _Metadata(
        header=header,
        kind=kind,
        words=None if kind == SENTENCEPIECE else _words(file, kind, values),
        tokens=tokens,
        kinds=kinds,
        ids=ids,
    )


def _words(file: Path, kind: str, values: Mapping[str, Any]) -> PreTokenizer:
    name = _GEMMA_4 if kind == _GEMMA_4 else values.get("tokenizer.ggml.pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise ExportError(
            f"the tokenizer of {file} splits texts as {name!r} does (tokenizer.ggml.pre), which is "
            "not known here; export the checkpoint folder that the file was made from"
        )
    return PRE_TOKENIZERS[name]


def _from_merges(metadata: _Metadata) -> Tokenizer:
    """Return a BPE over words, with the merges of the file."""
    words = metadata.words
    assert words is not None
    backend = Tokenizer(
        models.BPE(
            vocab=_vocabulary(metadata),
            merges=_merges(metadata),
            ignore_merges=words.takes_whole_words,
            byte_fallback=not words.spells_bytes,
        )
    )
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in words.splits]
    if words.spells_bytes:
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
        backend.decoder = _byte_level_decoder(metadata)
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
        backend.decoder = decoders.Sequence(_SPELLED)
    return backend


_SPELLED = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def _byte_level_decoder(metadata: _Metadata) -> decoders.Decoder:
    """Return a decoder that leaves added tokens unchanged, even if they look like bytes."""
    symbol_by_byte = {byte: symbol for symbol, byte in BYTE_BY_SYMBOL.items()}
    spelled = {
        token.content: "".join(symbol_by_byte[byte] for byte in token.content.encode())
        for token in metadata.added()
        if set(token.content) <= set(BYTE_BY_SYMBOL)
    }
    steps = [
        decoders.Replace(Regex(f"^{re.escape(text)}$"), symbols)
        for text, symbols in spelled.items()
        if text != symbols
    ]
    return decoders.Sequence([*steps, decoders.ByteLevel()]) if steps else decoders.ByteLevel()


def _from_scores(metadata: _Metadata) -> Tokenizer:
    """Return a BPE that merges the adjacent pair whose joint token has the highest score."""
    unknown = metadata.tokens[metadata.ids["unknown"]]
    backend = Tokenizer(
        models.BPE(
            vocab=_vocabulary(metadata),
            merges=_merges(metadata) or _merges_by_scores(metadata),
            unk_token=unknown,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    begins = metadata.flag("add_space_prefix", True)
    before = [normalizers.Prepend(_SPACE)] if begins else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if begins else []
    backend.decoder = decoders.Sequence([*_SPELLED, *strip])
    return backend


def _vocabulary(metadata: _Metadata) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata.tokens)}


def _merges(metadata: _Metadata) -> list[tuple[str, str]]:
    """Return the merges as pairs (a space separates them in the file); ExportError if invalid."""
    lines = metadata.header.values.get("tokenizer.ggml.merges") or []
    places = [line.find(" ", 1) for line in lines]
    pairs = [(line[:at], line[at + 1 :]) for line, at in zip(lines, places, strict=True)]
    vocabulary = set(metadata.tokens)
    lost = next((p for p in pairs if not {*p, "".join(p)} <= vocabulary), None)
    if lost is not None or (metadata.words is not None and not pairs):
        what = "has no merges" if lost is None else f"merges {lost}, which are not in it"
        raise ExportError(
            f"the tokenizer of {metadata.header.file} {what}; convert the model again"
        )
    return pairs


def _merges_by_scores(metadata: _Metadata) -> list[tuple[str, str]]:
    scores = metadata.header.values.get("tokenizer.ggml.scores")
    added = {token.content for token in metadata.added()}
    given = [] if scores is None else scores.tolist()
    by_token = dict(zip(metadata.tokens, given, strict=False))
    if len(given) != len(metadata.tokens) or len(set(given)) < 2:
        raise ExportError(
            f"the tokenizer of {metadata.header.file} has {len(given)} scores, {len(set(given))} "
            f"different ones, for {len(metadata.tokens)} tokens, so that the order of its merges "
            "is unknown; export the checkpoint folder that the file was made from"
        )
    merges: list[tuple[str, str]] = generate_merges(_vocabulary(metadata), by_token, added)
    return merges


def _ends(metadata: _Metadata) -> processors.PostProcessor:
    """Return the post-processor that adds tokens around a prompt."""
    wanted = {"bos": metadata.adds_begin, "eos": metadata.flag("add_eos_token", False)}
    for name, is_wanted in wanted.items():
        if is_wanted and name not in metadata.ids:
            raise ExportError(
                f"{metadata.header.file} puts a token around a prompt (tokenizer.ggml.add_{name}_"
                f"token) and names none (tokenizer.ggml.{name}_token_id); convert the model again"
            )
    tokens = {n: metadata.tokens[metadata.ids[n]] for n, is_wanted in wanted.items() if is_wanted}
    first, last = ([tokens[name]] if name in tokens else [] for name in ("bos", "eos"))
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B", *last],
        special_tokens=[(tokens[name], metadata.ids[name]) for name in tokens],
    )


def _templates(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; the first one is named "default"."""
    names = itertools.chain([""], (f".{n}" for n in values.get("tokenizer.chat_templates") or ()))
    templates = {
        name[1:] or "default": values.get(f"tokenizer.chat_template{name}") for name in names
    }
    return {name: template for name, template in templates.items() if template}
