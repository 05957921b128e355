"""Random adapters (PEFT) for checkpoints, and models that are compared with merged ones."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from dsbd_ort.pipeline import Pipeline

MODULES = ["q_proj", "v_proj", "down_proj"]


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": MODULES, **settings})


def write_adapter(base: Path, folder: Path, config: PeftConfig) -> Path:
    with quiet_libraries():
        model = AutoModelForCausalLM.from_pretrained(base)
        with_random_adapter(model, config).save_pretrained(folder)
    return folder


def with_random_adapter(model: Any, config: PeftConfig) -> Any:
    adapted = get_peft_model(model, copy.deepcopy(config)).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return adapted


def opened_with(base: Path, adapter: Path) -> Checkpoint:
    return open_pair(ExportConfig(target=str(base), adapter=str(adapter), output=Path("out")))[0]


def refusal(base: Path, adapter: Path) -> str:
    """Return the error of opening and loading a target with an adapter."""
    with pytest.raises(ExportError) as caught:
        load_model(opened_with(base, adapter))
    message = str(caught.value)
    assert "\n" not in message
    return message


@torch.inference_mode()
def logits_of(model: Any, prompt: torch.Tensor) -> Any:
    return model(input_ids=prompt, use_cache=False).logits[0].numpy()


def use_old_file(adapter: Path) -> None:
    """Store the weights as older versions of PEFT did."""
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()


ASKED = [5, 6, 7, 8, 9, 10]
NEW_TOKENS = 8


def assert_answers_as(bundle: Path, model: Any) -> None:
    """Compare the most probable continuation of a prompt, and its log-probabilities."""
    with Pipeline.from_bundle(bundle) as pipeline:
        options = {"strategy": "greedy", "max_new_tokens": NEW_TOKENS, "eos_token_id": []}
        found = pipeline.generate(ASKED, **options).sequences[0]
    ids = torch.tensor([[*ASKED, *found.token_ids]])
    with torch.inference_mode():
        logits = model.eval()(input_ids=ids, use_cache=False).logits[0, len(ASKED) - 1 : -1]
    wanted = torch.log_softmax(logits.double(), dim=-1)
    assert list(found.token_ids) == wanted.argmax(dim=-1).tolist()
    np.testing.assert_allclose(found.token_logprobs, wanted.max(dim=-1).values, atol=1e-4)
