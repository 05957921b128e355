"""What is compared: small models, checkpoints in a published shape, our bundles of them."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from lab.frame.twins import TOP_LOGITS, call
from lab.peers.prepare import Pair, converted_folder
from lab.translation.shapes import Shape
from lab.translation.small_model import Language, SmallTranslator, train
from lab.translation.widened import text_of, write_checkpoint

QUANTIZE = {
    "fp32": ("--quantize", "none"),
    "int8": ("--quantize", "int8-dynamic"),
}
NUM_DRAFT_LAYERS, DRAFT_VOCAB = 1, 8192
_NUM_TEXTS, _TEXT_LENGTH = 2000, 24
_REPORT_EVERY = 50  # steps


def pair_of(shape: Shape, work: Path, num_steps: int) -> Pair:
    """Return the checkpoints of a shape and its bundles, created if missing.

    num_steps: of the training of the small model, and of its draft's.
    """
    checkpoints = converted_folder(
        work / shape.name, functools.partial(_write_checkpoints, shape, num_steps)
    )

    def bundle(precision: str) -> Path:
        folder = work / f"bundle-{shape.name}-{precision}"
        return converted_folder(folder, functools.partial(_export, checkpoints, precision))

    return Pair(target=checkpoints / "target", draft=checkpoints / "draft", bundle_of=bundle)


def _write_checkpoints(shape: Shape, num_steps: int, folder: Path) -> None:
    target, draft = trained_pair(shape, num_steps, functools.partial(print, file=sys.stderr))
    for role, model, num_layers in (
        ("target", target, shape.num_layers),
        ("draft", draft, NUM_DRAFT_LAYERS),
    ):
        write_checkpoint(model.state_dict(), shape, num_layers, folder / role)
    generator = torch.Generator().manual_seed(0)
    _, targets = Language(shape).sentences(_NUM_TEXTS, _TEXT_LENGTH, generator)
    lines = ("".join(map(text_of, row)) for row in targets[:, :-1].tolist())
    (folder / "targets.txt").write_text("".join(f"{line}\n" for line in lines))


def trained_pair(
    shape: Shape, num_steps: int, report: Callable[[str], None]
) -> tuple[SmallTranslator, SmallTranslator]:
    """Return a trained model, and a draft of one layer over its encoder."""
    torch.manual_seed(0)
    language = Language(shape)
    target = SmallTranslator(shape, language)
    draft = SmallTranslator(shape, language, NUM_DRAFT_LAYERS)
    for model, followed in ((target, None), (draft, target)):
        if followed is not None:
            model.shared, model.encoder = followed.shared, followed.encoder
            last = followed.decoder.layers[-1].state_dict()
            model.decoder.layers[-1].load_state_dict(last)
        for progress in train(model, language, num_steps, target=followed):
            if progress.step % _REPORT_EVERY == 0:
                role = "target" if followed is None else "draft"
                report(f"{shape.name}, {role}, step {progress.step}: loss {progress.loss:.3f}")
    return target, draft


def _export(checkpoints: Path, precision: str, folder: Path) -> None:
    shutil.rmtree(folder)  # made for it, and it must not exist
    draft = ("--draft-vocab", str(DRAFT_VOCAB), "--draft-texts", checkpoints / "targets.txt")
    pair = ("--target", checkpoints / "target", "--draft", checkpoints / "draft")
    call("dsbd-export", *pair, *draft, *QUANTIZE[precision], "--logits", TOP_LOGITS, "-o", folder)
