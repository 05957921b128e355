"""Answers to the same questions side by side, by strategy, precision and tool."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsbd_ort import Pipeline
from lab.peers.runner_process import RunnerProcess
from lab.peers.runners.serve import Asked, Job
from lab.real_model.comparison import QUESTIONS, SAMPLED

NUM_QUESTIONS, NUM_TOKENS = 3, 48
_STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"strategy": "greedy"},
    "beam search, 4 beams": {"strategy": "speculative-beam-search", "num_beams": 4},
    "sampling, one beam": {"strategy": "speculative", "seed": 0, **SAMPLED},
    "dsbd, 4 beams": {"strategy": "dsbd", "num_beams": 4, "seed": 0, **SAMPLED},
}


def answers(bundle: Path, threads: int) -> dict[str, list[str]]:
    """Return by strategy the answers of a bundle with a draft to the first questions."""
    with Pipeline.from_bundle(bundle, num_threads=threads) as pipeline:
        prompts = [pipeline.chat_prompt([{"role": "user", "content": q}]) for q in _questions()]
        return {
            name: [
                pipeline.generate(prompt, max_new_tokens=NUM_TOKENS, **options).sequences[0].text
                for prompt in prompts
            ]
            for name, options in _STRATEGIES.items()
        }


def llama_cpp_answers(bundle: Path, python: Path, gguf: Path, threads: int) -> list[str]:
    """Return llama.cpp's greedy answers with the Q4_1 file; ``bundle`` has the chat template."""
    job = Job(
        target=str(gguf),
        draft=str(gguf),
        folder=str(gguf),
        precision="Q4_1",
        task="greedy",
        options={},
        num_threads=threads,
    )
    texts = []
    log = gguf / "answers.log"
    with (
        Pipeline.from_bundle(bundle, num_threads=threads) as pipeline,
        RunnerProcess(python, "run_llama_cpp", job, log) as process,
    ):
        process.open()
        for question in _questions():
            prompt = pipeline.chat_prompt([{"role": "user", "content": question}])
            asked = Asked(prompt_ids=prompt, max_new_tokens=NUM_TOKENS, seed=0)
            token_ids = process.generate(asked)["token_ids"]
            ends = pipeline.bundle.manifest.target.eos_token_ids
            end = next((i for i, token in enumerate(token_ids) if token in ends), len(token_ids))
            texts.append(pipeline.tokenizer.decode(token_ids[:end]))
    return texts


def _questions() -> tuple[str, ...]:
    return QUESTIONS[:NUM_QUESTIONS]


def side_by_side(by_bundle: dict[str, dict[str, list[str]]], theirs: list[str]) -> Iterator[str]:
    """Yield for every question the list of answers; equal answers share a line."""
    for index, question in enumerate(_questions()):
        rows = {
            f"{bundle}, {name}": texts[index]
            for bundle, by_strategy in by_bundle.items()
            for name, texts in by_strategy.items()
        }
        rows["llama.cpp Q4_1, greedy"] = theirs[index]
        names_of: dict[str, list[str]] = {}
        for name, text in rows.items():
            names_of.setdefault(" ".join(text.split()), []).append(name)
        if index:
            yield ""
        yield f"**{question}**"
        yield ""
        for text, names in names_of.items():
            yield f"* {'; '.join(names)}: {text}"
