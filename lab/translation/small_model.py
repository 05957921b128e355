"""Small translators of a synthetic language, trained in minutes: the models inside the twins.

A sentence is words; its translation has a form of each, one of two. Which one depends on the word
before, but for exceptions, whose probability is the word's own: so the best beams differ by the
likeliest exceptions, and a draft is good as far as it knows them. A sentence ends with the end
token, and so does its translation.

The residual stream is as wide as that of the twin, since LayerNorm reads all of it; heads, middle
layers and tokens are few, which is what makes the training short. Modules have the names of
transformers'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.translation.shapes import Shape

NUM_WORDS = 192
FIRST_WORD = 8  # tokens before it are special ones
HEAD_WIDTH = 64
MIDDLE = 128
NUM_LAYERS = 2
NUM_TOKENS = FIRST_WORD + 3 * NUM_WORDS  # words, and two forms of each
LONG, LONG_TARGET = 200, 48  # of every eighth batch: sources, and the part of targets learned
_MOST_EXCEPTIONS, _LEAST_EXCEPTIONS = 0.4, 0.03
_HEAD_CONSTANT = 1.0
_SHARPNESS, _GAIN = 3.0, 1.0  # of attention to sources before the training


class Language:
    """The synthetic language: sources and translations as tokens."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(0)
        self._end = shape.end_token
        order = torch.randperm(NUM_WORDS, generator=generator)
        self.words = FIRST_WORD + torch.arange(NUM_WORDS)
        self.forms = FIRST_WORD + NUM_WORDS + 2 * order[:, None] + torch.arange(2)  # (words, 2)
        self._asks_second = torch.rand(NUM_WORDS, generator=generator) < 0.5
        spread = _MOST_EXCEPTIONS - _LEAST_EXCEPTIONS
        self._exceptions = _LEAST_EXCEPTIONS + spread * torch.rand(NUM_WORDS, generator=generator)

    def sentences(
        self, count: int, length: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return sources and translations, (count, length + 1) both, with their ends."""
        words = torch.randint(NUM_WORDS, (count, length), generator=generator)
        before = torch.roll(words, 1, 1)
        second = self._asks_second[before]
        second[:, 0] = False
        is_exception = torch.rand(count, length, generator=generator) < self._exceptions[words]
        forms = self.forms[words, (second ^ is_exception).long()]
        end = torch.full((count, 1), self._end)
        return torch.cat([self.words[words], end], 1), torch.cat([forms, end], 1)


def places_of_positions(shape: Shape) -> Tensor:
    """Return dimensions, (head width,), by which positions differ most: fast sines and cosines."""
    sines = torch.arange(1, HEAD_WIDTH // 2 + 1) * (shape.width // 512)
    return torch.cat([sines, sines + shape.width // 2])


class Attention(nn.Module):
    """Attention of one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, HEAD_WIDTH)
        self.k_proj = nn.Linear(width, HEAD_WIDTH)
        self.v_proj = nn.Linear(width, HEAD_WIDTH)
        self.out_proj = nn.Linear(HEAD_WIDTH, width)

    def forward(self, x: Tensor, read: Tensor, is_causal: bool) -> Tensor:
        """Return what rows x, (B, T, W), find in rows ``read``, (B, N, W)."""
        query, key, value = self.q_proj(x), self.k_proj(read), self.v_proj(read)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        return self.out_proj(found)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A layer of the encoder, or with ``reads`` one of the decoder."""

    def __init__(self, shape: Shape, *, reads: bool, is_last: bool) -> None:
        super().__init__()
        self._pre_norm, self._activation = shape.pre_norm, shape.activation
        self.self_attn = Attention(shape.width)
        self.self_attn_layer_norm = nn.LayerNorm(shape.width)
        if reads:
            self.encoder_attn = Attention(shape.width)
            self.encoder_attn_layer_norm = nn.LayerNorm(shape.width)
            self._begin_with_own_place(shape)
        self.fc1 = nn.Linear(shape.width, MIDDLE)
        self.fc2 = nn.Linear(MIDDLE, shape.width)
        # An added layer behind this one normalizes once more: that must change nothing.
        free = not shape.pre_norm and not is_last
        self.final_layer_norm = nn.LayerNorm(shape.width, elementwise_affine=not free)

    @torch.no_grad()
    def _begin_with_own_place(self, shape: Shape) -> None:
        """Let every row add what stands at its own position, so that words are learned at once."""
        for projection in (self.encoder_attn.q_proj, self.encoder_attn.k_proj):
            weight = torch.zeros_like(projection.weight)
            weight[torch.arange(HEAD_WIDTH), places_of_positions(shape)] = _SHARPNESS
            projection.weight.copy_(weight)
            projection.bias.zero_()
        nn.init.orthogonal_(self.encoder_attn.v_proj.weight)  # rows of length 1
        gain = _GAIN * math.sqrt(shape.width / HEAD_WIDTH)
        self.encoder_attn.out_proj.weight.copy_(gain * self.encoder_attn.v_proj.weight.T)

    def forward(self, x: Tensor, read: Tensor | None) -> Tensor:
        """Return the rows after this layer, (B, T, W); read: those of a source, (B, N, W)."""
        causal = read is not None
        x = self._added(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, causal))
        if read is not None:
            norm = self.encoder_attn_layer_norm
            x = self._added(x, norm, lambda y: self.encoder_attn(y, read, False))
        return self._added(x, self.final_layer_norm, self._middle)

    def _middle(self, x: Tensor) -> Tensor:
        middle = self.fc1(x)
        return self.fc2(  # type: ignore[no-any-return]
            F.silu(middle) if self._activation == "swish" else F.relu(middle)
        )

    def _added(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self._pre_norm:
            return x + part(norm(x))
        found: Tensor = norm(x + part(x))
        return found


class Stack(nn.Module):
    """An encoder or a decoder."""

    def __init__(self, shape: Shape, num_layers: int, *, reads: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(shape, reads=reads, is_last=index == num_layers - 1)
            for index in range(num_layers)
        )
        if shape.pre_norm:
            self.layer_norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor, read: Tensor | None = None) -> Tensor:
        """Return the last rows, (B, T, W), of embedded tokens."""
        for layer in self.layers:
            x = layer(x, read)
        return self.layer_norm(x) if hasattr(self, "layer_norm") else x

    @property
    def last_norm(self) -> nn.LayerNorm:
        """The norm whose output leaves the stack."""
        norm = self.layer_norm if hasattr(self, "layer_norm") else self.layers[-1].final_layer_norm
        assert isinstance(norm, nn.LayerNorm)
        return norm


class SmallTranslator(nn.Module):
    """A translator of the synthetic language.

    The first dimension of what the head reads is a constant, which no trained token reads: tokens
    that are added to the vocabulary do, and are never likely (``widened``).
    """

    def __init__(
        self, shape: Shape, language: Language, num_decoder_layers: int = NUM_LAYERS
    ) -> None:
        super().__init__()
        self._shape = shape
        self.register_buffer("positions", shape.positions(), persistent=False)
        self.shared = nn.Embedding(NUM_TOKENS, shape.width)
        nn.init.normal_(self.shared.weight, std=shape.width**-0.5)
        with torch.no_grad():  # forms begin as their words, between which the head tells already
            words = self.shared.weight[language.words]
            for number in range(2):
                forms = self.shared.weight[language.forms[:, number]]
                self.shared.weight[language.forms[:, number]] = (words + forms) / math.sqrt(2)
            self.shared.weight[:, places_of_positions(shape)] = 0.0
        self.encoder = Stack(shape, NUM_LAYERS, reads=False)
        self.decoder = Stack(shape, num_decoder_layers, reads=True)
        self.fix_constant()

    @torch.no_grad()
    def fix_constant(self) -> None:
        """Put the constant in its place; called after every step of the training."""
        self.shared.weight[:, 0] = 0.0
        norm = self.decoder.last_norm
        norm.weight[0] = 0.0
        norm.bias[0] = _HEAD_CONSTANT

    def encode(self, sources: Tensor) -> Tensor:
        """Return the hidden states, (B, N, W), of sources (B, N)."""
        found: Tensor = self.encoder(self._embedded(sources))
        return found

    def decode(self, targets: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits (B, T, tokens) that targets (B, T) should have got."""
        begin = targets[:, :-1]
        tokens = self._embedded(begin, follows_start=True)
        found: Tensor = self.decoder(tokens, hidden) @ self.shared.weight.T
        return found

    def _embedded(self, tokens: Tensor, *, follows_start: bool = False) -> Tensor:
        rows = self.shared(tokens) * math.sqrt(self._shape.width)
        if follows_start:
            start = self.shared.weight[self._shape.end_token] * math.sqrt(self._shape.width)
            if self._shape.starts_from_zero:
                start = torch.zeros_like(start)
            rows = torch.cat([start.expand(len(tokens), 1, -1), rows], 1)
        assert isinstance(self.positions, Tensor)  # a buffer
        found: Tensor = rows + self.positions[: rows.shape[1]]
        return found


@dataclass(frozen=True)
class Progress:
    """A step of a training, and the mean loss of a token."""

    step: int
    loss: float


def batches(language: Language, num_steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sources and targets; every eighth batch long sources, and how their targets begin."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        if step % 8 == 7:
            sources, targets = language.sentences(4, LONG, generator)
            yield sources, targets[:, :LONG_TARGET]
        else:
            length = int(torch.randint(6, 33, (), generator=generator))
            yield language.sentences(32, length, generator)


def train(
    model: SmallTranslator,
    language: Language,
    num_steps: int,
    *,
    target: SmallTranslator | None = None,
    seed: int = 1,
    rate: float = 1e-3,
) -> Iterator[Progress]:
    """Train a model in place, and yield how far it is.

    target: of a draft, whose embedding and encoder are this one's: the model that it is to follow.
    """
    parts = model if target is None else model.decoder
    optimizer = torch.optim.AdamW(parts.parameters(), lr=rate, weight_decay=0.0)
    warm = max(1, num_steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (num_steps - step) / (num_steps - warm))
    )
    for step, (sources, targets) in enumerate(batches(language, num_steps, seed)):
        if target is None:
            logits = model.decode(targets, model.encode(sources))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        else:
            with torch.no_grad():
                hidden = target.encode(sources)
                wanted = target.decode(targets, hidden).softmax(-1)
            logits = model.decode(targets, hidden)
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.fix_constant()
        yield Progress(step, float(loss.detach()))
