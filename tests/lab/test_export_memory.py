"""The measurement of an export's memory measures what it says."""

from __future__ import annotations

import dataclasses
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lab.export_memory.random_checkpoint import Architecture, write_random_checkpoint
from lab.export_memory.watched_process import watch

TINY = Architecture(
    num_layers=2, hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, vocab_size=300
)
MEGABYTE = 10**6
ALLOCATE = """
import sys
print("small", file=sys.stderr, flush=True)
import time; time.sleep(0.1)
print("large", file=sys.stderr, flush=True)
block = b"x" * {size}
time.sleep(0.5)
"""


def test_a_random_checkpoint_is_whole_and_in_shards(tmp_path):
    num_parameters = write_random_checkpoint(
        tmp_path / "a", TINY, dtype=torch.float16, shard_bytes=20_000, seed=0
    )
    shards = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 2
    assert sum(weight.numel() for file in shards for weight in load_file(file).values()) == (
        num_parameters
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float16)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert model.config.num_hidden_layers == 2 and model.lm_head.weight.std() > 0.01


def test_the_seed_decides_the_weights(tmp_path):
    options = {"dtype": torch.bfloat16, "shard_bytes": 10**9}
    small = dataclasses.replace(TINY, num_layers=1)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_random_checkpoint(tmp_path / name, small, seed=seed, **options)
    a, b, c = ((tmp_path / name / "model-00000.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_the_peak_of_a_process_and_its_stages():
    run = watch([sys.executable, "-c", ALLOCATE.format(size=200 * MEGABYTE)])
    assert run.exit_code == 0 and run.stderr == ["small", "large"]
    assert run.peak_stage == "large"
    for peak in (run.peak_resident, run.peak_anonymous, run.stages["large"].anonymous):
        assert 200 * MEGABYTE < peak < 300 * MEGABYTE


def test_a_process_that_fails():
    assert watch([sys.executable, "-c", "raise SystemExit(3)"]).exit_code == 3
