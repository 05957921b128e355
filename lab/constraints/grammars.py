"""Times of JSON schemas over a large vocabulary, along documents that follow them."""

import json
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from dsbd_ort.constraints import GrammarTokenizer, JsonSchema
from dsbd_ort.decoding.logits_processing.constraint import Constraint

EOS = "<|end|>"
NUM_STATES = 4
_TEXT_BYTES = 80_000_000

WORDS = ("amber", "birch", "cedar", "dune", "ember", "fjord", "größe", "harbour", "名前", "ivy")
_TEXT = {"type": "string"}
_RECORD = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "name": _TEXT, "tags": {"enum": list(WORDS)}},
    "required": ["id", "name", "tags"],
    "additionalProperties": False,
}
_CALL = {
    "type": "object",
    "properties": {
        "tool": {"enum": ["search", "open", "reply"]},
        "arguments": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "maxLength": 60},
                "limit": {"type": "integer", "minimum": 1, "maximum": 100},
                "when": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
            },
            "required": ["query", "limit", "when"],
            "additionalProperties": False,
        },
    },
    "required": ["tool", "arguments"],
    "additionalProperties": False,
}
_OPTIONAL = {
    "type": "object",
    "properties": {f"field_{number}": _TEXT for number in range(40)},
    "additionalProperties": False,
}

Document = Callable[[np.random.Generator], Any]


def _name(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, 3))


def records(rng: np.random.Generator, num_records: int = 120) -> Any:
    """Return an array of records with some thousand tokens."""
    return [
        {"id": int(rng.integers(0, 10**6)), "name": _name(rng), "tags": str(rng.choice(WORDS))}
        for _ in range(num_records)
    ]


def call(rng: np.random.Generator) -> Any:
    """Return a tool call."""
    day = f"20{rng.integers(10, 99)}-{rng.integers(10, 13)}-{rng.integers(10, 29)}"
    arguments = {"query": _name(rng), "limit": int(rng.integers(1, 101)), "when": day}
    return {"tool": str(rng.choice(["search", "open", "reply"])), "arguments": arguments}


def options(rng: np.random.Generator) -> Any:
    """Return an object with some of many properties."""
    chosen = np.flatnonzero(rng.random(40) < 0.3)
    return {f"field_{number}": _name(rng) for number in chosen}


SCHEMAS: dict[str, tuple[dict[str, Any], Document]] = {
    "a tool's call, with a pattern": (_CALL, call),
    "40 optional properties": (_OPTIONAL, options),
    "array of records": ({"type": "array", "items": _RECORD}, records),
}


def large_tokenizer(vocab_size: int, file: Path) -> tokenizers.Tokenizer:
    """Return a byte-level BPE, read from ``file``, or trained on this machine's Python sources."""
    if not file.exists():
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(
            _texts(),
            trainers.BpeTrainer(
                vocab_size=vocab_size,
                special_tokens=[EOS],
                initial_alphabet=alphabet,
                show_progress=False,
            ),
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        made.save(str(file))
    return tokenizers.Tokenizer.from_file(str(file))


def _texts() -> Iterator[str]:
    num_bytes = 0
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for file in sorted(Path(folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8", errors="ignore")
            num_bytes += len(text)
            if num_bytes > _TEXT_BYTES:
                return
            yield text


@dataclass(frozen=True)
class GrammarTimes:
    """Times of one schema, in milliseconds.

    Attributes:
        compile_ms: time to compile it.
        step_ms: (num_steps,), time to advance four states by a token each and compute their masks.
        depths: (num_steps,), number of tokens before each step.
    """

    compile_ms: float
    step_ms: NDArray[np.float64]
    depths: NDArray[np.int64]

    def near(self, depth: int) -> NDArray[np.float64]:
        """Return the times of the 64 steps before a depth."""
        return self.step_ms[(self.depths >= depth - 64) & (self.depths < depth)]


def grammar_times(
    name: str, tokenizer: tokenizers.Tokenizer, grammars: GrammarTokenizer, num_rounds: int
) -> GrammarTimes:
    """Return the times of a schema, measured along documents that four beams follow."""
    schema, document = SCHEMAS[name]
    begin = time.perf_counter()
    constraint = JsonSchema(schema).bind(grammars)
    compile_ms = 1e3 * (time.perf_counter() - begin)
    rng = np.random.default_rng(0)
    steps: list[tuple[int, float]] = []
    for _ in range(num_rounds):
        text = json.dumps(document(rng), ensure_ascii=False, separators=(",", ":"))
        steps.extend(_walk(constraint, tokenizer.encode(text).ids, rng))
    depths, milliseconds = zip(*steps, strict=True)
    return GrammarTimes(compile_ms, np.array(milliseconds), np.array(depths))


def _walk(
    constraint: Constraint, tokens: list[int], rng: np.random.Generator
) -> Iterator[tuple[int, float]]:
    """Yield depth and milliseconds of each step of four beams with random parents."""
    states = constraint.start([]).repeat(NUM_STATES)
    for depth, token in enumerate(tokens):
        parents = rng.integers(0, NUM_STATES, NUM_STATES)
        begin = time.perf_counter()
        states = constraint.advance(states[parents], np.full(NUM_STATES, token))
        constraint.allowed(states)
        constraint.accepts(states)
        constraint.has_ended(states)
        yield depth, 1e3 * (time.perf_counter() - begin)
