"""Comparison on a chat model: our bundles in several precisions and other tools, on chats."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dsbd_runtime.text.chat_template import ChatTemplate
from lab.peers.catalog import OURS, Peer, PeerRun, peer_of
from lab.peers.comparison import Comparison
from lab.peers.rounds import Prompt
from lab.peers.summary import Bar

SECTION = "real model, speed"
PRECISIONS = ("fp32", "int8", "int8-dynamic", "int4")
LLAMA_CPP_PRECISIONS = ("Q4_1", "Q8_0")
OTHER_PRECISIONS: dict[str, tuple[str, ...]] = {
    "transformers": ("fp32",),
    "openvino-genai": ("fp32", "int8"),
    "onnxruntime-genai": ("fp32", "int8"),
}
LLAMA_CPP_INSTALLS = (("xllamacpp==2026.10.11549",),)
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
_PLANNED = {"draft_policy": "throughput"}

GREEDY, GREEDY_DRAFTED = "greedy", "greedy, drafted"
SAMPLE, SPECULATIVE = "sample", "speculative"
SEARCH, SEARCH_DRAFTED = "beam-search W=4", "speculative-beam-search W=4"
QUESTIONS = (
    "What is the difference between weather and climate?",
    "Write a Python function that returns the second largest number in a list.",
    "Write a short email that thanks a friend for a present.",
    "Explain how a bicycle stays upright.",
    "Give me three ideas for a healthy breakfast.",
    "Tell me a short story about a fox and a river.",
    "What are the planets of the solar system?",
    "How do I ask for a day off?",
)


def _ours(precision: str) -> tuple[PeerRun, ...]:
    """Return our runs."""
    rows: list[tuple[str, str | None, dict[str, Any]]] = [  # (name, run without draft, options)
        (GREEDY, None, {"strategy": "greedy"}),
        (GREEDY_DRAFTED, GREEDY, {"strategy": "speculative-beam-search", "num_beams": 1}),
        (SAMPLE, None, {"strategy": "sample", **SAMPLED}),
        (SPECULATIVE, SAMPLE, {"strategy": "speculative", **SAMPLED}),
    ]
    for width in (2, 4):
        beams = {"num_beams": width, **SAMPLED}
        rows.append((f"beam-sample W={width}", None, {"strategy": "beam-sample", **beams}))
        rows.append((f"dsbd W={width}", f"beam-sample W={width}", {"strategy": "dsbd", **beams}))
    rows.append((SEARCH, None, {"strategy": "beam-search", "num_beams": 4}))
    drafted = {"strategy": "speculative-beam-search", "num_beams": 4}
    rows.append((SEARCH_DRAFTED, SEARCH, drafted))
    return tuple(
        PeerRun(
            name=name,
            precision=precision,
            task="ours",
            options=options if plain is None else options | _PLANNED,
            undrafted=plain,
            same_tokens_as=plain,
        )
        for name, plain, options in rows
    )


def _llama_cpp(precision: str) -> tuple[PeerRun, ...]:
    """Return the runs of llama.cpp."""
    rows = (  # (name, task, its own run without a draft)
        (GREEDY, "greedy", None),
        (GREEDY_DRAFTED, "greedy-assisted", GREEDY),
        ("sampling", "sampling", None),
        ("sampling, drafted", "assisted", "sampling"),
    )
    return tuple(
        PeerRun(
            name=name,
            precision=precision,
            task=task,
            options={} if task.startswith("greedy") else SAMPLED,
            undrafted=plain,
        )
        for name, task, plain in rows
    )


def _others(precisions_by_tool: Mapping[str, Sequence[str]]) -> tuple[Peer, ...]:
    """Return the tools of the other comparisons with runs for chats."""
    search = {"num_beams": 4}
    rows = (
        (GREEDY, "beam-search", {"num_beams": 1}, GREEDY_DRAFTED),
        ("sampling", "sampling", SAMPLED, SPECULATIVE),
        ("sampling, drafted", "assisted", SAMPLED, SPECULATIVE),
        ("beam search W=4", "beam-search", search, SEARCH_DRAFTED),
    )
    return tuple(
        peer_of(
            tool,
            tuple(
                PeerRun(
                    name=name,
                    precision=precision,
                    task=task,
                    options=options,
                    counterpart=ours,
                    same_tokens_as={GREEDY: GREEDY, "beam search W=4": SEARCH}.get(name),
                )
                for precision in precisions
                for name, task, options, ours in rows
            ),
        )
        for tool, precisions in precisions_by_tool.items()
    )


def comparison_of(
    checkpoint: Path,
    precisions: Sequence[str],
    llama_cpp_precisions: Sequence[str] = LLAMA_CPP_PRECISIONS,
    other_precisions: Mapping[str, Sequence[str]] = OTHER_PRECISIONS,
    questions: Sequence[str] = QUESTIONS,
) -> Comparison:
    """Return the comparison of our bundles and of all tools, each in its precisions.

    checkpoint: has the chat template for the prompts.
    """
    ours = Peer(
        name=OURS,
        runner="run_dsbd_ort",
        source="bundle",
        runs=tuple(run for precision in precisions for run in _ours(precision)),
    )
    llama_cpp = Peer(
        name="llama.cpp",
        runner="run_llama_cpp",
        source="bundle",
        installs=LLAMA_CPP_INSTALLS,
        runs=tuple(run for precision in llama_cpp_precisions for run in _llama_cpp(precision)),
    )
    return Comparison(
        name="real-model",
        section=SECTION,
        peers=(ours, llama_cpp, *_others(other_precisions)),
        prompts=chat_prompts(checkpoint, questions),
        warm_up=lambda tokenizer: chat_prompts(checkpoint, ("Hello",))(tokenizer, 1)[0],
        columns=(
            *("tool", "version", "precision", "what it did", "tokens/s", "tokens/iteration"),
            *("times as fast as its own without", "ours / theirs", "mean log-probability"),
            *("peak memory, MB", "same tokens"),
        ),
        note="Prompts of chats, greedily and at temperature 0.7 with top-p 0.9. No end token: "
        "every sequence has the full length.",
        bars=tuple(
            Bar(
                ours=ours,
                peer="llama.cpp",
                run=GREEDY,
                precision=theirs,
                aim=aim,
                ours_precision="int8",
            )
            for theirs in llama_cpp_precisions
            for ours, aim in ((GREEDY_DRAFTED, 1.3), (SEARCH_DRAFTED, 1.0), ("dsbd W=4", 1.0))
        ),
        max_new_tokens=64,
        logits="full",
        subject="{params}",
    )


def chat_prompts(
    checkpoint: Path, questions: Sequence[str]
) -> Callable[[Tokenizer, int], list[Prompt]]:
    """Return the function for ``Comparison.prompts`` that turns questions into prompts."""
    template = ChatTemplate.from_folder(checkpoint)

    def prompts(tokenizer: Tokenizer, count: int) -> list[Prompt]:
        texts = (template.render([{"role": "user", "content": q}]) for q in questions[:count])
        return [
            Prompt(token_ids=tokenizer.encode(text, add_special_tokens=False).ids) for text in texts
        ]

    return prompts
