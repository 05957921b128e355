"""Memory and CPU seconds of a sound in a prompt with four beams: this runtime and transformers.

A twin of Qwen3-ASR 0.6B (its shapes, random weights, a small vocabulary) reads 30 s of noise and
writes 64 tokens by beam search with four beams, in fp32 on one thread. Each tool runs in a separate
process. transformers copies the prompt for every beam and computes all copies; this runtime
computes it once.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from dsbd_ort.benchmark.bootstrap import spread
from lab.frame.own_process import in_own_process
from scripts.document_sections import table

AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 18,
    "encoder_attention_heads": 14,
    "encoder_ffn_dim": 3584,
    "d_model": 896,
    "downsample_hidden_size": 480,
    "n_window_infer": 800,
}
TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
NUM_BEAMS, NUM_TOKENS = 4, 64
RATE, SECONDS = 16_000, 30
COLUMNS = ("", "CPU seconds", "opened, MB", "peak, MB", "the request, MB")


@dataclass(frozen=True)
class Cost:
    """Cost of one answer: CPU seconds, and peak memory in bytes before it and after it."""

    seconds: float
    opened: int
    peak: int
    token_ids: list[int]
    prompt_ids: list[int]


def sound() -> NDArray[np.float32]:
    """Return noise, (RATE * SECONDS,) float32."""
    return np.random.default_rng(0).normal(0.0, 0.1, RATE * SECONDS).astype(np.float32)


def of_runtime(bundle: Path) -> Cost:
    """Answer with this runtime."""
    from dsbd_ort import Pipeline

    message = {"role": "user", "content": [{"type": "audio", "audio": sound()}]}
    with Pipeline.from_bundle(bundle, num_threads=1) as pipe:
        opened, begin = _peak(), time.process_time()
        prompt = pipe.chat_prompt([message])
        result = pipe.generate(
            prompt,
            strategy="beam-search",
            num_beams=NUM_BEAMS,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
        )
        seconds = time.process_time() - begin
    return Cost(seconds, opened, _peak(), result.sequences[0].token_ids, list(prompt))


def of_transformers(checkpoint: Path, prompt_ids: list[int]) -> Cost:
    """Answer with transformers; ``prompt_ids``: prompt of the runtime."""
    import torch
    from transformers import Qwen3ASRFeatureExtractor, Qwen3ASRForConditionalGeneration

    torch.set_num_threads(1)
    extractor = Qwen3ASRFeatureExtractor.from_pretrained(checkpoint)
    model: Any = Qwen3ASRForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    opened, begin = _peak(), time.process_time()
    features = extractor(
        sound(), sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
    )
    sequences = model.generate(
        input_ids=torch.tensor([prompt_ids]),
        input_features=features["input_features"],
        input_features_mask=features["attention_mask"],
        do_sample=False,
        num_beams=NUM_BEAMS,
        min_new_tokens=NUM_TOKENS,
        max_new_tokens=NUM_TOKENS,
    )
    seconds = time.process_time() - begin
    return Cost(seconds, opened, _peak(), sequences[0, len(prompt_ids) :].tolist(), prompt_ids)


def _peak() -> int:
    """Return the peak resident memory of this process so far, in bytes."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) * 1024


def _shown(values: list[float]) -> str:
    quartiles = spread(values)
    return f"{quartiles.median:.2f} ({quartiles.quartile_1:.2f} to {quartiles.quartile_3:.2f})"


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the twin [temporary].")
def main(rounds: int, work: Path | None) -> None:
    """Measure both tools in turn; print a table and the ratios."""
    from dsbd_export.config import ExportConfig
    from dsbd_export.pipeline import export_bundle
    from scripts.qwen3_asr_checkpoint import write_qwen3_asr

    console = Console(width=120)
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        if not (folder / "checkpoint").exists():
            write_qwen3_asr(folder / "checkpoint", deviation=0.02, audio=AUDIO, **TEXT)
        if not (folder / "bundle").exists():
            options = ExportConfig(target=str(folder / "checkpoint"), output=folder / "bundle")
            export_bundle(options, report=console.print)
        costs: dict[str, list[Cost]] = {"transformers": [], "dsbd-ort": []}
        for _ in range(rounds):
            ours = in_own_process(of_runtime, folder / "bundle")
            theirs = in_own_process(of_transformers, folder / "checkpoint", ours.prompt_ids)
            costs["transformers"].append(theirs)
            costs["dsbd-ort"].append(ours)
    if any(a.token_ids != b.token_ids for a, b in zip(*costs.values(), strict=True)):
        console.print("the texts differ")
    rows = []
    for name, of_tool in costs.items():
        opened, peak = (
            statistics.median(getattr(c, n) for c in of_tool) for n in ("opened", "peak")
        )
        sizes = [f"{size / 1e6:,.0f}" for size in (opened, peak, peak - opened)]
        rows.append([name, _shown([c.seconds for c in of_tool]), *sizes])
    console.print("\n".join(table(COLUMNS, rows)))
    ratios = [a.seconds / b.seconds for a, b in zip(*costs.values(), strict=True)]
    console.print(f"CPU seconds, times as many: {_shown(ratios)}")


if __name__ == "__main__":
    sys.exit(main())
