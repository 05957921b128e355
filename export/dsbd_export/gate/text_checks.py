"""Checks of text for hosts without Python: requests, and the runtime's answers to them.

They are written into every bundle. The native library runs them when it opens the bundle
(native/text/text_checks.cpp). If an answer differs, it refuses text instead of giving other ids.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from dsbd_export.parity_cases import TEXT_FILE
from dsbd_export.tokenizers.tokenizer_gate import CHATS, PLAIN_TEXTS
from dsbd_runtime.bundle_files.bundle import SOURCE_TOKENIZER_FILE, TEXT_CHECKS_FILE
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.text.chat_messages import MediaPart
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.stream_decoder import StreamDecoder, TextWindow
from dsbd_runtime.text.tokenizer import Tokenizer

_NUM_TOKENS = 128  # tokens spread over the vocabulary, decoded and encoded; as many special tokens
_MOST_CODES = 128  # codes of languages of a source
_NOW = 1736413503  # the time of strftime_now: 2025-01-09 09:05:03 UTC
_ENCODES, _DECODES, _RENDERS = QUESTIONS = ("encodes", "decodes", "renders")

Case = tuple[str, dict[str, Any], Any]
"""One of ``QUESTIONS``, a request, and the runtime's answer (None: the request is refused)."""


def write_text_checks(folder: Path, bos_token_id: int | None) -> None:
    """Write the checks of a bundle's tokenizers and chat templates into its folder."""
    tokenizer = Tokenizer(folder, bos_token_id=bos_token_id)
    checks: dict[str, list[list[Any]]] = {question: [] for question in QUESTIONS}
    cases = (*_text_cases(tokenizer), *_source_cases(folder), *_chat_cases(folder))
    for question, request, answer in cases:
        checks[question].append([request, answer])
    text = json.dumps(checks, ensure_ascii=False, separators=(",", ":"))
    (folder / TEXT_CHECKS_FILE).write_text(text + "\n", encoding="utf-8")


def _text_cases(tokenizer: Tokenizer) -> Iterator[Case]:
    for text in _texts(tokenizer):
        for special in (True, False):
            ids = _ids(tokenizer, text, special)
            yield _ENCODES, {"encode": text, "special": special}, ids
        if ids is not None and len(ids) > 1:
            yield _DECODES, {"decode": ids}, _decoded(tokenizer, ids)
            after = len(ids) // 3
            yield _DECODES, {"stream": ids, "after": after}, _streamed(tokenizer, ids, after)
    for token in _spread(range(tokenizer.vocab_size)):
        yield _DECODES, {"decode": [token]}, _decoded(tokenizer, [token])


def _source_cases(folder: Path) -> Iterator[Case]:
    """Yield texts with and without language codes, if sources have a separate tokenizer."""
    file = folder / SOURCE_TOKENIZER_FILE
    if not file.exists():
        return
    tokenizer = Tokenizer(folder, bos_token_id=None, file=file.name)
    added = json.loads(file.read_text(encoding="utf-8"))["added_tokens"]
    codes = (token["content"] for token in added if not token["special"])
    with_codes = (f" {code}a {code} b{code}" for code in islice(codes, _MOST_CODES))
    for text in (*_texts(tokenizer), *with_codes):
        yield _ENCODES, {"source": text}, _ids(tokenizer, text, special=True)


def _chat_cases(folder: Path) -> Iterator[Case]:
    try:
        template = ChatTemplate.from_folder(folder)
    except BundleError:  # the bundle has no template
        return
    now = datetime.fromtimestamp(_NOW, UTC)
    for messages, tools in CHATS:
        parts = [part for each in messages for part in each.get("content") or ()]
        if any(isinstance(part, MediaPart) for part in parts):
            continue
        for prompt in (True, False):
            variables = {"tools": tools, "strftime_now": now.strftime}
            try:
                text = template.render(messages, add_generation_prompt=prompt, variables=variables)
            except (BundleError, InputError):
                continue
            given = {"tools": tools, "add_generation_prompt": prompt}
            yield _RENDERS, {"chat": messages, "variables": given, "now": _NOW}, text


def _texts(tokenizer: Tokenizer) -> Iterator[str]:
    yield from PLAIN_TEXTS
    yield TEXT_FILE.read_text(encoding="utf-8")
    for token in _spread(range(tokenizer.vocab_size)):
        yield _decoded(tokenizer, [token]) or ""
    for token in _spread(sorted(tokenizer.special_token_ids)):
        piece = tokenizer.piece(token)
        yield f"a{piece}b {piece} {piece}{piece}\n{piece}"


def _spread(tokens: range | list[int]) -> range | list[int]:
    return tokens[:: len(tokens) // _NUM_TOKENS + 1]


def _ids(tokenizer: Tokenizer, text: str, special: bool) -> list[int] | None:
    try:
        return tokenizer.encode(text, add_special_tokens=special)
    except InputError:
        return None


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str | None:
    try:
        return tokenizer.decode(ids)
    except InputError:  # some decoders panic
        return None


def _streamed(tokenizer: Tokenizer, ids: list[int], after: int) -> list[str] | None:
    try:
        decoder = StreamDecoder(TextWindow.after(tokenizer, ids[:after]))
        return [*(decoder.push([token]) for token in ids[after:]), decoder.finish()]
    except InputError:
        return None
