"""The agreement of a pair that an export measures, compared with both checkpoints in torch."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from dsbd_export.config import DraftConfig, ExportConfig
from dsbd_export.draft_export import export_draft
from dsbd_export.gate import agreement as measuring
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_runtime.bundle_files.bundle import open_bundle
from scripts.family_checkpoints import write_checkpoint
from tests.export.conftest import SIZES


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    for num_layers, name in enumerate(("draft", "target"), 1):
        write_checkpoint(folder / name, LlamaConfig(**SIZES, num_hidden_layers=num_layers))
    return folder


def by_torch(folder, prompts, ends):
    """Return (best, overlap, best_four) over the greedy answers of the target, and their number."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("target", "draft")
    )
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(measuring._NEW_TOKENS):
            with torch.no_grad():
                p, q = (model(ids).logits[0, -1].softmax(-1) for model in (target, draft))
            best = int(p.argmax())
            four = q.topk(4).indices.tolist()
            top = [set(each.topk(64).indices.tolist()) for each in (p, q)]
            both = sum(min(float(p[t]), float(q[t])) for t in top[0] & top[1])
            rows.append((best == four[0], both, best in four))
            if best in ends:
                break
            ids = torch.cat([ids, torch.tensor([[best]])], dim=1)
    return np.mean(rows, axis=0), len(rows)


def test_it_is_that_of_the_checkpoints(checkpoints, tmp_path):
    names = {name: str(checkpoints / name) for name in ("target", "draft")}
    config = ExportConfig(**names, output=str(tmp_path / "bundle"))
    export_bundle(config, report=silent)
    bundle = open_bundle(tmp_path / "bundle")
    target, found = bundle.manifest.target, bundle.entry("draft").agreement
    assert found is not None and bundle.entry("target").agreement is None
    most = target.context_length - measuring._NEW_TOKENS
    prompts = [ids[-most:] for ids in measuring._prompts(bundle.path, target.bos_token_id)]
    wanted, number = by_torch(checkpoints, prompts, target.eos_token_ids)
    assert found.num_tokens == number
    assert (found.best, found.overlap, found.best_four) == pytest.approx(wanted, abs=2e-3)


def test_a_draft_that_is_added_later_is_measured_too(checkpoints, tmp_path):
    """The target itself as a draft agrees in everything."""
    target = str(checkpoints / "target")
    export_bundle(ExportConfig(target=target, output=str(tmp_path / "bundle")), report=silent)
    config = DraftConfig(bundle=tmp_path / "bundle", draft=target)
    manifest = export_draft(config, report=silent).manifest
    found = dataclasses.asdict(manifest.draft.agreement)
    assert found.pop("num_tokens") > 0
    assert found["best"] == found["best_four"] == 1.0 >= found["overlap"] > 0.5
