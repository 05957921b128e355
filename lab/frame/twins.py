"""Twins and their bundles in a work folder, created if missing."""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from dsbd_export.checkpoints.checkpoint_files import json_object
from dsbd_export.demo import demo_pair
from dsbd_export.feature_draft.checkpoint import is_feature_draft
from lab.frame.page import ROOT
from scripts.twin.feature_draft import widen_feature_draft

TOP_LOGITS = "topk:64"
DEMO, HOSTILE = "demo", "hostile"  # drafts by name
TRAINED = "trained"  # instead of a number of parameters: the demo pair itself

# Qwen2.5-1.5B's vocabulary, a draft of proportional size, and long contexts.
TWIN_OPTIONS = {"1B": ("--vocab", "151936", "--draft-params", "100M", "--context", "4096")}
# Logits of added tokens are in the hundreds, where float32 has steps of 1.5e-5.
EXPORT_OPTIONS = {("1B", "none"): ("--atol", "1e-3")}
# No run of the tables depends on the draft's precision. The demo draft has the target's precision;
# it is so small that another would make no difference.
DRAFT_OPTIONS = {"1B": ("--draft-quantize", "int8")}
DRAFT_VOCAB = {"1B": ("--draft-vocab", "32768")}


def twin_of(params: str, work: Path) -> Path:
    """Return the folder of a twin, created if missing, or of the demo pair for ``TRAINED``."""
    if params == TRAINED:
        return demo_pair()[0].parent
    twin = work / f"twin-{params}"
    if not twin.exists():
        make_twin = ROOT / "scripts" / "make_twin"
        call(make_twin, "--params", params, "-o", twin, *TWIN_OPTIONS.get(params, ()))
    return twin


def bundle_of(
    params: str, quantize: str, pair: str | Path, work: Path, *, logits: str = TOP_LOGITS
) -> Path:
    """Return the bundle of a twin, created if missing.

    pair: ``DEMO`` for the demo draft, ``HOSTILE`` for a random one, or the folder of a draft of the
        demo target.
    """
    head = "" if logits == TOP_LOGITS else f"-{logits}"
    name = pair if isinstance(pair, str) else pair.name
    twin, bundle = twin_of(params, work), work / f"bundle-{params}-{quantize}-{name}{head}"
    if not bundle.exists():
        options = ["--quantize", quantize, "--logits", logits]
        options += EXPORT_OPTIONS.get((params, quantize), ())
        options += DRAFT_OPTIONS.get(params, ())
        draft = _draft_of(twin, pair, work)
        if not _is_feature_draft(draft):  # a feature draft has a separate vocabulary
            options += DRAFT_VOCAB.get(params, ())
        call("dsbd-export", "--target", twin / "target", "--draft", draft, "-o", bundle, *options)
    return bundle


def _is_feature_draft(draft: Path) -> bool:
    return is_feature_draft(json_object(draft / "config.json"))


def _draft_of(twin: Path, pair: str | Path, work: Path) -> Path:
    """Return the folder of the draft that ``bundle_of`` exports, created if missing."""
    if pair == DEMO:
        return twin / "draft"
    if pair == HOSTILE:
        return _hostile_draft(work)
    if not _is_feature_draft(draft := Path(pair)):
        return draft
    widened = twin / draft.name
    if not widened.exists():
        widen_feature_draft(draft, LlamaConfig.from_pretrained(twin / "target"), widened)
    return widened


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
