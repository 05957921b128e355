"""Recipes: the prompts that ask a kind of speech language model to transcribe, and its answers.

To add a kind, add a row to ``RECIPES``; the manifest's entry of a sound names the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsbd_ort.speech.languages import LANGUAGE_NAMES
from dsbd_ort.speech.transcript import TASKS
from dsbd_runtime.text.chat_messages import Message
from dsbd_runtime.text.tokenizer import Tokenizer

_MARK = "<asr_text>"  # follows the language in an answer
_BEGIN = "language "
_NO_LANGUAGE = "None"  # the language of silence


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request to transcribe: ``text`` is ``initial_prompt``, ``words`` are the hot words."""

    task: str = TASKS[0]
    text: str = ""
    words: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A user's turn: the sound and an instruction. ``initial_prompt`` replaces the instruction.

    Attributes:
        instruction: instruction to transcribe.
        instruction_with_words: instruction that the hot words follow; None: the prompt has no place
            for them, and a gain favours them.
        instruction_to_translate: instruction to translate into English; None: the model cannot.
        languages: languages that a prompt can name: names by codes.
    """

    instruction: str = ""
    instruction_with_words: str | None = None
    instruction_to_translate: str | None = None
    languages: Mapping[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> tuple[str, ...]:
        return TASKS[:1] if self.instruction_to_translate is None else TASKS

    @property
    def reads_words(self) -> bool:
        return self.instruction_with_words is not None

    def messages(self, sound: Message, asked: Asked) -> list[Message]:
        """Return the conversation; the next turn is the model's answer."""
        text, words = self.instruction, asked.words if self.reads_words else ()
        if asked.task != TASKS[0]:
            text = self.instruction_to_translate or ""
        elif words:
            text = self.instruction_with_words or ""
        text = asked.text or text
        text += f" Keywords: {', '.join(words)}" if words else ""
        return [{"role": "user", "content": [sound, {"type": "text", "text": text}]}]

    def begun(self, language: str | None) -> str:
        """Return the beginning of the answer if the language with this code is requested."""
        return ""

    def said(
        self, token_ids: Sequence[int], tokenizer: Tokenizer, language: str | None
    ) -> tuple[str | None, str]:
        """Return the language of an answer, if known, and its text.

        The language is a code, or a name if it has no code here. ``language``: the requested code.
        """
        return language, tokenizer.decode(token_ids).strip()


@dataclass(frozen=True, kw_only=True)
class SystemRecipe(Recipe):
    """Recipe of Qwen3-ASR: text and words are the system message, the sound is the user message.

    The answer is the language, a mark, and the text.
    """

    def messages(self, sound: Message, asked: Asked) -> list[Message]:
        """See Recipe."""
        text = "\n".join(each for each in (asked.text, ", ".join(asked.words)) if each)
        system: list[Message] = [{"role": "system", "content": text}] if text else []
        return [*system, {"role": "user", "content": [sound]}]

    def begun(self, language: str | None) -> str:
        """See Recipe."""
        return "" if language is None else f"{_BEGIN}{self.languages[language]}{_MARK}"

    def said(
        self, token_ids: Sequence[int], tokenizer: Tokenizer, language: str | None
    ) -> tuple[str | None, str]:
        """See Recipe."""
        if language is not None:
            return super().said(token_ids, tokenizer, language)
        # The mark may be a special token, which decoding drops.
        mark = tokenizer.encode(_MARK, add_special_tokens=False)
        if len(mark) == 1 and mark[0] in token_ids:
            at = list(token_ids).index(mark[0])
            before, text = (tokenizer.decode(ids) for ids in (token_ids[:at], token_ids[at + 1 :]))
        else:
            before, mark_text, text = tokenizer.decode(token_ids).partition(_MARK)
            if not mark_text:
                return None, before.strip()
        name = before.strip().removeprefix(_BEGIN).strip()
        codes = {name: code for code, name in self.languages.items()}
        return None if name == _NO_LANGUAGE else codes.get(name, name or None), text.strip()


_GRANITE = "can you transcribe the speech into a written format?"
_GRANITE_WITH_WORDS = "transcribe the speech to text."
RECIPES: dict[str, Recipe] = {
    "glmasr": Recipe(instruction="Please transcribe this audio into text"),
    "granite_speech": Recipe(
        instruction=_GRANITE,
        instruction_with_words=_GRANITE_WITH_WORDS,
        instruction_to_translate=(
            "translate the speech to English with proper punctuation and capitalization."
        ),
    ),
    "granite_speech_plus": Recipe(
        instruction=f" {_GRANITE}", instruction_with_words=f" {_GRANITE_WITH_WORDS}"
    ),
    "qwen2_audio": Recipe(instruction="Transcribe the speech into text."),
    "qwen3_asr": SystemRecipe(
        instruction_with_words="",
        languages={
            **{
                code: LANGUAGE_NAMES[code].title()
                for code in (
                    *("ar", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr", "hi", "hu"),
                    *("id", "it", "ja", "ko", "mk", "ms", "nl", "pl", "pt", "ro", "ru", "sv"),
                    *("th", "tr", "vi", "yue", "zh"),
                )
            },
            "fil": "Filipino",
        },
    ),
}
