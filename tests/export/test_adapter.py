"""Adapters are merged as peft merges them; what is damaged or no change of weights is refused."""

import pickle
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, LoHaConfig, PeftModel, PromptTuningConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from dsbd_export.checkpoints.adapter import report_adapter
from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.checkpoints.model_loading import load_model, reference_dtype
from dsbd_export.config import DraftConfig, ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_draft, open_pair
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle_files.manifest import MANIFEST_NAME, manifest_from_file
from scripts.family_checkpoints import write_checkpoint, write_family_checkpoint
from tests.export.adapters import (
    MODULES,
    assert_answers_as,
    logits_of,
    lora,
    opened_with,
    refusal,
    use_old_file,
    write_adapter,
)
from tests.export.conftest import SIZES, edit_json, written_tokenizer

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
logits = partial(logits_of, prompt=torch.arange(4, 20)[None])


def merged_by_peft(base: Path, adapter: Path) -> Any:
    with quiet_libraries():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().eval()


KINDS = {
    "lora": lora(),
    "rslora": lora(use_rslora=True, lora_alpha=7),
    "a pattern of names": lora(target_modules=r".*\.[qv]_proj"),
    "patterns": lora(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}),
    "dora": lora(use_dora=True, use_rslora=True),
    "saved-modules": lora(modules_to_save=["lm_head", "embed_tokens"]),
    "ia3": IA3Config(target_modules=MODULES, feedforward_modules=["down_proj"]),
    "loha": LoHaConfig(target_modules=MODULES),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_the_model_that_peft_merges(small_llama_folder, tmp_path, kind):
    adapter = write_adapter(small_llama_folder, tmp_path, KINDS[kind])
    found = logits(load_model(opened_with(small_llama_folder, adapter)))
    wanted = logits(merged_by_peft(small_llama_folder, adapter))
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    base = AutoModelForCausalLM.from_pretrained(small_llama_folder, dtype=torch.float32)
    assert np.abs(found - logits(base)).max() > 1e-2


def test_a_bundle_answers_as_the_merged_model(small_llama_folder, tmp_path):
    adapter = write_adapter(small_llama_folder, tmp_path / "sql-lora", KINDS["dora"])
    config = ExportConfig(
        target=str(small_llama_folder), adapter=str(adapter), output=tmp_path / "bundle"
    )
    export_bundle(config, report=lambda _: None)
    assert_answers_as(config.output, merged_by_peft(small_llama_folder, adapter))
    assert manifest_from_file(config.output / MANIFEST_NAME).target.adapter == "sql-lora"


TIED = {
    "head": lora(target_modules=[*MODULES, "lm_head"]),
    "embedding": lora(target_modules=[*MODULES, "embed_tokens"]),
    "saved-head": lora(modules_to_save=["lm_head"]),
    "tokens": lora(trainable_token_indices=[5, 6, 7]),
}


@pytest.mark.parametrize("kind", TIED)
def test_a_tied_head_does_not_get_what_the_embedding_learned(llama_folder, tmp_path, kind):
    adapter = write_adapter(llama_folder, tmp_path, TIED[kind])
    model = load_model(opened_with(llama_folder, adapter))
    with quiet_libraries():
        base = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
        attached = PeftModel.from_pretrained(base, str(adapter)).eval()  # not merged
    np.testing.assert_allclose(logits(model), logits(attached), atol=1e-5)


def test_experts_in_one_parameter_are_merged(tmp_path):
    base = write_family_checkpoint("qwen3_moe", tmp_path / "base")
    targets = {"target_parameters": ["mlp.experts.down_proj"], "target_modules": ["q_proj"]}
    adapter = write_adapter(base, tmp_path / "adapter", lora(**targets))
    found = logits(load_model(opened_with(base, adapter)))
    np.testing.assert_allclose(found, logits(merged_by_peft(base, adapter)), atol=1e-5)


def test_sums_with_an_adapter_are_kept_in_fp32(small_llama_folder, tmp_path):
    adapter = write_adapter(small_llama_folder, tmp_path, lora())
    assert reference_dtype(opened_with(small_llama_folder, adapter), "fp16") == "fp32"


def llama(folder: Path, **changed: Any) -> Path:
    sizes = {**SIZES, "num_hidden_layers": 1, "tie_word_embeddings": False, **changed}
    return write_checkpoint(folder, LlamaConfig(**sizes))


WRONG_BASES = [
    ({"hidden_size": 64}, r"does not fit LlamaForCausalLM of 1 layers of width 64: size mismatch"),
    ({"num_hidden_layers": 2}, r"has no weight .*layers\.1\..*, and 5 more"),
    ({"vocab_size": 310}, r"size mismatch for .*lm_head"),
]


@pytest.mark.parametrize(("changed", "words"), WRONG_BASES)
def test_an_adapter_of_another_model_is_refused(small_llama_folder, tmp_path, changed, words):
    config = lora(modules_to_save=["lm_head"])
    adapter = write_adapter(small_llama_folder, tmp_path / "adapter", config)
    other = llama(tmp_path / "other", **changed)
    message = refusal(other, adapter)
    assert message.startswith(f"the adapter at {adapter} ") and re.search(words, message)
    assert "give the model that it was trained for" in message


def test_tokens_that_were_added_in_training_are_the_models(small_llama_folder, tmp_path):
    grown = llama(tmp_path / "grown", vocab_size=310)
    saved = lora(modules_to_save=["lm_head", "embed_tokens"])
    adapter = write_adapter(grown, tmp_path / "adapter", saved)
    checkpoint = opened_with(small_llama_folder, adapter)
    model = load_model(checkpoint)
    assert checkpoint.vocab_size == model.config.vocab_size == logits(model).shape[1] == 310
    assert logits(model)[:, 300:].std() > 1e-3
    weights = load_file(adapter / WEIGHTS)
    np.testing.assert_array_equal(
        model.get_input_embeddings().weight.detach(),
        weights["base_model.model.model.embed_tokens.weight"],
    )


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
    weights[min(weights)][0, 0] = torch.nan
    save_file(weights, folder / WEIGHTS)


def written(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


DEEP = b'{"peft_type": "LORA", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no adapter at .*: no such folder"),
    "no weights' file": (
        lambda f: (f / WEIGHTS).unlink(),
        f"has no {WEIGHTS} or adapter_model.bin",
    ),
    "no config": (lambda f: (f / CONFIG).unlink(), "has no adapter_config.json"),
    "a new kind": (with_settings(peft_type="NEW"), "NEW, which peft does not know"),
    "a new setting": (with_settings(turns=3), "sets turns = 3, which the installed peft"),
    **{task: (with_settings(task_type=task), f"trained for the task {task}") for task in TASKS},
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
    "a prompt": (
        str,
        "PROMPT_TUNING, which adds rows to a prompt or cache and so cannot be merged",
    ),
}
PROMPT = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_merge_can_do_is_seen_before_a_model_is_loaded(kind, small_llama_folder, tmp_path):
    change, words = REFUSED[kind]
    config = PROMPT if kind == "a prompt" else lora()
    adapter = write_adapter(small_llama_folder, tmp_path / "adapter", config)
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


UNFIT = [  # (base of the training, adapter, words)
    ({}, lora(alora_invocation_tokens=[3], task_type="CAUSAL_LM"), "cannot be merged into weights"),
    ({}, lora(layer_replication=[[0, 1], [0, 1]]), "is more than a change of weights"),
    ({"num_hidden_layers": 2}, lora(), "has unknown weight base_model.model.model.layers.1."),
    ({"vocab_size": 310}, lora(modules_to_save=["embed_tokens"]), "of the head for 10 of the 10 a"),
]


@pytest.mark.parametrize(("trained", "config", "words"), UNFIT)
def test_what_fits_no_weight_is_refused(small_llama_folder, tmp_path, trained, config, words):
    base = llama(tmp_path / "base", **trained)
    assert words in refusal(small_llama_folder, write_adapter(base, tmp_path / "adapter", config))


def test_the_drafts_adapter_is_the_drafts_alone(llama_folder, small_llama_folder, tmp_path):
    adapter = write_adapter(small_llama_folder, tmp_path, lora())
    options = {"draft": str(small_llama_folder), "draft_adapter": str(adapter)}
    target, draft = open_pair(ExportConfig(target=str(llama_folder), output=Path("o"), **options))
    assert (target.adapter, draft and draft.adapter and draft.adapter.folder) == (None, adapter)
    assert open_draft(DraftConfig(bundle=Path("b"), **options)).adapter == draft.adapter


def test_another_base_is_reported(small_llama_folder, tmp_path):
    written = write_adapter(small_llama_folder, tmp_path, lora())
    adapter = opened_with(small_llama_folder, written).adapter
    for base, is_known in (
        ("meta-llama/Llama-3.2-1B", True),
        ("/models/llama-3.2-1b/", True),
        ("Llama-3.2-1B-Q8_0.gguf", True),
        ("Qwen/Qwen3-0.6B", False),
    ):
        lines: list[str] = []
        named = replace(adapter, base_name="unsloth/Llama-3.2-1B")
        report_adapter(named, base, lines.append)
        assert any("trained for unsloth/Llama-3.2-1B" in line for line in lines) != is_known


def test_a_tokenizer_with_the_adapter_is_that_of_the_bundle(small_llama_folder, tmp_path):
    adapter = write_adapter(small_llama_folder, tmp_path / "adapter", lora())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(small_llama_folder / name, adapter / name)
    (adapter / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    written_tokenizer(opened_with(small_llama_folder, adapter), tmp_path / "files")
    assert (tmp_path / "files" / "chat_template.jinja").read_text().endswith("!")


def test_an_adapter_in_old_files(small_llama_folder, tmp_path):
    adapter = write_adapter(small_llama_folder, tmp_path, lora())
    wanted = logits(merged_by_peft(small_llama_folder, adapter))
    use_old_file(adapter)
    found = logits(load_model(opened_with(small_llama_folder, adapter)))
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    save_file({}, adapter / WEIGHTS)  # read first, as peft does
    assert "has no weight" in refusal(small_llama_folder, adapter)
