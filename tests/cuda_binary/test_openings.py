"""Every family and every option opens without a node on the CPU, or is refused with its reason."""

import re

import pytest
from transformers import LlamaConfig

from dsbd_export.config import ExportConfig
from dsbd_export.opening import open_checkpoint
from dsbd_export.pipeline import export_bundle, export_model
from dsbd_runtime.bundle_files.bundle import MODEL_FILE, PRUNE_FILE
from scripts.family_checkpoints import (
    CONVOLUTIONAL,
    FAMILY_CHECKPOINTS,
    RECURRENT,
    VOCAB_SIZE,
    write_checkpoint,
    write_family_checkpoint,
)
from tests.export.conftest import SIZES as TARGET_SIZES
from tests.export.feature_checkpoints import NUM_LAYERS, write_library, written

pytestmark = [pytest.mark.cuda_binary, pytest.mark.slow]

PROMISED = re.compile(
    r"CUDAExecutionProvider does not run every node of .*, the CPU would run (.+); use provider "
    "'cpu', or export with another --dtype or --quantize"
)
# By case: the operators that the CPU would run. One that opens after all is no failure.
REFUSED = {"int8-dynamic": {"MatMulInteger", "DequantizeLinear"}}
FAMILIES = {
    row.family: name
    for name, row in reversed(FAMILY_CHECKPOINTS.items())
    if name not in (*RECURRENT, *CONVOLUTIONAL)  # refused with any GPU, before a graph is opened
}
OPTIONS = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "full logits": {"logits": "full"},
    "grouped": {"attention": "grouped"},
    "cuda form": {"form": "cuda"},
    "cuda form, grouped, int4": {"form": "cuda", "attention": "grouped", "quantize": "int4"},
    "exact": {"dtype": "fp32", "attention": "exact"},
    "int8": {"dtype": "fp32", "quantize": "int8-blocks"},
    "int4": {"dtype": "fp32", "quantize": "int4"},
    "int8 fp16": {"quantize": "int8"},
    "int4 fp16": {"quantize": "int4"},
    "int8-dynamic": {"dtype": "fp32", "quantize": "int8-dynamic"},
}
NO_LIMIT = 1e3


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_family_checkpoint("llama", tmp_path_factory.mktemp("llama") / "checkpoint")


@pytest.mark.parametrize("name", list(FAMILIES.values())[::-1])
def test_families(worker, name, tmp_path):
    checkpoint = write_family_checkpoint(name, tmp_path / "checkpoint")
    check_opening(worker, name, checkpoint, tmp_path, FAMILY_CHECKPOINTS[name].max_context, {})


@pytest.mark.parametrize("name", OPTIONS)
def test_options(worker, name, llama, tmp_path):
    check_opening(worker, name, llama, tmp_path, None, OPTIONS[name])


@pytest.mark.parametrize("logits", ["full", "topk:8"])
def test_drafts(worker, logits, tmp_path):
    """A feature draft with its target, and a draft that proposes some tokens only."""
    sizes = {**TARGET_SIZES, "num_hidden_layers": NUM_LAYERS, "vocab_size": VOCAB_SIZE}
    checkpoint = write_checkpoint(tmp_path / "llama", LlamaConfig(**sizes))
    drafts = [("cut", checkpoint, {"draft_vocab": 64})]
    drafts.append(("features", written(tmp_path, write_library, {}), {}))
    for name, draft, options in drafts:
        config = ExportConfig(
            target=str(checkpoint),
            draft=str(draft),
            output=tmp_path / name,
            dtype="fp16",
            logits=logits,
            max_kl=NO_LIMIT,
            **options,
        )
        export_bundle(config, report=lambda _: None)
        for role in ("target", "draft"):
            found = worker.run("open_graph", path=str(config.output / role / MODEL_FILE))
            assert found == {"error": "", "text": ""}, (name, role)


def check_opening(worker, case, checkpoint, folder, max_context, options):
    chosen = {"dtype": "fp16", "logits": "topk:8", "max_kl": NO_LIMIT, **options}
    if chosen["dtype"] == "fp32" and "quantize" not in options:
        del chosen["max_kl"]
    config = ExportConfig(
        target="", draft="", output=folder / "bundle", max_context=max_context, **chosen
    )
    config.output.mkdir()
    opened = open_checkpoint("target", checkpoint, config)
    export_model(opened, config.output, config, lambda _line: None)
    for file in (MODEL_FILE, PRUNE_FILE):
        found = worker.run("open_graph", path=str(config.output / "target" / file))
        if found["error"]:
            refused = PROMISED.fullmatch(found["text"])
            assert found["error"] == "ProviderError" and refused, found
            assert set(refused[1].split(", ")) <= REFUSED.get(case, set())
