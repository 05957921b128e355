"""Gate of the tokenizer: the files of a bundle must give the same results as transformers.

The gate compares ids and decoded texts of plain texts, single tokens and added tokens, with and
without the tokens around a prompt, and rendered chats. transformers itself may be wrong: if the
tokenizer's class does not fit its files, texts of the tokenizer's own tokens are lost.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dsbd_errors import DsbdError
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.tokenizers.older_tokenizers import (
    is_built,
    is_marian,
    sentencepiece_file,
    sentencepiece_ids,
)
from dsbd_runtime.bundle_files.bundle import CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from dsbd_runtime.text.chat_messages import MediaPart, Message
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.tokenizer import Tokenizer

PLAIN_TEXTS = (
    "",
    " ",
    "Hello, world! It's 3.14159 and I've 2,000 of them; don't ask.",
    "  two spaces,\ttabs\n\n    def read(path):\r\n        return [path]  # ok\n",
    "naïve café, Straße, e\u0301 a\u0308\u0323, ﬁne \u00a0\u200d\ufeff",
    "日本語のテキスト、한국어 문장, ไทย, русский текст",
    "שלום עולם مرحبا بالعالم \u200f!",
    "😀👩‍👩‍👧🏳️‍🌈 🇩🇪 ok ☃",
    "<s> </s> <unk> <pad> [CLS] <|endoftext|> <0x41> ▁ ## Ġ",
)
ENGLISH = PLAIN_TEXTS[2]
_NUM_OWN_TEXTS = 256
_MOST_LOST, _MOST_LOST_OF_BUILT = 0.5, 0.1  # share of these texts
_WITH_SPECIAL_TOKENS = PLAIN_TEXTS[-1]
_QUESTION: Message = {"role": "user", "content": "  What is the weather in Paris? "}
_ARGUMENTS = {"town": "Paris"}
_FUNCTION: Message = {"name": "weather", "arguments": _ARGUMENTS}
_FUNCTION_IN_TEXT: Message = {"name": "weather", "arguments": json.dumps(_ARGUMENTS)}
_CALL: Message = {"type": "function", "id": "call00001", "function": _FUNCTION}
_TURNS: tuple[Message, ...] = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi! How can I help?"},
    _QUESTION,
)
_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "Its name"}},
            "required": ["town"],
        },
    },
}
_SYSTEM: Message = {"role": "system", "content": "You answer briefly."}
_QUESTION_ALONE = (_QUESTION,)
_SOUND_ALONE: tuple[Message, ...] = ({"role": "user", "content": [MediaPart(type="audio")]},)
CHATS: tuple[tuple[tuple[Message, ...], list[Message] | None], ...] = (  # (messages, tools)
    (_QUESTION_ALONE, None),
    (_SOUND_ALONE, None),
    ((_SYSTEM, *_SOUND_ALONE), None),
    (_TURNS, None),
    ((_SYSTEM, *_TURNS), None),
    (_QUESTION_ALONE, [_TOOL]),
    (
        (
            _SYSTEM,
            _QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "name": "weather", "content": "rain", "tool_call_id": "call00001"},
        ),
        [_TOOL],
    ),
)


class TokenizerGate:
    """Comparison of a tokenizer with its written files."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint, folder: Path
    ) -> None:
        self._theirs = tokenizer
        self._ours = Tokenizer(folder, bos_token_id=checkpoint.bos_token_id)
        self._folder = folder
        self._source = checkpoint.folder
        has_file = checkpoint.gguf_file is not None or not is_built(checkpoint.folder)
        # Marian's tokenizer is compared separately.
        self._is_built = not has_file and not is_marian(checkpoint.folder)
        self._whose = (
            f"the tokenizer of the {checkpoint.role} at {checkpoint.folder} "
            f"({type(tokenizer).__name__})"
        )

    def check_ids(self) -> None:
        """Raise ExportError unless ids and texts are the same."""
        for text in self._texts():
            for special in (True, False):
                ids = self._check_ids(text, special)
                decoded = self._theirs.decode(ids, skip_special_tokens=True)
                self._compare(f"writes {ids} as", self._ours.decode(ids), decoded)
        self._check_own_texts()
        if self._is_built and (file := sentencepiece_file(self._source)) is not None:
            self._check_by_sentencepiece(file)

    def check_chats(self, templates: Mapping[str, str]) -> None:
        """Raise ExportError unless templates, by file name, give the same texts and ids."""
        for name, source in templates.items():
            template = ChatTemplate(source, self._theirs.special_tokens_map)
            for messages, tools in CHATS:
                self._check_chat(name, source, template, messages, tools)
        if CHAT_TEMPLATE_FILE in templates:  # with the special tokens that are written
            template = ChatTemplate.from_folder(self._folder)
            source = templates[CHAT_TEMPLATE_FILE]
            self._check_chat(CHAT_TEMPLATE_FILE, source, template, _QUESTION_ALONE, None)

    def _texts(self) -> Iterator[str]:
        yield from PLAIN_TEXTS
        added = self._theirs.get_added_vocab()
        for token in {**added, **dict.fromkeys(self._theirs.all_special_tokens)}:
            yield token
            yield f"a{token}b {token} {token}{token}\n{token}"

    def _check_own_texts(self) -> None:
        """Raise ExportError unless most texts of single tokens survive encoding and decoding."""
        token_texts = self._own_texts() or [(None, ENGLISH)]
        read = [self._check_ids(text, special=False) for _, text in token_texts]
        lost = [
            (token, text, ids, decoded)
            for (token, text), ids in zip(token_texts, read, strict=True)
            if _letters(decoded := self._ours.decode(ids)) != _letters(text)
        ]
        if len(lost) > len(token_texts) * (_MOST_LOST_OF_BUILT if self._is_built else _MOST_LOST):
            token, text, ids, decoded = lost[0]
            whose = "" if token is None else f", the text of its token {token},"
            raise ExportError(
                f"{self._whose} reads {text!r}{whose} as {ids[:20]}, which is {decoded!r}, and "
                f"loses {len(lost)} of {len(token_texts)} such texts: its class and its files do "
                f"not fit each other; set tokenizer_class in {TOKENIZER_CONFIG_FILE} to that of "
                "its base model, or copy that model's tokenizer.json"
            )

    def _own_texts(self) -> list[tuple[int | None, str]]:
        """Return tokens spread over the vocabulary, each with its text.

        Special tokens, parts of a character and later parts of words (``##ing``) are left out.
        """
        by_token, added = self._theirs.get_vocab(), self._theirs.get_added_vocab()
        model = self._theirs.backend_tokenizer.model
        later = getattr(model, "continuing_subword_prefix", None) or "\0"
        plain = sorted(
            index
            for token, index in by_token.items()
            if token not in added and not token.startswith(later)
        )
        if not plain and not self._is_built:
            plain = sorted(added.values())
        texts = ((index, self._ours.decode([index])) for index in plain)
        token_texts = [(i, text) for i, text in texts if _letters(text) and "\ufffd" not in text]
        return token_texts[:: len(token_texts) // _NUM_OWN_TEXTS + 1]

    def _check_by_sentencepiece(self, file: Path) -> None:
        """Raise ExportError unless plain texts have the same ids in sentencepiece."""
        texts = (text for text in PLAIN_TEXTS if text != _WITH_SPECIAL_TOKENS)
        for text, wanted in sentencepiece_ids(file, texts):
            ids = self._ours.encode(text, add_special_tokens=False)
            if ids != wanted:
                raise ExportError(
                    f"{self._whose} cannot be exported: built from {file} it reads {text!r} as "
                    f"{_around(ids, wanted)}, sentencepiece as {_around(wanted, ids)}; give a "
                    "converted copy of the model, with tokenizer.json"
                )

    def _check_ids(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text, with or without the tokens around a prompt."""
        try:
            wanted: list[int] = self._theirs.encode(text, add_special_tokens=special)
        except Exception as error:
            raise ExportError(
                f"{self._whose} refuses the text {text!r} in transformers: {reason_of(error)}; "
                "copy the tokenizer of its base model"
            ) from error
        ids = self._ours.encode(text, add_special_tokens=special)
        self._compare(f"reads {text!r} as", ids, wanted)
        return wanted

    def _check_chat(
        self,
        name: str,
        source: str,
        template: ChatTemplate,
        messages: tuple[Message, ...],
        tools: list[Message] | None,
    ) -> None:
        """Compare one conversation, with and without the beginning of an answer at its end.

        The runtime may refuse more conversations than transformers. But with the default template
        it must accept a plain question, or a sound if the template has no place for a question.
        Some templates expect the arguments of a call as an object, others as JSON; it is enough if
        one of the two agrees.
        """
        for prompt in (True, False):
            forms = (messages, _with_arguments_as_text(messages))
            rendered = [self._rendered(source, form, tools, prompt) for form in forms]
            wanted = [text for text in rendered if text is not None]
            if not wanted:
                continue
            try:
                variables = {"tools": tools}
                text = template.render(messages, add_generation_prompt=prompt, variables=variables)
            except DsbdError as error:
                if (name, messages, tools) != (CHAT_TEMPLATE_FILE, _QUESTION_ALONE, None):
                    continue
                with contextlib.suppress(DsbdError):
                    template.render(_SOUND_ALONE)
                    continue
                raise ExportError(
                    f"{self._whose} cannot be exported: transformers renders a question with "
                    f"{name}, which is refused here: {error}; fix the template"
                ) from error
            if text not in wanted:
                self._compare(f"renders a chat with {name} as", text, wanted[0])
            self._check_ids(text, special=False)

    def _rendered(
        self, source: str, messages: Sequence[Message], tools: list[Message] | None, prompt: bool
    ) -> str | None:
        """Return the text of a conversation in transformers, None if the template refuses it."""
        try:
            text: str = self._theirs.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools,
                chat_template=source,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except Exception:  # a template may raise anything
            return None
        return text

    def _compare(self, what: str, ours: Any, theirs: Any) -> None:
        if ours != theirs:
            raise ExportError(
                f"{self._whose} cannot be exported: by its files it {what} "
                f"{_around(ours, theirs)}, in transformers as {_around(theirs, ours)}; use one "
                "with complete files, such as that of its base model"
            )


def _with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    return [
        {**message, "tool_calls": [{**_CALL, "function": _FUNCTION_IN_TEXT}]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def reads_little(text: str, decoded: str) -> bool:
    """Return whether less than half of a text survives encoding and decoding."""
    return 2 * len(_letters(decoded)) < len(_letters(text))


def _letters(text: str) -> str:
    """Return a text without spaces and capitals, which a tokenizer may change."""
    return "".join(text.lower().split())


def _around(value: Any, other: Any) -> str:
    """Return the part of a value around its first difference from another."""
    pairs = zip(value, other, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(value), len(other)))
    begin = max(0, first - 10)
    return f"{'...' if begin else ''}{value[begin : first + 20]!r}"
