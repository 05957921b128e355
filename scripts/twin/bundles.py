"""Twins and their bundles in a work folder, created if missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dsbd_export.demo import demo_pair

SCRIPTS = Path(__file__).resolve().parents[1]
TOP_LOGITS = "topk:64"


def twin_of(params: str, work: Path) -> Path:
    """Return the folder of a twin, created if missing."""
    twin = work / f"twin-{params}"
    if not twin.exists():
        call(SCRIPTS / "make_twin", "--params", params, "-o", twin)
    return twin


def bundle_of(
    params: str, quantize: str, pair: str, work: Path, *, logits: str = TOP_LOGITS
) -> Path:
    """Return the bundle of a twin, created if missing."""
    head = "" if logits == TOP_LOGITS else f"-{logits}"
    twin, bundle = twin_of(params, work), work / f"bundle-{params}-{quantize}-{pair}{head}"
    if not bundle.exists():
        draft = twin / "draft" if pair == "demo" else _hostile_draft(work)
        options = ["--quantize", quantize, "--logits", logits]
        call("dsbd-export", "--target", twin / "target", "--draft", draft, "-o", bundle, *options)
    return bundle


def call(*command: str | Path) -> None:
    """Print and run a command; raise if it fails."""
    print("+", *command, file=sys.stderr)
    subprocess.run([str(word) for word in command], check=True)


def _hostile_draft(work: Path) -> Path:
    """Return a draft of the demo draft's shape with random weights."""
    folder = work / "hostile_draft"
    if not folder.exists():
        draft = demo_pair()[1]
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(draft)).save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes((draft / "tokenizer.json").read_bytes())
    return folder
