"""Questions for distilling a draft, sampled from the model itself.

A chat model that is given the beginning of a user's turn goes on with a question, of the kind that
it was trained on (Magpie, arXiv 2406.08464). So no texts of chats are needed, which no registry
has; and forms filled with things, which were tried first, teach a draft the forms: it agreed with
0.73 of the greedy tokens there and with 0.14 to 0.42 of those of free answers.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsbd_runtime.text.chat_template import ChatTemplate

SAMPLED = {"strategy": "sample", "temperature": 1.0, "top_p": 0.95, "max_new_tokens": 80}
_MARK = "QUESTION"
_SHORTEST, _LONGEST = 8, 400  # characters


def write_prompts(file: Path, template: ChatTemplate, count: int, seed: int = 0) -> None:
    """Write so many lines for ``dsbd-run --input``, each with a seed of its own."""
    turn = template.render([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    begin = turn[: turn.index(_MARK)]
    lines = ({"prompt": begin, "seed": seed + number, **SAMPLED} for number in range(count))
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def write_chats(answers: Path, file: Path) -> int:
    """Write the questions in the answers of a batch as chats, a line each; return how many."""
    found = list(_distinct(_questions(answers.read_text(encoding="utf-8").splitlines())))
    chats = ({"messages": [{"role": "user", "content": question}]} for question in found)
    file.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats), encoding="utf-8")
    return len(found)


def _questions(lines: Iterable[str]) -> Iterator[str]:
    """Yield the texts that ended by themselves, of a length that people write."""
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
