"""Step-level beam search: a reward ranks whole lines while they are written.

    python examples/step_search.py bundle/ "def read_json(" --num-beams 4 --num-steps 4

The algorithm of Hugging Face's search-and-learn (Beeching et al. 2024, after Snell et al. 2024,
section 5.2): each text is continued by ``width`` lines, a reward function scores all continuations,
and the best ``num_beams`` are kept. The lines of a text are sampled together, with the draft model
and without replacement, so that they differ. Replace ``parses`` with a reward model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import click

import dsbd_ort

Reward = Callable[[str, str], float]
"""(prompt, text) -> reward of an unfinished text; larger is better."""


@dataclass(frozen=True)
class Beam:
    """A text, finished or not."""

    text: str
    reward: float = 0.0
    has_ended: bool = False


def step_search(
    pipe: dsbd_ort.Pipeline,
    prompt: str,
    reward: Reward,
    *,
    num_beams: int = 4,
    width: int = 4,
    num_steps: int = 8,
    step_end: str = "\n",
    **options: object,
) -> list[Beam]:
    """Return the best texts, best first.

    width: number of lines that are tried for each text in a step.
    options: options of ``Pipeline.generate``, for every step.
    """
    beams = [Beam("")]
    for step in range(num_steps):
        live = [beam for beam in beams if not beam.has_ended]
        if not live:
            break
        results = pipe.generate(
            [prompt + beam.text for beam in live],
            num_beams=width,
            num_return_sequences=width,
            stop_strings=step_end,
            **{"max_new_tokens": 64, "seed": step, **options},
        )
        beam_by_text = {beam.text: beam for beam in beams if beam.has_ended}
        for beam, result in zip(live, results, strict=True):
            for sequence in result.sequences:
                goes_on = sequence.finish_reason == "stop"
                text = beam.text + sequence.text + step_end * goes_on
                beam_by_text[text] = Beam(text, reward(prompt, text), has_ended=not goes_on)
        beams = sorted(beam_by_text.values(), key=lambda beam: -beam.reward)[:num_beams]
    return [replace(beam, has_ended=True) for beam in beams]


def parses(prompt: str, text: str) -> float:
    """Reward Python: 1 if the code compiles, minus 0.01 for every repeated line."""
    lines = [line for line in text.splitlines() if line.strip()]
    repeated = len(lines) - len(set(lines))
    try:
        compile(prompt + text, "text", "exec")
    except SyntaxError as error:
        is_at_end = (error.lineno or 0) >= (prompt + text).rstrip().count("\n") + 1
        return 0.5 * is_at_end - 0.01 * repeated
    return 1.0 - 0.01 * repeated


@click.command()
@click.argument("bundle")
@click.argument("prompt")
@click.option("--num-beams", default=4, show_default=True)
@click.option("--width", default=4, show_default=True)
@click.option("--num-steps", default=8, show_default=True)
def main(bundle: str, prompt: str, num_beams: int, width: int, num_steps: int) -> None:
    """Continue PROMPT with lines of Python that parse."""
    with dsbd_ort.Pipeline.from_bundle(bundle) as pipe:
        options = {"num_beams": num_beams, "width": width, "num_steps": num_steps}
        for beam in step_search(pipe, prompt, parses, **options):
            click.echo(f"{beam.reward:.2f}\n{prompt}{beam.text}\n")


if __name__ == "__main__":
    main()
