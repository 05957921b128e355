"""What a step of a distillation takes, by vocabulary: processor time, and memory at its peak.

A draft of --params parameters learns from one batch of random tokens: --rows of 128 places, as a
step has them on chats. "all logits" is autograd over those of two rows at a time, "some logits"
what dsbd-distill does. Every way has a process of its own. Processor time tells the ways apart
on a busy machine as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dsbd_distill.draft_head import DraftHead
from dsbd_distill.draft_model import shape_for
from dsbd_distill.lesson import NUM_TOP
from dsbd_distill.loss import distance, distillation_loss
from dsbd_distill.teacher import TorchDevice, best_device
from dsbd_distill.training import optimizers
from lab.frame.own_process import in_own_process
from lab.frame.page import RESULTS, Page, writes
from scripts.document_sections import table
from scripts.machine import memory_of

SECTION = "distill step"
VOCABULARIES = (4096, 49_152, 151_936)
PLACES = 128
_ROWS_AT_ONCE = 2  # of all logits
ALL, SOME = "all logits", "some logits"


@dataclass(frozen=True)
class Step:
    """What a step took: seconds of the processor, and bytes at the peak of its process."""

    seconds: float
    peak_bytes: int


def step_of(
    way: str, vocab_size: int, proposed: int | None, params: int, rows: int, threads: int
) -> Step:
    """Return what a step takes, the second of two."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shape = shape_for(params, 0, vocab_size)
    draft = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.hidden_size // shape.head_dim,
            num_key_value_heads=shape.hidden_size // shape.head_dim,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    )
    device = best_device()
    backward = _backward_of(way, vocab_size, proposed, device)
    all_optimizers = optimizers(draft, 1e-3)
    tokens = torch.randint(0, vocab_size, (rows, PLACES))
    ids = torch.rand(rows, PLACES, 4 * NUM_TOP).argsort(-1)[..., :NUM_TOP]
    log_p = torch.randn(rows, PLACES, NUM_TOP).sort(-1, descending=True).values.log_softmax(-1)
    seconds = 0.0
    for _ in range(2):
        began = time.process_time()
        backward(draft, (tokens, ids, log_p - 0.1))
        for optimizer in all_optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds = time.process_time() - began
    return Step(seconds, memory_of()["VmHWM"])


def _backward_of(
    way: str, vocab_size: int, proposed: int | None, device: TorchDevice
) -> Callable[[Any, tuple[Tensor, ...]], None]:
    """Return what computes the gradient of a batch."""
    weight = torch.tensor(0.5)
    head = DraftHead(vocab_size, None if proposed is None else np.arange(proposed), device)

    def some(draft: Any, batch: tuple[Tensor, ...]) -> None:
        tokens, ids, log_p = batch
        with device.autocast():
            hidden = draft.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        log_q = head.log_probs(hidden, draft.lm_head.weight, ids.flatten(0, 1))
        distance(log_q, log_p.flatten(0, 1), weight).mean().backward()  # type: ignore[no-untyped-call]

    def every(draft: Any, batch: tuple[Tensor, ...]) -> None:
        for part in zip(*(torch.split(array, _ROWS_AT_ONCE) for array in batch), strict=True):
            counted = torch.ones(part[0].shape, dtype=torch.bool)
            loss = distillation_loss(draft, (*part, counted, weight), device)
            (loss * len(part[0]) / len(batch[0])).backward()  # type: ignore[no-untyped-call]

    return some if way == SOME else every


@click.command(help=__doc__)
@click.option("--params", default=20_000_000, show_default=True)
@click.option("--draft-vocab", default=8192, show_default=True)
@click.option("--vocab-size", "vocabularies", type=int, multiple=True, default=VOCABULARIES)
@click.option("--rows", default=16, show_default=True)
@writes(RESULTS / "distill_step.md", is_timed=False)
def main(
    params: int, draft_vocab: int, vocabularies: tuple[int, ...], rows: int, page: Page
) -> None:
    """Measure every way and write the table."""
    page.begin(SECTION)
    lines = []
    for vocab_size in vocabularies:
        ways: list[tuple[str, int | None]] = [(ALL, None), (SOME, None)]
        if draft_vocab < vocab_size:
            ways.append((SOME, draft_vocab))
        for way, proposed in ways:
            found = in_own_process(step_of, way, vocab_size, proposed, params, rows, page.threads)
            tokens = "all" if proposed is None else f"{proposed:,}"
            cells = (f"{vocab_size:,}", tokens, way)
            lines.append((*cells, f"{found.seconds:.2f}", f"{found.peak_bytes / 1e6:.0f}"))
    columns = ("vocabulary", "proposed", "way", "processor seconds a step", "MB at the peak")
    shown = f"{params / 1e6:.0f} M parameters", f"{rows} rows of {PLACES} places"
    page.write(SECTION, table(columns, lines), *shown)
