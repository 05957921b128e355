"""Adapters whose files are damaged, or whose numbers and patterns cost more than they are."""

import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsbd_export.errors import ExportError
from tests.export.adapters import lora, opened_with, write_adapter
from tests.export.conftest import edit_json

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def with_settings(**settings: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / CONFIG, **settings)


def cut(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-50])


def as_bin(content: object, save: Callable[..., object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        with (folder / "adapter_model.bin").open("wb") as file:
            save(content, file)

    return change


def with_nan(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    name = min(weights)
    weights[name][0, 0] = torch.nan
    save_file(weights, folder / WEIGHTS)


def written(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


DEEP = b'{"peft_type": "LORA", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut weights": (cut, f"{WEIGHTS} of the adapter at .* cannot be read"),
    "no bytes": (written(WEIGHTS, b""), "cannot be read"),
    "other bytes": (written(WEIGHTS, b"x" * 99), "cannot be read"),
    "a long header": (written(WEIGHTS, b"\xff" * 7 + b"\x00{}"), "cannot be read"),
    "numbers that are none": (with_nan, "has values that are not finite"),
    "a pickle of code": (as_bin(print, pickle.dump), r"adapter_model\.bin of .* cannot be read"),
    "a list": (as_bin([torch.zeros(2)], torch.save), "it has no weights by their names"),
    "no weights": (as_bin({}, torch.save), "has no weights"),
    "a config in bytes": (written(CONFIG, b"\x80\x81"), f"{CONFIG} of .* is no JSON object"),
    "a list as config": (written(CONFIG, b"[]"), f"{CONFIG} of .* is no JSON object"),
    "a deep config": (written(CONFIG, DEEP), f"{CONFIG} of .* is no JSON object"),
    "a numeric base": (with_settings(base_model_name_or_path=7), "= 7, expected the name of a"),
    "a rank of text": (with_settings(r="4"), "sets r = '4', expected a number from 0 on"),
    "numeric modules": (with_settings(target_modules=[3]), r"= \[3\], expected names of modules"),
    "a list of ranks": (with_settings(rank_pattern=["q"]), "expected numbers by names of modules"),
    "a huge rank": (with_settings(r=10**9), "sets r = 1000000000, expected numbers up to 256"),
    "a huge rank of some": (with_settings(rank_pattern={"q_proj": 10**8}), "expected numbers up"),
    "many layers": (with_settings(layer_replication=[[0, 10**9]]), "numbers up to 6"),
    "no object": (with_settings(runtime_config=3), f"{CONFIG} of .* cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_seen_before_a_model_is_loaded(kind, small_llama_folder, tmp_path):
    change, words = DAMAGED[kind]
    adapter = write_adapter(small_llama_folder, tmp_path, lora())
    change(adapter)
    with pytest.raises(ExportError, match=words) as caught:
        opened_with(small_llama_folder, adapter)
    assert "\n" not in str(caught.value)


ENDLESS = r"(\w+\.?)+[qv]_proj"
PATTERNS: list[dict[str, Any]] = [
    {"target_modules": ENDLESS},
    {"exclude_modules": ENDLESS},
    {"modules_to_save": [ENDLESS]},
    {"rank_pattern": {ENDLESS: 4}},
    {"layers_to_transform": [0], "layers_pattern": ENDLESS},
]


@pytest.mark.parametrize("settings", PATTERNS, ids=lambda each: "".join(list(each)[-1:]))
def test_patterns_that_do_not_end_are_refused(settings, small_llama_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("dsbd_export.checkpoints.adapter_files._SECONDS", 0.5)
    adapter = write_adapter(small_llama_folder, tmp_path, lora())
    with_settings(**settings)(adapter)
    start, words = time.monotonic(), f"such as {ENDLESS!r}, that take more than 0.5 s to match"
    with pytest.raises(ExportError, match=re.escape(words)):
        opened_with(small_llama_folder, adapter)
    assert time.monotonic() - start < 5


def test_a_pattern_is_matched_as_by_peft(small_llama_folder, tmp_path):
    adapter = write_adapter(small_llama_folder, tmp_path, lora(target_modules=r".*\.[qv]_proj"))
    assert opened_with(small_llama_folder, adapter).adapter is not None
