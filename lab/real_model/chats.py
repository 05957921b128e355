"""Questions for distilling a draft, sampled from the model itself.

A chat model that gets the beginning of a user's turn continues it with a question, like those it
was trained on (Magpie, arXiv 2406.08464). So no texts of chats are needed, which no registry has.
Questions from filled-in templates were tried first, but the draft learnt the templates: it agreed
with 0.73 of the greedy tokens there, and with only 0.14 to 0.42 in free answers.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsbd_runtime.text.chat_template import ChatTemplate

SAMPLED = {"strategy": "sample", "temperature": 1.0, "top_p": 0.95, "max_new_tokens": 80}
_MARK = "QUESTION"
_SHORTEST, _LONGEST = 8, 400  # characters


def write_prompts(file: Path, template: ChatTemplate, count: int, seed: int = 0) -> None:
    """Write ``count`` lines for ``dsbd-run --input``, each with another seed."""
    turn = template.render([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    begin = turn[: turn.index(_MARK)]
    lines = ({"prompt": begin, "seed": seed + number, **SAMPLED} for number in range(count))
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def write_chats(answers: Path, file: Path) -> int:
    """Write the questions in the answers of a batch as chats, one per line; return their number."""
    questions = list(_distinct(_questions(answers.read_text(encoding="utf-8").splitlines())))
    chats = ({"messages": [{"role": "user", "content": question}]} for question in questions)
    file.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats), encoding="utf-8")
    return len(questions)


def _questions(lines: Iterable[str]) -> Iterator[str]:
    """Yield the texts that ended with an end token and have the length of usual questions."""
    for line in lines:
        best = json.loads(line)["sequences"][0]
        text = best["text"].strip()
        if best["finish_reason"] == "eos" and _SHORTEST <= len(text) <= _LONGEST:
            yield text


def _distinct(texts: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for text in texts:
        if text.casefold() not in seen:
            seen.add(text.casefold())
            yield text
