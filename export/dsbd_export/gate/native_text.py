"""Gate of native text: whether the library without Python reads and writes text like this one.

The command ``dsbd_native_text`` (native/text) answers the same questions as the runtime's tokenizer
and chat templates. Any difference is written into the manifest, and the native library then refuses
text instead of giving other ids.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsbd_export.parity_cases import TEXT_FILE
from dsbd_export.progress import Report
from dsbd_export.tokenizers.tokenizer_gate import CHATS, PLAIN_TEXTS
from dsbd_runtime.bundle_files.bundle import SOURCE_TOKENIZER_FILE
from dsbd_runtime.bundle_files.manifest import NativeText
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.text.chat_messages import MediaPart
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.stream_decoder import StreamDecoder, TextWindow
from dsbd_runtime.text.tokenizer import Tokenizer

COMMAND, VARIABLE = "dsbd_native_text", "DSBD_NATIVE_TEXT"
_LONGEST_S = 300.0
_NUM_TOKENS = 256  # spread over the vocabulary, written and read
_ENCODES, _DECODES, _RENDERS = "encodes", "decodes", "renders"

Case = tuple[str, dict[str, Any], Any]
"""A field of ``NativeText``, a request to the command, and the runtime's answer."""


def measured_native_text(
    folder: Path, bos_token_id: int | None, report: Report
) -> NativeText | None:
    """Compare the command with the runtime over a bundle's files; None: there is no command."""
    command = os.environ.get(VARIABLE) or shutil.which(COMMAND)
    if command is None:
        return None
    tokenizer = Tokenizer(folder, bos_token_id=bos_token_id)
    try:
        cases = [*_text_cases(tokenizer), *_source_cases(folder), *_chat_cases(folder)]
    except InputError as error:  # some decoders panic
        return NativeText(encodes=False, decodes=False, renders=None, reason=str(error))
    begin = [] if bos_token_id is None else [str(bos_token_id)]
    answers = _answers([command, str(folder), *begin], [request for _, request, _ in cases])
    reasons: dict[str, str] = {}
    for (question, request, wanted), answer in zip(cases, answers, strict=True):
        if answer != wanted:
            reasons.setdefault(question, _difference(request, answer, wanted))
    for question, reason in reasons.items():
        report(f"native text: it never {question} here as Python does: {reason}")
    has_chats = any(question == _RENDERS for question, _, _ in cases)
    return NativeText(
        encodes=_ENCODES not in reasons,
        decodes=_DECODES not in reasons,
        renders=_RENDERS not in reasons if has_chats else None,
        reason="; ".join(reasons.values()) or None,
    )


def _text_cases(tokenizer: Tokenizer) -> Iterator[Case]:
    for text in _texts(tokenizer):
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            yield _ENCODES, {"encode": text, "special": special}, ids
        yield _DECODES, {"decode": ids}, tokenizer.decode(ids)
        after = len(ids) // 3
        decoder = StreamDecoder(TextWindow.after(tokenizer, ids[:after]))
        pieces = [*(decoder.push([token]) for token in ids[after:]), decoder.finish()]
        yield _DECODES, {"stream": ids, "after": after}, pieces
    for token in _tokens(tokenizer):
        yield _DECODES, {"decode": [token]}, tokenizer.decode([token])


def _source_cases(folder: Path) -> Iterator[Case]:
    """Yield texts of sources, if these have a tokenizer of their own, with and without codes."""
    file = folder / SOURCE_TOKENIZER_FILE
    if not file.exists():
        return
    tokenizer = Tokenizer(folder, bos_token_id=None, file=file.name)
    added = json.loads(file.read_text(encoding="utf-8"))["added_tokens"]
    codes = [token["content"] for token in added if not token["special"]]
    for text in (*_texts(tokenizer), *(f" {code}a {code} b{code}" for code in codes)):
        yield _ENCODES, {"source": text}, tokenizer.encode(text)


def _texts(tokenizer: Tokenizer) -> Iterator[str]:
    yield from PLAIN_TEXTS
    yield TEXT_FILE.read_text(encoding="utf-8")
    for token in _tokens(tokenizer):
        yield tokenizer.decode([token])
    for token in sorted(tokenizer.special_token_ids):
        piece = tokenizer.piece(token)
        yield f"a{piece}b {piece} {piece}{piece}\n{piece}"


def _tokens(tokenizer: Tokenizer) -> range:
    return range(0, tokenizer.vocab_size, tokenizer.vocab_size // _NUM_TOKENS + 1)


def _chat_cases(folder: Path) -> Iterator[Case]:
    try:
        template = ChatTemplate.from_folder(folder)
    except BundleError:  # without one
        return
    for messages, tools in CHATS:
        parts = [part for each in messages for part in each.get("content") or ()]
        if any(isinstance(part, MediaPart) for part in parts):
            continue
        for prompt in (True, False):
            try:
                text = template.render(
                    messages, add_generation_prompt=prompt, variables={"tools": tools}
                )
            except (BundleError, InputError):
                continue
            variables = {"tools": tools, "add_generation_prompt": prompt}
            yield _RENDERS, {"chat": messages, "variables": variables}, text


def _answers(command: list[str], requests: list[dict[str, Any]]) -> list[Any]:
    """Return the command's answers, for each request the same error if it does not run."""
    lines = "".join(f"{json.dumps(request)}\n" for request in requests)
    try:
        done = subprocess.run(
            command, input=lines, capture_output=True, text=True, timeout=_LONGEST_S, check=True
        )
        answers = [json.loads(line) for line in done.stdout.splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return [{"error": " ".join(said.split())}] * len(requests)
    if len(answers) != len(requests):
        return [{"error": f"{len(answers)} answers to {len(requests)} requests"}] * len(requests)
    return answers


def _difference(request: dict[str, Any], answer: Any, wanted: Any) -> str:
    if isinstance(answer, dict) and "error" in answer:
        return str(answer["error"])[:500]
    said, asked, right = (json.dumps(each)[:150] for each in (answer, request, wanted))
    return f"{asked} gives {said}, in Python {right}"
