"""Divergence of bundles from their checkpoint, on texts that were not used to make them.

CHECKPOINT is a folder, BUNDLES were exported from it. Prints the mean KL divergence of the
next-token distributions in nats, the largest KL divergence of a row, and the share of rows with the
same most probable token.

\b
lab/run divergence CHECKPOINT BUNDLE... --text docs/algorithm.md --text FILE
"""  # noqa: D301

from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsbd_forward.forward import Forward
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.parts.attention.attention_rows import MAX_FORWARD_ROWS
from dsbd_runtime.parts.attention.cache_entries import most_new_rows
from scripts.document_sections import table

ROOT = Path(__file__).resolve().parents[1]
TEXTS = (ROOT / "docs" / "algorithm.md", ROOT / "lab" / "divergence.py")
COLUMNS = ("bundle", "text", "mean KL", "largest of a row", "same top token")
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


def bundle_log_probs(
    bundle: Bundle, role: str, token_ids: NDArray[np.int64], threads: int
) -> torch.Tensor:
    """Return a model's log-probabilities after every token, (n, V).

    A top-k head keeps all logits until the next call, so they are read after each call. Raises
    click.UsageError for a bundle of an older version, whose head keeps none.
    """
    num_rows = most_new_rows(bundle.entry(role).caches, MAX_FORWARD_ROWS)
    logits = []
    with load_causal_lm(
        bundle, role, provider="cpu", settings=EngineSettings(num_threads=threads)
    ) as model:
        for first in range(0, len(token_ids), num_rows):
            positions = np.arange(first, min(first + num_rows, len(token_ids)))
            rows = np.arange(len(positions))
            mask = np.tri(len(rows), first + len(rows), k=first, dtype=bool)
            forward = Forward(token_ids[positions], positions, mask, rows)
            full = model.forward(forward).logits.full
            if full is None:
                raise click.UsageError(
                    f"the {role} of {bundle.path} returns its largest logits alone "
                    f"({bundle.entry(role).logits}); export it again, which keeps all of them"
                )
            logits.append(full.read(rows))
    return torch.log_softmax(torch.from_numpy(np.concatenate(logits)), -1)


@click.command(help=__doc__)
@click.argument("checkpoint", type=_FOLDER)
@click.argument("bundles", nargs=-1, required=True, type=_FOLDER)
@click.option("--text", "texts", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=384, show_default=True, help="Maximum tokens of a text.")
@click.option("--role", type=click.Choice(["target", "draft"]), default="target")
@click.option("--threads", default=1, show_default=True)
def main(
    checkpoint: Path,
    bundles: tuple[Path, ...],
    texts: tuple[Path, ...],
    tokens: int,
    role: str,
    threads: int,
) -> None:
    """Print the table."""
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    lines: list[tuple[str, ...]] = []
    for text in texts or TEXTS:
        ids = np.array(tokenizer(text.read_text(encoding="utf-8")).input_ids[:tokens], np.int64)
        with torch.inference_mode():
            wanted = torch.log_softmax(model(torch.from_numpy(ids)[None]).logits[0], -1)
        for folder in bundles:
            log_probs = bundle_log_probs(open_bundle(folder), role, ids, threads)
            divergences = (wanted.exp() * (wanted - log_probs[:, : wanted.shape[1]])).sum(-1)
            agreement = (log_probs.argmax(-1) == wanted.argmax(-1)).float().mean()
            cells = (f"{float(divergences.mean()):.2e}", f"{float(divergences.max()):.1e}")
            lines.append((folder.name, text.name, *cells, f"{float(agreement):.1%}"))
    click.echo("\n".join(table(COLUMNS, lines)))


if __name__ == "__main__":
    main()
