"""Comparison on JSON schemas: documents written with one beam and with four beams."""

import json
from typing import Any

from tokenizers import Tokenizer

from lab.constraints.grammars import SCHEMAS as LARGE_SCHEMAS
from lab.peers.catalog import OURS, PRECISIONS, TOP_K, TORCH, WIDTH, Peer, PeerRun, peer_of
from lab.peers.rounds import Prompt

PROMPT = "def settings():\n    return "
_KEYS = ("identifier", "display_name", "description", "enabled", "retries", "timeout_seconds")
_VALUES: tuple[dict[str, Any], ...] = (
    {"type": "integer", "minimum": 0, "maximum": 9999},
    {"type": "string", "maxLength": 10},
    {"type": "boolean"},
    {"enum": ["low", "medium", "high"]},
)


def schema_of(number: int) -> dict[str, Any]:
    """Return schema ``number`` of many usual ones: an object with some required properties."""
    names = [_KEYS[(number + i) % len(_KEYS)] for i in range(3 + number % 3)]
    properties = {name: _VALUES[(number + i) % len(_VALUES)] for i, name in enumerate(names)}
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


_LINES: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "item": {"enum": ["paper", "pencil", "eraser"]},
            "count": {"type": "integer", "minimum": 1, "maximum": 99},
        },
        "required": ["item", "count"],
        "additionalProperties": False,
    },
    "minItems": 2,
    "maxItems": 4,
}
_CALL, _ = LARGE_SCHEMAS["a tool's call, with a pattern"]
SCHEMAS: tuple[dict[str, Any], ...] = (
    schema_of(0),
    _CALL,
    _LINES,
    schema_of(1),
    schema_of(2),
    schema_of(3),
    schema_of(4),
    schema_of(5),
)
WARM_UP_SCHEMA = {"type": "object", "properties": {"ready": {"type": "boolean"}}}

SAMPLE, SPECULATIVE = "sample", "speculative"
BEAM_SAMPLE, DSBD = "beam-sample W=4", "dsbd W=4"
BEAM_SEARCH, SPECULATIVE_SEARCH = "beam-search W=4", "speculative-beam-search W=4"


# Documents on one line, because a small model may not end others; dsbd-ort always writes them so.
# OpenVINO's grammars ignore this key.
ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


def schema_prompts(tokenizer: Tokenizer, num_prompts: int) -> list[Prompt]:
    """Return the first ``num_prompts`` schemas, all with the same prompt."""
    token_ids = tokenizer.encode(PROMPT).ids
    return [
        Prompt(token_ids=token_ids, json_schema=_text(schema)) for schema in SCHEMAS[:num_prompts]
    ]


def schema_warm_up(tokenizer: Tokenizer) -> Prompt:
    """Return a request with a schema that is not one of ``SCHEMAS``."""
    token_ids = tokenizer.encode(PROMPT).ids
    return Prompt(token_ids=token_ids, json_schema=_text(WARM_UP_SCHEMA))


def _text(schema: dict[str, Any]) -> str:
    return json.dumps(schema | {"x-guidance": ON_ONE_LINE})


def _ours(precision: str) -> tuple[PeerRun, ...]:
    """Return our runs."""
    beams, sampled = {"num_beams": WIDTH}, {"top_k": TOP_K}
    planned = {"draft_policy": "throughput"}
    rows = (  # (name, task, same tokens as, options)
        (SAMPLE, "json-sampling", None, {"strategy": "sample", **sampled}),
        (SPECULATIVE, "json-sampling", SAMPLE, {"strategy": "speculative", **sampled, **planned}),
        (BEAM_SAMPLE, "json-sampling", None, {"strategy": "beam-sample", **beams, **sampled}),
        (DSBD, "json-sampling", BEAM_SAMPLE, {"strategy": "dsbd", **beams, **sampled, **planned}),
        (BEAM_SEARCH, "json-beam-search", None, {"strategy": "beam-search", **beams}),
        (
            SPECULATIVE_SEARCH,
            "json-beam-search",
            BEAM_SEARCH,
            {"strategy": "speculative-beam-search", **beams, **planned},
        ),
    )
    return tuple(
        PeerRun(name=name, precision=precision, task=task, options=options, same_tokens_as=same)
        for name, task, same, options in rows
    )


def _theirs(precision: str) -> tuple[PeerRun, ...]:
    """Return the runs of another tool: with one beam and with four beams."""
    return (
        PeerRun(
            name="sampling",
            precision=precision,
            task="json-sampling",
            options={"top_k": TOP_K},
            counterpart=SPECULATIVE,
        ),
        PeerRun(
            name="beam search W=4",
            precision=precision,
            task="json-beam-search",
            options={"num_beams": WIDTH},
            counterpart=SPECULATIVE_SEARCH,
            same_tokens_as=BEAM_SEARCH,
        ),
    )


def _unable(precision: str, reason: str) -> PeerRun:
    return PeerRun(name="a JSON schema", precision=precision, task="", unable=reason)


SCHEMA_PEERS = (
    peer_of(OURS, tuple(run for precision in PRECISIONS for run in _ours(precision))),
    Peer(
        name="transformers with llguidance",
        runner="run_transformers",
        source="checkpoints",
        installs=((TORCH,), ("transformers==5.23.0", "llguidance==1.9.1", TORCH)),
        runs=_theirs("fp32"),
    ),
    peer_of(
        "onnxruntime-genai", tuple(run for precision in PRECISIONS for run in _theirs(precision))
    ),
    peer_of("openvino-genai", tuple(run for precision in PRECISIONS for run in _theirs(precision))),
    peer_of(
        "ctranslate2", (_unable("fp32", "not run: it takes no schema, grammar or mask of tokens"),)
    ),
    Peer(
        name="llama-cpp-python",
        runner="",
        source="conversion",
        runs=(
            _unable(
                "fp32",
                "not run: 0.3.36 has no wheel for Linux, only source, and no converter of "
                "checkpoints; it has no beams",
            ),
        ),
    ),
)
