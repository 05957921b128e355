"""Adapters of models to which tokens were added before the training: the usual recipe."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, PeftConfig, TrainableTokensConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.errors import ExportError
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.export.adapters import (
    MODULES,
    logits_of,
    lora,
    opened_with,
    use_old_file,
    with_random_adapter,
)
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
def bases(small_llama_folder, tmp_path_factory):
    """A checkpoint by whether its head is tied."""
    config = LlamaConfig(**SIZES, num_hidden_layers=1, tie_word_embeddings=True)
    tied = write_checkpoint(tmp_path_factory.mktemp("tied"), config)
    return {False: small_llama_folder, True: tied}


def trained(base: Path, folder: Path, config: PeftConfig, **saving: Any) -> Any:
    """Write a random adapter for a model with added tokens; return the logits of both."""
    with quiet_libraries():
        grown = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        grown.resize_token_embeddings(VOCAB_SIZE + NUM_ADDED)
        model = with_random_adapter(grown, config)
        model.save_pretrained(folder, **saving)
    return logits_of(model, PROMPT)


WHOLE = [  # (kind, whether the head is tied, whether the file is an old one, how it is saved)
    *(
        (kind, tied, False, {})
        for kind in KINDS
        for tied in (False, True)
        if tied or kind not in ("head targeted", "ia3 of the head", "rows alone")
    ),
    ("both saved", False, True, {}),
    ("both targeted", False, True, {}),
    ("rows", True, False, {"save_embedding_layers": False}),  # no whole embedding
]


@pytest.mark.parametrize(("kind", "tied", "is_old", "saving"), WHOLE)
def test_it_computes_what_was_trained(kind, tied, is_old, saving, bases, tmp_path):
    wanted = trained(bases[tied], tmp_path, KINDS[kind], **saving)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert not (saving and [name for name in saved if name.endswith("base_layer.weight")])
    if is_old:
        use_old_file(tmp_path)
    checkpoint = opened_with(bases[tied], tmp_path)
    found = logits_of(load_model(checkpoint), PROMPT)
    assert checkpoint.vocab_size == found.shape[1] == VOCAB_SIZE + NUM_ADDED
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
        load_model(opened_with(bases[tied], tmp_path))


def test_another_copy_of_a_saved_weight_is_refused(bases, tmp_path):
    trained(bases[False], tmp_path, KINDS["both saved"])
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    name = "base_model.model.lm_head.modules_to_save.weight"
    save_file({**weights, name: weights[name] + 1}, file)
    with pytest.raises(ExportError, match=f"has unknown weight {name}, and 0 more"):
        load_model(opened_with(bases[False], tmp_path))
