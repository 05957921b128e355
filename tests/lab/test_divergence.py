"""How far a bundle is from its checkpoint, whatever its head returns."""

from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from dsbd_export.config import ExportConfig
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle_files.bundle import open_bundle
from lab.divergence import COLUMNS, bundle_log_probs, main
from scripts.family_checkpoints import write_family_checkpoint
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

TOPK = TinyModel(logits="topk:8")


def log_probs(folder: Path, target: TinyModel, num_tokens: int) -> torch.Tensor:
    write_tiny_bundle(folder, target=target)
    return bundle_log_probs(open_bundle(folder), "target", np.arange(num_tokens) % 256, 1)


@pytest.mark.parametrize("num_tokens", [5, 600])  # one call; three, of which each is read
def test_a_top_k_head_has_the_distributions_of_a_dense_one(num_tokens, tmp_path):
    wanted = log_probs(tmp_path / "dense", TinyModel(), num_tokens)
    found = log_probs(tmp_path / "topk", TOPK, num_tokens)
    assert wanted.shape == (num_tokens, TinyModel().vocab_size)
    assert torch.equal(found, wanted)
    assert torch.allclose(wanted.exp().sum(-1), torch.ones(num_tokens))


def test_a_head_that_keeps_nothing_is_refused(tmp_path):
    with pytest.raises(click.UsageError, match=r"largest logits alone \(topk:8\); export it again"):
        log_probs(tmp_path / "older", replace(TOPK, full_logits=False), 5)


def test_the_table(captures, tmp_path):
    checkpoint = write_family_checkpoint("llama", tmp_path / "llama")
    for name, logits in (("dense", "full"), ("topk", "topk:8")):
        config = ExportConfig(target=str(checkpoint), output=tmp_path / name, logits=logits)
        export_bundle(config, report=lambda _: None, source_of=captures)
    text = tmp_path / "text.md"
    text.write_text("def read(path): return path\n" * 3)
    words = [checkpoint, tmp_path / "dense", tmp_path / "topk", "--text", text, "--tokens", 40]
    done = CliRunner().invoke(main, list(map(str, words)), catch_exceptions=False)
    header, _, *lines = done.stdout.splitlines()
    assert header == f"| {' | '.join(COLUMNS)} |"
    (dense, *of_dense), (topk, *of_topk) = (line.strip("| ").split(" | ") for line in lines)
    assert (dense, topk) == ("dense", "topk") and of_topk == of_dense
    assert of_dense[0] == "text.md" and of_dense[-1] == "100.0%"
    assert abs(float(of_dense[1])) < 1e-6
