"""Drafts of encoder-decoders that are their target's encoder and a smaller decoder."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from dsbd_export.checkpoints.checkpoint import quiet_libraries


def cut_decoder(
    target: Path, folder: Path, edit: Callable[[nn.Module], None] = lambda _model: None
) -> Path:
    """Write a checkpoint with the first layer of a target's decoder, and its encoder.

    edit: changes the model before it is written.
    """
    shutil.copytree(target, folder)
    with quiet_libraries():
        model = AutoModelForSeq2SeqLM.from_pretrained(target, dtype=torch.float32)
        config = AutoConfig.from_pretrained(target)
        name = "num_decoder_layers" if hasattr(config, "num_decoder_layers") else "decoder_layers"
        setattr(config, name, 1)
        draft = AutoModelForSeq2SeqLM.from_config(config).float()
        weights = {k: v for k, v in model.state_dict().items() if k in draft.state_dict()}
        draft.load_state_dict(weights)
        edit(draft)
        draft.save_pretrained(folder)
    return folder
