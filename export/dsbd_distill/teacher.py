"""The target as a teacher: its samples, and its most probable next tokens for any text.

Logits of only a few rows are in memory at a time, at most ``_MOST_LOGITS`` numbers.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.pytorch_utils import Conv1D

from dsbd_distill.lesson import NUM_TOP, Lesson, joined
from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.parts.features import layers_of


class TeacherFeatures:
    """Collects features from the forward passes of a target."""

    def __init__(self, target: PreTrainedModel, layers: Sequence[int], hidden_size: int) -> None:
        self.width = len(layers) * hidden_size
        modules = layers_of(target)
        self._modules = [modules[layer] for layer in layers]
        self._last = modules[max(layers)]

    @contextlib.contextmanager
    def taken(self) -> Iterator[list[Tensor]]:
        """Yield a list; each call of the target appends its features, (B, n, width) bf16."""
        parts: list[Tensor] = []
        entering: dict[nn.Module, Tensor] = {}

        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            entering[module] = hidden.detach().bfloat16()
            if module is self._last:
                parts.append(torch.cat([entering[each] for each in self._modules], dim=-1))

        hooks = [
            module.register_forward_pre_hook(take, with_kwargs=True) for module in {*self._modules}
        ]
        try:
            yield parts
        finally:
            for hook in hooks:
                hook.remove()


_MOST_LOGITS = 2**26  # logits of one call, 256 MiB in fp32
_FEW_LOGITS = 2**23  # the same on a CPU, so that they fit its caches
_MOST_CACHE_BYTES = 2**31  # maximum size of keys and values while sampling


@dataclass(frozen=True)
class TorchDevice:
    """Device on which models are trained and run."""

    name: str
    uses_bf16: bool  # whether products are computed in bf16: if the hardware computes it fast

    def rows_at_once(self, num_labels: int, vocab_size: int) -> int:
        """Return the number of rows computed together, each with ``num_labels`` logit rows."""
        numbers = _FEW_LOGITS if self.name == "cpu" else _MOST_LOGITS
        return max(1, numbers // (num_labels * vocab_size))

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute products in bf16 inside the block, if ``uses_bf16``."""
        with torch.autocast(self.name, dtype=torch.bfloat16, enabled=self.uses_bf16):
            yield

    @contextlib.contextmanager
    def narrow_products(self, model: nn.Module) -> Iterator[None]:
        """Compute ``model`` in bf16 inside the block, if ``uses_bf16``.

        On a CPU only its products are in bf16: autocast would cast all weights in every call, and
        attention for a single query takes several times as long in bf16 as in fp32.
        """
        if self.name != "cpu" or not self.uses_bf16:
            with self.autocast():
                yield
            return
        products = [each for each in model.modules() if type(each) in (nn.Linear, Conv1D)]
        for product in products:
            product.forward = _in_bf16(product)
        try:
            yield
        finally:
            for product in products:
                del product.forward


def _in_bf16(product: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function of a linear layer or a Conv1D with weights and rows in bf16."""
    weight: Any = product.weight.bfloat16()
    bias: Any = None if product.bias is None else product.bias.bfloat16()
    by_output = weight if isinstance(product, nn.Linear) else weight.T
    return lambda rows: F.linear(rows.bfloat16(), by_output, bias).to(rows.dtype)


def best_device() -> TorchDevice:
    """Return the GPU if torch finds one, else the CPU."""
    if torch.cuda.is_available():
        return TorchDevice("cuda", torch.cuda.is_bf16_supported())
    return TorchDevice("cpu", bool(torch.cpu.get_capabilities().get("avx512_bf16")))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn: temperature, then the ``top_k`` most probable, then top-p of those."""

    temperature: float
    top_k: int
    top_p: float = 1.0

    def probs(self, logits: Tensor) -> Tensor:
        """Return probabilities for sorted logits, (..., K) both; tokens that are cut off have 0."""
        probs = (logits / self.temperature).softmax(-1)
        probs[..., self.top_k :] = 0.0
        probs /= probs.sum(-1, keepdim=True)
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= self.top_p, 0.0)
        return probs / probs.sum(-1, keepdim=True)


TEXT_SAMPLING = Sampling(temperature=1.0, top_k=20)
CHAT_SAMPLING = Sampling(temperature=0.7, top_k=NUM_TOP, top_p=0.9)


def num_labels(length: int, vocab_size: int) -> int:
    """Return at how many tokens of a row distributions can be computed at once."""
    return min(length, max(1, _MOST_LOGITS // vocab_size))


Rows = Sequence[NDArray[np.integer]]


@dataclass(frozen=True)
class Opened:
    """Prompts as the target reads them."""

    begins: Rows  # for each row, the tokens before the first drawn token
    name: str  # name of the model's input for tokens
    arguments: dict[str, Any]  # the model's other inputs  # the model's other inputs


@dataclass(frozen=True)
class Teacher:
    """A target, its vocabulary and its device."""

    target: nn.Module
    vocab_size: int
    cache_bytes: int  # size of keys and values per token
    device: TorchDevice
    features: TeacherFeatures | None = None  # collects what a draft reads, if any

    @property
    def spread(self) -> int:
        """Return a number of tokens: prompts answered together differ in length by less."""
        return 64

    def exact(self) -> Self:
        """Return this teacher with products in the precision of the weights."""
        device = dataclasses.replace(self.device, uses_bf16=False)
        return dataclasses.replace(self, device=device)

    @torch.inference_mode()
    def label(self, tokens: NDArray[np.int64], num_labels: int) -> Lesson:
        """Return the distributions after the last tokens of each row, (num_rows, length) int64."""
        at_once = self.device.rows_at_once(num_labels, self.vocab_size)
        begins = range(at_once, len(tokens), at_once)
        return joined([self._labelled(rows, num_labels) for rows in np.split(tokens, begins)])

    def _labelled(self, tokens: NDArray[np.int64], num_labels: int) -> Lesson:
        """Do the same as ``label``, for all rows at once."""
        ids = torch.from_numpy(tokens).to(self.device.name)
        with self._features_taken() as parts, self.device.narrow_products(self.target):
            out = self.target(input_ids=ids, use_cache=False, logits_to_keep=num_labels)
        best, log_probs = self.top(out.logits.float())
        counted = np.ones(best.shape[:2], bool)
        lesson = Lesson(tokens.astype(np.uint32), best, log_probs, counted)
        return lesson if self.features is None else lesson.with_features(parts)

    def _features_taken(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        return contextlib.nullcontext([]) if self.features is None else self.features.taken()

    @torch.inference_mode()
    def sample(
        self, prompts: NDArray[np.int64], length: int, sampling: Sampling, seed: int
    ) -> tuple[NDArray[np.int64], Lesson]:
        """Continue prompts, (num_rows, prompt_length), to ``length`` tokens a row.

        A new text follows an ended one. Returns the rows, (num_rows, length) int64, and as a lesson
        all except their last token.
        """
        num_new = length - prompts.shape[1]
        generator = torch.Generator(self.device.name).manual_seed(seed)
        parts = [
            self.continued([*rows], num_new, sampling, generator, ends=())
            for rows in np.split(prompts, range(0, len(prompts), self._rows_at_once(length))[1:])
        ]
        tokens = np.concatenate([tokens for tokens, _ in parts])
        return tokens, joined([lesson for _, lesson in parts])

    @torch.inference_mode()
    def answer(
        self, prompts: Rows, num_new: int, sampling: Sampling, ends: Sequence[int], seed: int
    ) -> Lesson:
        """Answer prompts of any lengths, each with ``num_new`` tokens or up to one of ``ends``.

        Prompts of similar lengths are answered together without padding: while longer ones are
        still read, tokens are drawn for the shorter ones.
        """
        generator = torch.Generator(self.device.name).manual_seed(seed)
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        groups: list[list[int]] = []
        for row in order:
            shortest = len(prompts[groups[-1][0]]) if groups else -self.spread
            max_rows = self._rows_at_once(len(prompts[row]) + num_new)
            if len(prompts[row]) >= shortest + self.spread or len(groups[-1]) >= max_rows:
                groups.append([])
            groups[-1].append(row)
        parts = [
            self.continued([prompts[row] for row in group], num_new, sampling, generator, ends)[1]
            for group in groups
        ]
        return joined(parts).at(np.argsort(order))

    def _rows_at_once(self, length: int) -> int:
        of_caches = _MOST_CACHE_BYTES // (length * self.cache_bytes)
        return max(1, min(of_caches, _MOST_LOGITS // self.vocab_size))

    def continued(
        self,
        prompts: Rows,
        num_new: int,
        sampling: Sampling,
        generator: torch.Generator,
        ends: Sequence[int],
    ) -> tuple[NDArray[np.int64], Lesson]:
        """Return rows (num_rows, length), and a lesson of all their tokens except the last.

        length is at most that of the longest prompt with its new tokens. Tokens after one of
        ``ends`` do not count.
        """
        opened, name, device = self._opened(prompts), cache_name(self.target), self.device.name
        begins = opened.begins
        lengths = torch.tensor([len(begin) for begin in begins], device=device)
        shortest, longest = int(lengths.min()), int(lengths.max())
        given = torch.from_numpy(padded(begins)).to(device)
        past, pieces = None, [given[:, :shortest]]
        draws = Draws(self, len(begins), sampling, generator, ends)
        with self._features_taken() as parts, self.device.narrow_products(self.target):
            for position in range(shortest, longest + num_new):
                tokens = {opened.name: pieces[-1], name: past}
                out = self.target(**tokens, use_cache=True, **opened.arguments)
                past = in_place(getattr(out, name))
                logits = self._ruled(out.logits[:, -1:].float(), pieces)
                drawn = draws.draw(logits, lengths <= position)
                draws.is_over |= position + 1 >= lengths + num_new
                if position < longest:
                    drawn = torch.where(lengths <= position, drawn, given[:, position])
                pieces.append(drawn[:, None])
                if draws.is_over.all():
                    break
        rows = torch.cat(pieces, dim=1).cpu().numpy()
        lesson = Lesson(rows[:, :-1].astype(np.uint32), *draws.labels())
        return rows, lesson if self.features is None else lesson.with_features(parts)

    def _opened(self, prompts: Rows) -> Opened:
        return Opened(prompts, "input_ids", {"logits_to_keep": 1})

    def _ruled(self, logits: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """Return logits, (B, 1, V), as requests see them after all pieces, (B, n) int64 each."""
        return logits

    def top(self, logits: Tensor) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Return ids and log-probabilities of the most probable tokens for logits (..., vocab)."""
        top = logits.topk(min(NUM_TOP, self.vocab_size))
        log_probs = top.values - logits.logsumexp(-1, keepdim=True)
        return top.indices.cpu().numpy().astype(np.uint32), log_probs.cpu().numpy()


_ROOM = 32  # tokens that a cache has room for when it grows


class InPlaceLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Keys and values of a layer, written into free room; the library copies all in every call."""

    def __init__(self, layer: DynamicLayer) -> None:
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = layer.keys, layer.values
        self._rooms = [layer.keys, layer.values]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        begin, end = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if end > self._rooms[0].shape[2]:
            more = (0, 0, 0, end - begin + _ROOM)
            self._rooms = [F.pad(kept, more) for kept in (self.keys, self.values)]
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, begin:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._rooms)
        return self.keys, self.values


def in_place(cache: Any) -> Any:
    """Return a cache of a model, whose layers that keep all tokens are now ``InPlaceLayer``s."""
    of_decoder = getattr(cache, "self_attention_cache", cache)
    for index, layer in enumerate(getattr(of_decoder, "layers", ())):
        if type(layer) is DynamicLayer:  # no subclasses, because they keep other states
            of_decoder.layers[index] = InPlaceLayer(layer)
    return cache


def padded(rows: Rows) -> NDArray[np.int64]:
    """Return rows in one array, (B, length of the longest); shorter ones end with zeros."""
    result = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return result


class Draws:
    """Tokens drawn for several rows, and the distributions from which they are drawn."""

    def __init__(
        self,
        teacher: Teacher,
        num_rows: int,
        sampling: Sampling,
        generator: torch.Generator,
        ends: Sequence[int],
    ) -> None:
        device = teacher.device.name
        self._teacher = teacher
        self._sampling = sampling
        self._generator = generator
        self._ends = torch.tensor([*ends], dtype=torch.int64, device=device)
        self.is_over = torch.zeros(num_rows, dtype=torch.bool, device=device)  # by row
        self._tops: list[tuple[NDArray[np.uint32], NDArray[np.float32]]] = []
        self._counted: list[Tensor] = []

    def draw(self, logits: Tensor, has_begun: Tensor) -> Tensor:
        """Return a token for each row, (B,) int64, from logits (B, 1, V); has_begun: (B,) bool."""
        teacher, sampling = self._teacher, self._sampling
        self._tops.append(teacher.top(logits))
        draws = has_begun & ~self.is_over
        self._counted.append(draws)
        best = logits[:, -1].topk(min(sampling.top_k, teacher.vocab_size))
        picked = torch.multinomial(sampling.probs(best.values), 1, generator=self._generator)
        drawn = best.indices.gather(-1, picked)[:, 0]
        self.is_over |= draws & torch.isin(drawn, self._ends)
        return drawn

    def labels(self) -> tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.bool_]]:
        """Return ids and log-probabilities, (B, T, NUM_TOP), and which count, (B, T)."""
        ids, log_probs = (
            np.concatenate(arrays, axis=1) for arrays in zip(*self._tops, strict=True)
        )
        return ids, log_probs, torch.stack(self._counted, dim=1).cpu().numpy()
