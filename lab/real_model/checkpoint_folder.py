"""Conversion of a GGUF file to a checkpoint folder of plain weights for other tools."""

from pathlib import Path

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ModelOptions
from dsbd_export.opening import open_target
from dsbd_export.tokenizers.tokenizer_files import load_tokenizer


def write_checkpoint(source: str, folder: str) -> None:
    """Write the model of a GGUF file, as our export reads it, with its tokenizer."""
    checkpoint = open_target(source, ModelOptions())
    model = load_model(checkpoint, "fp32")
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(Path(folder))
    load_tokenizer(checkpoint).save_pretrained(folder)
