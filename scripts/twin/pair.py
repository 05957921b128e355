"""Twin and its draft: written to a temporary folder, checked, then renamed into place."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.checkpoints.checkpoint_files import json_object
from dsbd_export.feature_draft.checkpoint import is_feature_draft
from scripts.twin.feature_draft import widen_feature_draft
from scripts.twin.weights import AddedTokens, TwinWeights, twin_config

TOLERANCE = 1e-4  # maximum absolute error of the logits
MOST_ADDED_LOG_PROB = -100.0  # maximum log-probability of an added token

INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 10**9

NUM_SEQUENCES, LENGTH = 4, 64


def make_twin(
    pair: tuple[Path, Path],
    output: Path,
    num_params: int,
    *,
    context: int | None,
    seed: int,
    report: Callable[[str], None],
    vocab_size: int | None = None,
    num_draft_params: int | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Write and check the pair in a temporary folder, then rename it to ``output``.

    The draft is copied, or also becomes a twin, of ``num_draft_params`` parameters. A feature draft
    is converted to read the twin's features. With ``vocab_size`` both models have more tokens,
    which are never sampled (``weights.AddedTokens``).

    Raises:
        click.UsageError: a vocabulary is given for a draft that is only copied, or parameters for
            a feature draft.
        click.ClickException: a twin's logits differ from the trained model's.
    """
    target, draft = pair
    has_features = is_feature_draft(json_object(draft / "config.json"))
    if has_features and num_draft_params is not None:
        raise click.UsageError("a feature draft has no twin of its own; leave out --draft-params")
    if vocab_size is not None and num_draft_params is None and not has_features:
        raise click.UsageError("a larger vocabulary is for both models; give --draft-params too")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        work = Path(folder) / output.name
        comparisons = []

        def add_twin(role: str, source: Path, size: int) -> LlamaConfig:
            config = twin_config(LlamaConfig.from_pretrained(source), size, context, vocab_size)
            report(describe(config, write_twin(source, config, work / role, seed, report)))
            comparisons.append(checked(role, compare(source, work / role, seed), tolerance))
            return config

        config = add_twin("target", target, num_params)
        if num_draft_params is not None:
            add_twin("draft", draft, num_draft_params)
        elif has_features:
            widen_feature_draft(draft, config, work / "draft")
        else:
            copy_draft(draft, work / "draft", context)
        work.rename(output)
    difference = max(comparison.difference for comparison in comparisons)
    report(f"{output}: logits within {difference:.1e} of the trained ones")
    if vocab_size is not None:
        largest = max(comparison.added_log_prob for comparison in comparisons)
        report(f"{output}: log-probabilities of added tokens at most {largest:.0f}")


@dataclass(frozen=True)
class Comparison:
    """A twin and the trained model, fp32, on seeded random tokens.

    Attributes:
        difference: largest absolute difference of two logits; with added tokens, of two
            log-probabilities, each over all tokens of its model.
        added_log_prob: largest log-probability of an added token, -inf if there are none.
    """

    difference: float
    added_log_prob: float


def checked(role: str, comparison: Comparison, tolerance: float) -> Comparison:
    """Return ``comparison``; raise click.ClickException if the twin is not the trained model."""
    if not comparison.difference <= tolerance:
        raise click.ClickException(
            f"the twin's logits are {comparison.difference:.1e} off the trained {role}'s, at most "
            f"{tolerance:.0e} is allowed; nothing was written: report this as a bug"
        )
    if not comparison.added_log_prob <= MOST_ADDED_LOG_PROB:
        raise click.ClickException(
            f"an added token of the {role} has log-probability {comparison.added_log_prob:.1f}, at "
            f"most {MOST_ADDED_LOG_PROB:.0f} is allowed; nothing was written: report this as a bug"
        )
    return comparison


def describe(config: LlamaConfig, num_params: int) -> str:
    """Return the shape of a twin in one line."""
    return (
        f"{num_params:,} parameters: {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}, MLP {config.intermediate_size}, {config.num_attention_heads} heads "
        f"({config.num_key_value_heads} for keys and values) of {config.head_dim}"
    )


def write_twin(
    source: Path,
    config: LlamaConfig,
    output: Path,
    seed: int,
    report: Callable[[str], None],
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the twin of the checkpoint ``source``; return its number of parameters."""
    output.mkdir(parents=True)
    with quiet_libraries():
        trained = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    old = LlamaConfig.from_pretrained(source)
    added_tokens = AddedTokens.of(old, config, residuals(trained, seed))
    weights = TwinWeights(trained.state_dict(), old, config, seed, added_tokens)
    with torch.device("meta"):
        shapes = LlamaForCausalLM(config).state_dict()
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    for number, (file, names) in enumerate(split.filename_to_tensors.items(), start=1):
        report(f"writing {file} ({number} of {len(split.filename_to_tensors)})")
        tensors = {name: weights.tensor(name, shapes[name].shape) for name in names}
        save_file(tensors, output / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (output / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    config.save_pretrained(output)
    copy_other_files(source, output)
    return sum(tensor.numel() for tensor in shapes.values())


@torch.no_grad()
def residuals(model: LlamaForCausalLM, seed: int) -> Tensor:
    """Return the last norm's input for seeded random tokens, (sequences, length, hidden)."""
    read: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    model.eval()(input_ids=random_tokens(model.config.vocab_size, seed))
    hook.remove()
    return read[0]


def random_tokens(vocab_size: int, seed: int) -> Tensor:
    """Return seeded token ids, (sequences, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (NUM_SEQUENCES, LENGTH), generator=generator)


def copy_draft(source: Path, output: Path, context: int | None) -> None:
    """Copy the draft; ``context``, if given, replaces the number of positions in its config."""
    shutil.copytree(source, output)
    if context is not None:
        file = output / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**config, "max_position_embeddings": context}, indent=2) + "\n")


def copy_other_files(source: Path, output: Path) -> None:
    """Copy the tokenizer and all other files except config and weights."""
    for file in source.iterdir():
        is_weight = ".safetensors" in file.name
        if file.is_file() and not is_weight and file.name != "config.json":
            shutil.copy(file, output / file.name)


def compare(source: Path, twin: Path, seed: int) -> Comparison:
    """Return the differences of the twin's logits from the trained model's."""
    vocab_size = LlamaConfig.from_pretrained(source).vocab_size
    token_ids = random_tokens(vocab_size, seed)
    expected, actual = (streamed_logits(folder, token_ids) for folder in (source, twin))
    added_log_prob = -math.inf
    if actual.shape[-1] > vocab_size:
        expected, actual = expected.log_softmax(-1), actual.log_softmax(-1)
        added_log_prob = float(actual[..., vocab_size:].max())
    return Comparison(float((actual[..., :vocab_size] - expected).abs().max()), added_log_prob)


@torch.no_grad()
def streamed_logits(folder: Path, token_ids: Tensor) -> Tensor:
    """Return the logits of a Llama checkpoint, (num_sequences, length, vocab) float32."""
    config = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffer is not in the checkpoint
    model.model.embed_tokens.load_state_dict(_tensors(folder, "model.embed_tokens."), assign=True)
    model.model.norm.load_state_dict(_tensors(folder, "model.norm."), assign=True)
    head = "model.embed_tokens." if config.tie_word_embeddings else "lm_head."
    model.lm_head.load_state_dict(_tensors(folder, head), assign=True)
    for index, layer in enumerate(model.model.layers):
        _stream(layer, folder, f"model.layers.{index}.")
    return model(input_ids=token_ids, use_cache=False).logits  # type: ignore[no-any-return]


def _stream(layer: nn.Module, folder: Path, prefix: str) -> None:
    """Load a layer's weights when it is called and drop them afterwards."""

    def load(module: nn.Module, *_: Any) -> None:
        module.load_state_dict(_tensors(folder, prefix), assign=True)

    def drop(module: nn.Module, *_: Any) -> None:
        module.to("meta")

    layer.register_forward_pre_hook(load)
    layer.register_forward_hook(drop)


def _tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return, in fp32, the tensors whose names begin with ``prefix``; it is removed from names."""
    index = folder / INDEX_FILE
    files = {"model.safetensors"}
    if index.exists():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {file for name, file in places.items() if name.startswith(prefix)}
    loaded = {}
    for file in sorted(files):
        with safe_open(folder / file, "pt") as tensors:
            for name in tensors.keys():
                if name.startswith(prefix):
                    loaded[name.removeprefix(prefix)] = tensors.get_tensor(name).float()
    return loaded
