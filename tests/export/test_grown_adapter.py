"""Adapters of models to which tokens were added before the training: the usual recipe."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, PeftConfig, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.export.adapters import MODULES, lora
from tests.export.conftest import SIZES

NUM_ADDED = 10
BOTH = ["embed_tokens", "lm_head"]
ADDED = list(range(VOCAB_SIZE, VOCAB_SIZE + NUM_ADDED))
PROMPT = torch.tensor([[5, 6, *ADDED, 7, ADDED[0]]])
KINDS: dict[str, PeftConfig] = {
    "both targeted": lora(target_modules=[*MODULES, *BOTH]),
    "both targeted, dora": lora(target_modules=[*MODULES, *BOTH], use_dora=True),
    "head targeted": lora(target_modules=[*MODULES, "lm_head"]),
    "both saved": lora(modules_to_save=BOTH),
    "embedding saved": lora(modules_to_save=["embed_tokens"]),
    "embedding saved, tied": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "neither": lora(),
    "all linear": lora(target_modules="all-linear"),
    "rows": lora(trainable_token_indices=ADDED),
    "rows alone": TrainableTokensConfig(token_indices=ADDED, target_modules=["embed_tokens"]),
    "ia3 of the head": IA3Config(target_modules=["v_proj", "lm_head"], feedforward_modules=[]),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A checkpoint by whether its head is tied."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        tied: write_checkpoint(
            folder / str(tied), LlamaConfig(**SIZES, num_hidden_layers=1, tie_word_embeddings=tied)
        )
        for tied in (False, True)
    }


@torch.inference_mode()
def logits_of(model: Any) -> Any:
    return model(input_ids=PROMPT, use_cache=False).logits[0].numpy()


def trained(base: Path, folder: Path, config: PeftConfig, **saving: Any) -> Any:
    """Write a random adapter for a model with added tokens; return the logits of both."""
    with quiet_libraries():
        grown = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        grown.resize_token_embeddings(VOCAB_SIZE + NUM_ADDED)
        model = get_peft_model(grown, copy.deepcopy(config)).eval()
        generator = torch.Generator().manual_seed(7)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder, **saving)
    return logits_of(model)


def opened(base: Path, adapter: Path) -> Checkpoint:
    options = ExportConfig(target=str(base), adapter=str(adapter), output=Path("out"))
    return open_pair(options)[0]


WHOLE = [
    (kind, tied)
    for kind in KINDS
    for tied in (False, True)
    if tied or kind not in ("head targeted", "ia3 of the head", "rows alone")
]


@pytest.mark.parametrize(("kind", "tied"), WHOLE)
def test_it_computes_what_was_trained(kind, tied, bases, tmp_path):
    wanted = trained(bases[tied], tmp_path, KINDS[kind])
    checkpoint = opened(bases[tied], tmp_path)
    found = logits_of(load_model(checkpoint))
    assert checkpoint.vocab_size == found.shape[1] == VOCAB_SIZE + NUM_ADDED
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["both saved", "both targeted"])
def test_old_files(kind, bases, tmp_path):
    wanted = trained(bases[False], tmp_path, KINDS[kind])
    file = tmp_path / "adapter_model.safetensors"
    torch.save(load_file(file), tmp_path / "adapter_model.bin")
    file.unlink()
    found = logits_of(load_model(opened(bases[False], tmp_path)))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_rows_of_the_added_tokens_alone(bases, tmp_path):
    """No whole embedding is in the file, and the head is tied."""
    wanted = trained(bases[True], tmp_path, KINDS["rows"], save_embedding_layers=False)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert not [name for name in saved if name.endswith("base_layer.weight")]
    found = logits_of(load_model(opened(bases[True], tmp_path)))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


EMBEDDING, HEAD = (f"no rows of the {of} for 10 of the 10 added" for of in ("embedding", "head"))
LACKING: list[tuple[str, bool, dict[str, Any], str]] = [
    # (kind, whether the head is tied, how it is saved, words)
    ("head targeted", False, {}, EMBEDDING),
    ("ia3 of the head", False, {}, EMBEDDING),
    ("rows alone", False, {}, HEAD),
    ("both targeted", False, {"save_embedding_layers": False}, EMBEDDING),
    ("rows", False, {"save_embedding_layers": False}, HEAD),
    ("head targeted", True, {"save_embedding_layers": False}, EMBEDDING),
]


@pytest.mark.parametrize(("kind", "tied", "saving", "words"), LACKING)
def test_rows_that_were_not_saved_are_named(kind, tied, saving, words, bases, tmp_path):
    """PEFT itself puts random rows there, and says nothing."""
    trained(bases[tied], tmp_path, KINDS[kind], **saving)
    with pytest.raises(ExportError, match=words):
        load_model(opened(bases[tied], tmp_path))


def test_another_copy_of_a_saved_weight_is_refused(bases, tmp_path):
    trained(bases[False], tmp_path, KINDS["both saved"])
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    name = "base_model.model.lm_head.modules_to_save.weight"
    save_file({**weights, name: weights[name] + 1}, file)
    with pytest.raises(ExportError, match=f"has unknown weight {name}, and 0 more"):
        load_model(opened(bases[False], tmp_path))
