"""Checkpoints in a published shape that compute what a small translator does.

The trained head is the first of many, the trained rows of an MLP are the first ones. What is added
has random weights of the same magnitude, so that it costs and looks like real ones, and what would
write it to the residual stream is zero. Added layers stand before the last trained one and write
nothing; in a shape whose norms stand behind its parts they normalize once more what is normalized.
Added tokens have a logit far below all others, by the constant in the first dimension of what the
head reads. Every tensor has a seed of its own, by its name: the encoders of a target and of a draft
are equal.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from lab.translation.shapes import Shape
from lab.translation.small_model import NUM_TOKENS

ADDED_LOGIT = -60.0  # of an added token, times the constant
PADDING_LOGIT = -1e4  # where it begins the targets: its row is zero, and so would be its logit
_EMBEDDING, _LOGITS_BIAS = "model.shared.weight", "final_logits_bias"
_WRITES_TO_THE_STREAM = ("out_proj", "fc2")


def write_checkpoint(
    small: Mapping[str, Tensor], shape: Shape, num_decoder_layers: int, folder: Path
) -> None:
    """Write the checkpoint that computes what a small model with these tensors does.

    num_decoder_layers: of the checkpoint: the shape's, or those of a draft.
    """
    config = shape.config(shape.num_layers, num_decoder_layers)
    with torch.device("meta"), quiet_libraries():
        model = AutoModelForSeq2SeqLM.from_config(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tied = {"lm_head.weight", "model.encoder.embed_tokens.weight"}
    tied |= {"model.decoder.embed_tokens.weight"}
    tied |= {name for name in shapes if "embed_positions" in name}  # made by transformers
    num_layers = {"encoder": shape.num_layers, "decoder": num_decoder_layers}
    widening = _Widening(small, shape, num_layers)
    tensors = {
        name: widening.tensor(name, size).contiguous()
        for name, size in shapes.items()
        if name not in tied
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.dtype = "float32"
    config.save_pretrained(folder)
    generation = {
        "decoder_start_token_id": shape.start_token,
        "eos_token_id": shape.end_token,
        "pad_token_id": shape.padding_token,
        "max_length": 512,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    _write_tokenizer(shape, folder)


class _Widening:
    """Makes the tensors of a checkpoint by name, each from its own seed."""

    def __init__(
        self, small: Mapping[str, Tensor], shape: Shape, num_layers: Mapping[str, int]
    ) -> None:
        """num_layers: of the checkpoint, by ``encoder`` and ``decoder``."""
        self._small, self._shape, self._num_layers = small, shape, num_layers
        self._num_trained = {
            stack: 1
            + max(int(key.split(".")[2]) for key in small if key.startswith(f"{stack}.layers."))
            for stack in num_layers
        }

    def tensor(self, name: str, size: torch.Size) -> Tensor:
        """Return a tensor of the checkpoint."""
        if name == _EMBEDDING:
            return _embedding(self._small["shared.weight"], size, self._shape)
        if name == _LOGITS_BIAS:
            bias = torch.zeros(size)
            bias[..., self._shape.padding_token] = PADDING_LOGIT
            return bias
        source, is_added = self._trained_name(name)
        trained, kind = self._small.get(source), name.split(".")[-2]
        if kind.endswith("norm"):
            if trained is None or is_added:  # without weights, see ``small_model.Layer``
                return torch.ones(size) if name.endswith("weight") else torch.zeros(size)
            return trained.clone()
        assert trained is not None  # all other parts have weights
        widened = torch.zeros(size)
        if kind not in _WRITES_TO_THE_STREAM:
            widened = _random(name, size, trained)
        if not is_added:
            widened[tuple(slice(length) for length in trained.shape)] = trained
        return widened

    def _trained_name(self, name: str) -> tuple[str, bool]:
        """Return the name of the trained tensor inside, or of one like it, and whether it is that.

        Of two trained layers in six the first is the first, the second the last; the others are
        like the first.
        """
        own = name.removeprefix("model.")
        if ".layers." not in own:
            return own, False
        stack, rest = own.split(".layers.")
        index, part = rest.split(".", 1)
        number, last = int(index), self._num_trained[stack] - 1
        if number == self._num_layers[stack] - 1:
            return f"{stack}.layers.{last}.{part}", False
        return f"{stack}.layers.{number if number < last else 0}.{part}", number >= last


def _embedding(trained: Tensor, size: torch.Size, shape: Shape) -> Tensor:
    rows = _random(_EMBEDDING, size, trained)
    rows[:, 0] = ADDED_LOGIT
    rows[:NUM_TOKENS] = trained
    if shape.starts_from_zero:
        rows[shape.start_token] = 0.0
    return rows


def _random(name: str, size: torch.Size, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = float(like.square().mean().sqrt())
    return torch.empty(size).uniform_(-bound, bound, generator=generator)


def _write_tokenizer(shape: Shape, folder: Path) -> None:
    """Write a tokenizer that reads words, the bytes of all other texts, and ends with the end."""
    special = {
        shape.end_token: "</s>",
        shape.unknown_token: "<unk>",
        shape.padding_token: "<pad>",
    }
    more: dict[str, str] = {}
    if shape.begin_token is not None:  # CTranslate2 wants one where the family has it
        special[shape.begin_token] = more["bos_token"] = "<s>"
    names = {token: text_of(token) for token in range(shape.vocab_size)}
    names |= dict(enumerate(sorted(ByteLevel.alphabet()), NUM_TOKENS)) | special
    vocabulary = {name: token for token, name in names.items()}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_tokens([names[token] for token in range(NUM_TOKENS) if token not in special])
    end = [("</s>", shape.end_token)]
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=end)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        **more,
    ).save_pretrained(folder)


def text_of(token: int) -> str:
    """Return what the tokenizer writes for a word."""
    return f"<w{token}>"
