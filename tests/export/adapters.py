"""Random adapters (PEFT) for checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM

from dsbd_export.checkpoints.checkpoint import quiet_libraries

MODULES = ["q_proj", "v_proj", "down_proj"]


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": MODULES, **settings})


def write_adapter(base: Path, folder: Path, config: PeftConfig) -> Path:
    """Write a random adapter for a checkpoint."""
    with quiet_libraries():
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        generator = torch.Generator().manual_seed(7)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder)
    return folder
