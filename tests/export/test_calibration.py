"""Texts that int8 products are fitted to: those of the user, or ours."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint
from dsbd_export.pipeline import export_bundle
from dsbd_export.quantization.row_forms import calibration_case


@pytest.fixture(scope="module")
def checkpoint(llama_folder):
    return open_checkpoint("target", llama_folder, ExportConfig(target="t", output="o"))


@pytest.fixture(scope="module")
def encode(llama_folder):
    tokenizer = Tokenizer.from_file(str(llama_folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def test_texts_have_equal_shares_each_as_a_prompt_begins(checkpoint, encode, tmp_path):
    long, short = "def path(x): " * 400, "class A: "
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.jsonl").write_text(
        "\n".join(
            json.dumps(line)
            for line in (
                {"text": short},
                {"messages": [{"role": "user", "content": long}]},
                {"text": ""},
            )
        )
    )
    case = calibration_case(checkpoint, [str(tmp_path)])
    parts = [encode(long)[:170], encode(short), encode(long)[:170]]
    wanted = [token for part in parts for token in part][: checkpoint.context_length]
    assert case.node_ids.tolist() == wanted
    assert case.rows.tolist() == list(range(len(wanted)))


def test_without_texts_it_is_ours(checkpoint):
    assert len(calibration_case(checkpoint, ()).node_ids) == min(512, checkpoint.context_length)


def test_a_file_without_text(checkpoint, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ExportError, match="has no text; give a file with some"):
        calibration_case(checkpoint, [str(tmp_path)])


def test_the_products_of_a_bundle_are_fitted_to_them(llama_folder, tmp_path):
    """Other texts, other factors: the weights differ, the logits by rounding alone."""
    texts = tmp_path / "texts.txt"
    texts.write_text("path path path " * 300)
    found = {}
    for name, given in (("ours", ()), ("theirs", (str(texts),))):
        config = ExportConfig(
            target=str(llama_folder),
            output=tmp_path / name,
            quantize="int8-dynamic",
            calibration_texts=given,
        )
        found[name] = export_bundle(config, report=lambda line: None).manifest.target.parity
    assert np.isfinite([parity.mean_kl for parity in found.values()]).all()
    files = [(tmp_path / name / "target").rglob("*.data") for name in found]
    ours, theirs = (b"".join(file.read_bytes() for file in sorted(each)) for each in files)
    assert ours and ours != theirs
