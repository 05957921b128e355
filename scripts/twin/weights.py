"""Twin tensors: the trained weights, surrounded by random weights that do not change the logits.

``twin_config`` determines the shape of a twin with a given number of parameters.

The residual stream gets further dimensions that stay zero: the embedding and the output projections
(o_proj, down_proj) write nothing there. RMSNorm then divides by a mean over more dimensions. Its
weights and eps (see ``norm_eps``) compensate for that: with r = new / old hidden size,
x / sqrt(mean(x^2) / r + eps / r) * w / sqrt(r) equals the trained model's result.

Added heads, head dimensions and MLP rows have random weights, so they cost as much as trained ones
and have similar values. The output projections' columns that would read them are zero. Dimension i
of a trained head is dimension k * i of a head that is k times as wide, because it has the same
rotary frequency there.

An added layer is a widened copy of a trained layer whose output projections are zero.

Added tokens (``AddedTokens``) need logits far below all others: with a row of zeros, a token would
have logit 0, and 150,000 such tokens would have most of the probability. The first added hidden
dimension has a constant c at every token. Layers do not read it, because their norms' weights are 0
there. It adds c^2 / hidden size to the norms' mean, and the norms' eps is smaller by the same
amount, so that the trained logits do not change. With eps 1e-5 and hidden sizes 160 and 512,
c = 2^-6 and eps = (1e-5 * 160 - 2^-12) / 512. The head reads the constant only for added tokens.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import click
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

MLP_MULTIPLE = 32  # divides the intermediate size: the block size of 4-bit weights
MAX_HEAD_DIM = 128
MAX_EXCESS = 0.1  # share by which parameters may exceed the requested number
MOST_EMBEDDINGS = 0.8  # maximum share of embeddings in the parameters
MOST_ADDED_LOGIT = -200.0  # maximum logit of an added token: its exponential is 0 in fp32
HEAD_WIDENING = 4  # its square root is exact, so widened queries stay exact in half precision


@dataclass(frozen=True)
class Step:
    """Hidden size (or a few heads more) and depth of twins with ``num_params`` or more."""

    num_params: int
    hidden_size: int
    num_layers: int


# Shapes of common models: Qwen3-0.6B has 1024, Llama-3.2 2048 x 16 and 3072 x 28,
# Llama-3.1-8B 4096 x 32. The intermediate size is chosen to reach the number of parameters.
LADDER = (
    Step(0, 320, 7),
    Step(30_000_000, 512, 8),
    Step(75_000_000, 1024, 12),
    Step(300_000_000, 1280, 24),
    Step(750_000_000, 2048, 16),
    Step(2_000_000_000, 3072, 28),
    Step(5_000_000_000, 4096, 32),
)


def params_from_text(text: str) -> int:
    """Return the number written as 150M, 1.5B or plain digits."""
    unit = {"M": 10**6, "B": 10**9}.get(text[-1:].upper())
    try:
        number = float(text[:-1]) * unit if unit else int(text)
    except (ValueError, OverflowError):
        number = 0
    if not 0 < number < 10**12:
        raise click.BadParameter(f"{text!r} is not a number of parameters; give one such as 150M")
    return round(number)


def twin_config(
    source: LlamaConfig,
    num_params: int,
    context: int | None = None,
    vocab_size: int | None = None,
) -> LlamaConfig:
    """Return the config of a twin of ``source`` with about ``num_params`` parameters.

    With ``vocab_size`` the twin has more tokens than the source, and its hidden size leaves room
    for parameters other than their embeddings.

    Raises:
        click.UsageError: the source is too large for so few parameters, or is not a plain Llama.
    """
    _check_source(source)
    num_tokens = _num_tokens(source, vocab_size)
    num_embeddings = num_tokens * (1 if source.tie_word_embeddings else 2)
    step = _step(num_params, num_embeddings)
    head_dim = _head_dim(source, step.hidden_size)
    group = source.num_attention_heads // source.num_key_value_heads  # heads per key and value
    num_kv_heads = max(source.num_key_value_heads, math.ceil(step.hidden_size / (group * head_dim)))
    hidden_size = group * num_kv_heads * head_dim
    attention = 2 * (group + 1) * num_kv_heads * head_dim  # weights per hidden dimension
    rest = num_params / hidden_size - num_embeddings - step.num_layers * attention
    num_blocks = round(rest / (3 * step.num_layers * MLP_MULTIPLE))
    config = LlamaConfig(
        **{
            **source.to_dict(),
            "vocab_size": num_tokens,
            "hidden_size": hidden_size,
            "num_hidden_layers": step.num_layers,
            "intermediate_size": max(num_blocks * MLP_MULTIPLE, source.intermediate_size),
            "num_attention_heads": num_kv_heads * group,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": norm_eps(source, hidden_size, num_tokens > source.vocab_size),
            "max_position_embeddings": context or source.max_position_embeddings,
            "dtype": "float32",  # the norms' type: loading in half precision would round them
        }
    )
    _check_room(source, config, num_params)
    return config


def norm_eps(source: LlamaConfig, hidden_size: int, adds_tokens: bool) -> float:
    """Return the eps with which norms over ``hidden_size`` dimensions equal the source's."""
    constant = added_token_constant(source) if adds_tokens else 0.0
    return float((source.rms_norm_eps * source.hidden_size - constant**2) / hidden_size)


def added_token_constant(source: LlamaConfig) -> float:
    """Return a power of two whose square is 1/8 to 1/2 of the norms' eps times the hidden size.

    Every type of weights represents it exactly. Another constant, rounded to fp16, would give the
    eps a relative error of 3e-4, and log-probabilities of a model with small residuals an error of
    1e-4.
    """
    exponent = math.log2(source.rms_norm_eps * source.hidden_size / 2) / 2
    return float(2.0 ** math.floor(exponent))


def _num_tokens(source: LlamaConfig, vocab_size: int | None) -> int:
    if vocab_size is not None and vocab_size <= source.vocab_size:
        raise click.UsageError(
            f"a vocabulary of {vocab_size:,} was wanted, the trained model has "
            f"{source.vocab_size:,}; ask for more, or leave it out"
        )
    return int(vocab_size or source.vocab_size)


def _step(num_params: int, num_embeddings: int) -> Step:
    """Return the largest step for ``num_params`` in which embeddings leave room for others."""
    reached = [step for step in LADDER if step.num_params <= num_params]
    room = MOST_EMBEDDINGS * num_params
    fitting = [step for step in reached if step.hidden_size * num_embeddings <= room]
    return (fitting or reached[:1])[-1]


def _head_dim(source: LlamaConfig, hidden_size: int) -> int:
    wide = source.head_dim * HEAD_WIDENING
    fits = wide <= MAX_HEAD_DIM and source.num_attention_heads * wide <= hidden_size
    return int(wide if fits else source.head_dim)


def _check_source(source: LlamaConfig) -> None:
    rope_type = source.rope_parameters["rope_type"]
    wanted = {
        "model_type": (source.model_type, "llama"),
        "rope_type": (rope_type, "default"),
        "attention_bias": (source.attention_bias, False),
        "mlp_bias": (source.mlp_bias, False),
    }
    for name, (value, expected) in wanted.items():
        if value != expected:
            raise click.UsageError(
                f"the trained model's {name} is {value!r}, a twin needs {expected!r}; "
                "give another pair"
            )


def _check_room(source: LlamaConfig, config: LlamaConfig, num_params: int) -> None:
    for name in ("hidden_size", "num_hidden_layers"):
        least, value = getattr(source, name), getattr(config, name)
        if value < least:
            raise click.UsageError(
                f"a twin of {num_params:,} parameters would have {name} {value}, the trained model "
                f"has {least}; ask for more parameters"
            )
    if config.vocab_size > source.vocab_size and config.hidden_size == source.hidden_size:
        raise click.UsageError(
            f"a twin with more tokens needs a hidden size above the trained {source.hidden_size}; "
            "ask for more parameters"
        )
    smallest = num_params_of(config)
    if smallest > num_params * (1 + MAX_EXCESS):
        raise click.UsageError(
            f"a twin of {num_params:,} parameters has no room for the trained MLPs; ask for "
            f"{smallest:,} or more"
        )


def num_params_of(config: LlamaConfig) -> int:
    """Return the number of parameters; tied parameters are counted once."""
    with torch.device("meta"):
        return int(LlamaForCausalLM(config).num_parameters())


@dataclass(frozen=True)
class AddedTokens:
    """Constant in the residual, and its weights, that keep added tokens out of the distribution.

    Attributes:
        dimension: the hidden dimension that has the constant.
        constant: value of every token's embedding in this dimension; its square divided by the
            hidden size is subtracted from the norms' eps in the twin's config.
        norm_weight: weight of the last norm; its output there is 1 at the median residual.
        head_weight: weight of added tokens; their logit is ``MOST_ADDED_LOGIT`` at the largest
            residual.
    """

    dimension: int
    constant: float
    norm_weight: float
    head_weight: float

    @classmethod
    def of(cls, old: LlamaConfig, new: LlamaConfig, residual: Tensor) -> AddedTokens | None:
        """Return the constant and weights of a twin, None if it has no added tokens.

        residual: (..., old hidden size). Inputs of the trained model's last norm.
        """
        if new.vocab_size == old.vocab_size:
            return None
        constant = added_token_constant(old)
        mean_square = residual.square().mean(-1) * (old.hidden_size / new.hidden_size)
        size = mean_square.sqrt()  # the norm divides by this, up to a relative error of 1e-6
        return cls(
            dimension=old.hidden_size,
            constant=constant,
            norm_weight=float(size.median()) / constant,
            head_weight=MOST_ADDED_LOGIT * float(size.max() / size.median()),
        )


@dataclass(frozen=True)
class Placement:
    """Place of the trained part in a matrix.

    Attributes:
        rows, columns: names of axes.
        stays_zero: whether added weights must be zero because they would change the logits.
    """

    rows: str
    columns: str
    stays_zero: bool = False


PLACEMENTS = {
    "embed_tokens": Placement("vocab", "hidden", stays_zero=True),
    "q_proj": Placement("query", "hidden"),
    "k_proj": Placement("key", "hidden"),
    "v_proj": Placement("key", "hidden"),
    "o_proj": Placement("hidden", "query", stays_zero=True),
    "gate_proj": Placement("mlp", "hidden"),
    "up_proj": Placement("mlp", "hidden"),
    "down_proj": Placement("hidden", "mlp", stays_zero=True),
    "lm_head": Placement("vocab", "hidden"),
}


class TwinWeights:
    """Makes the tensors of a twin by name, one at a time, each with a separate seed."""

    def __init__(
        self,
        source: Mapping[str, Tensor],
        old: LlamaConfig,
        new: LlamaConfig,
        seed: int,
        added_tokens: AddedTokens | None = None,
    ) -> None:
        """Take the trained tensors in fp32, both configs, and the weights for added tokens."""
        self._added_tokens = added_tokens
        self._source = source
        self._old = old
        self._new = new
        self._seed = seed
        self._axes = _axes(old, new)  # by name: indices of the trained part
        self._matrix_dtype = old.dtype or torch.float32

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        """Return the tensor ``name`` of the twin.

        Matrices have the type of the trained checkpoint: their numbers are the trained ones, or
        these times a power of two. Norms are fp32, because their weights are divided by a root.
        """
        source_name, is_added_layer = self._trained_name(name)
        trained = self._source[source_name]
        if len(shape) == 1:
            return self._norm(name, trained, shape)
        kind = name.split(".")[-2]
        placement = PLACEMENTS[kind]
        if is_added_layer and placement.stays_zero:
            return torch.zeros(shape, dtype=self._matrix_dtype)
        widened = self._around(name, trained, shape, placement)
        if kind == "q_proj":  # attention divides by the root of the head's width
            trained = trained * math.sqrt(self._new.head_dim / self._old.head_dim)
        if kind == "k_proj":  # for random query dimensions of trained heads the keys are zero
            widened[: self._old.num_key_value_heads * self._new.head_dim] = 0.0
            widened[self._axes["key"]] = self._around(
                name, trained, torch.Size((len(trained), shape[1])), placement
            )
        rows, columns = self._axes[placement.rows], self._axes[placement.columns]
        widened[rows[:, None], columns] = trained
        if self._added_tokens is not None and placement.rows == "vocab":
            self._exclude_added_tokens(widened, kind)
        return widened.to(self._matrix_dtype)

    def _trained_name(self, name: str) -> tuple[str, bool]:
        parts = name.split(".")
        if parts[1] != "layers":
            return name, False
        index, count = int(parts[2]), self._old.num_hidden_layers
        parts[2] = str(index % count)
        return ".".join(parts), index >= count

    def _exclude_added_tokens(self, widened: Tensor, kind: str) -> None:
        """Set the constant of all tokens, or the head's weight of added tokens, or both.

        If the embedding is also the head, all trained tokens' logits increase by the same amount:
        the norm's output in this dimension, about 1, times c. Their differences do not change.
        """
        assert self._added_tokens is not None  # the caller has checked
        column = self._added_tokens.dimension
        is_head = kind == "lm_head" or self._new.tie_word_embeddings
        widened[:, column] = self._added_tokens.constant if kind == "embed_tokens" else 0.0
        if is_head:
            widened[self._old.vocab_size :] = 0.0
            widened[self._old.vocab_size :, column] = self._added_tokens.head_weight

    def _norm(self, name: str, trained: Tensor, shape: torch.Size) -> Tensor:
        scale = math.sqrt(len(trained) / shape[0])
        widened = torch.full(shape, scale)
        widened[: len(trained)] = trained * scale
        if self._added_tokens is not None:
            is_last = name == "model.norm.weight"
            widened[self._added_tokens.dimension] = (
                self._added_tokens.norm_weight if is_last else 0.0
            )
        return widened

    def _around(
        self, name: str, trained: Tensor, shape: torch.Size, placement: Placement
    ) -> Tensor:
        """Return the weights around the trained part: zeros, or random weights of its magnitude.

        They are uniform up to the root mean square of the trained weights. So no added weight or
        activation is an outlier, and scales of quantized rows and tokens are not affected.
        """
        if placement.stays_zero:
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        bound = float(trained.square().mean().sqrt())
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _axes(old: LlamaConfig, new: LlamaConfig) -> dict[str, Tensor]:
    """Return the indices of the trained entries in each widened axis, by the axis's name."""
    stride = new.head_dim // old.head_dim

    def heads(count: int) -> Tensor:
        starts = torch.arange(count)[:, None] * new.head_dim
        places: Tensor = starts + stride * torch.arange(old.head_dim)  # (count, old head_dim)
        return places.flatten()

    return {
        "vocab": torch.arange(old.vocab_size),
        "hidden": torch.arange(old.hidden_size),
        "mlp": torch.arange(old.intermediate_size),
        "query": heads(old.num_attention_heads),
        "key": heads(old.num_key_value_heads),
    }
