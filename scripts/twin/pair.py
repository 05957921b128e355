"""Making a twin and its draft, checked before they appear."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from transformers import LlamaConfig

from twin.agreement import largest_difference
from twin.checkpoint import copy_draft, write_twin
from twin.shape import twin_config

TOLERANCE = 1e-4  # of the logits, absolute


def make_twin(
    pair: tuple[Path, Path],
    output: Path,
    num_params: int,
    *,
    context: int | None,
    seed: int,
    report: Callable[[str], None],
    tolerance: float = TOLERANCE,
) -> None:
    """Write and check the pair next to ``output``, then put it there: it is whole or absent.

    Raises:
        click.ClickException: the twin's logits are not the trained target's.
    """
    target, draft = pair
    config = twin_config(LlamaConfig.from_pretrained(target), num_params, context)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        work = Path(folder) / output.name
        written = write_twin(target, config, work / "target", seed, report)
        report(describe(config, written))
        difference = largest_difference(target, work / "target", seed)
        if not difference <= tolerance:
            raise click.ClickException(
                f"the twin's logits are {difference:.1e} off the trained target's, at most "
                f"{tolerance:.0e} is allowed; nothing was written: report this as a bug"
            )
        copy_draft(draft, work / "draft", context)
        work.rename(output)
    report(f"{output}: logits within {difference:.1e} of the trained target's")


def describe(config: LlamaConfig, num_params: int) -> str:
    """Return the shape of a twin in one line."""
    return (
        f"{num_params:,} parameters: {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}, MLP {config.intermediate_size}, {config.num_attention_heads} heads "
        f"({config.num_key_value_heads} for keys and values) of {config.head_dim}"
    )
