"""Ids that llama.cpp gives texts by tokenizers of GGUF files: llama_cpp_ids.json, and its maker.

``python -m tests.export.llama_cpp_ids`` writes the file again, with llama.cpp in an environment of
its own. A row is all names of pre-tokenizers, or one case of another kind, with the same ids.
"""

import json
import tempfile
from collections import defaultdict
from pathlib import Path

from dsbd_export.tokenizers.gguf_words import PRE_TOKENIZERS
from tests.export.gguf_vocabularies import (
    ACCENTED,
    BEGIN,
    DEEPSEEK,
    END,
    TEXTS,
    THINK,
    Vocabulary,
    byte_level,
    of_characters,
    with_characters,
    write_vocabulary,
)

TABLE = Path(__file__).with_suffix(".json")
JUDGED = (
    *TEXTS,
    "",
    " ",
    f"{DEEPSEEK}Hi {THINK}\n{ACCENTED}{ACCENTED} {BEGIN} a  b{END}",
    "1 \u2603",
)
NAMES = [name for name, row in PRE_TOKENIZERS.items() if row.spells_bytes]
CASES: dict[str, Vocabulary] = {
    "sentencepiece": of_characters(),
    "sentencepiece without a space": of_characters(
        add_space_prefix=False, add_bos_token=False, add_eos_token=True
    ),
    "gemma4": with_characters(),
    "a name that is not there": byte_level(),
    "Llama 3 that says no": byte_level(pre="llama-bpe", add_bos_token=False),
}


def vocabulary_of(case: str) -> Vocabulary:
    return CASES[case] if case in CASES else byte_level(pre=case)


def table() -> dict[str, list[list[int]]]:
    """Return the ids of ``JUDGED`` by case."""
    rows = json.loads(TABLE.read_text())
    return {case: row["ids"] for row in rows for case in row["cases"]}


def made_table() -> dict[str, list[list[int]]]:
    """Return the same, by llama.cpp."""
    from tests.clients.environments import llama_cpp_ids

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        return {
            case: llama_cpp_ids(
                write_vocabulary(place / "m.gguf", vocabulary_of(case)), list(JUDGED), place
            )
            for case in (*NAMES, *CASES)
        }


if __name__ == "__main__":
    cases_by_ids = defaultdict(list)
    for case, ids in made_table().items():
        cases_by_ids[json.dumps(ids)].append(case)
    rows = [
        f'{{"cases": {json.dumps(cases)},\n "ids": {ids}}}' for ids, cases in cases_by_ids.items()
    ]
    TABLE.write_text("[" + ",\n".join(rows) + "]\n")
