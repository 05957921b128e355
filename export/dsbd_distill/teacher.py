"""The target as a teacher: its own samples, and its most probable next tokens of any text.

The target's distributions are kept as the ``NUM_TOP`` most probable tokens and one bucket for all
others. Its logits exist for a few rows at a time, ``_MOST_LOGITS`` numbers at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dsbd_distill.teacher_features import FeatureRows, TeacherFeatures, packed, unpacked
from dsbd_export.checkpoints.model_loading import cache_name

NUM_TOP = 32
_MOST_LOGITS = 2**26  # numbers of one call, 256 MiB in fp32
_FEW_LOGITS = 2**23  # the same on a CPU, whose caches they should fit
_MOST_CACHE_BYTES = 2**29  # of keys and values while sampling


@dataclass(frozen=True)
class TorchDevice:
    """Where models are trained and run.

    Attributes:
        name: of torch: "cpu" or "cuda".
        uses_bf16: whether products are computed in bf16, which the hardware must be good at.
    """

    name: str
    uses_bf16: bool

    def rows_at_once(self, num_labels: int, vocab_size: int) -> int:
        """Return how many rows with logits of so many tokens are computed together."""
        numbers = _FEW_LOGITS if self.name == "cpu" else _MOST_LOGITS
        return max(1, numbers // (num_labels * vocab_size))

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute products in bf16 inside the block, where the hardware is good at it."""
        with torch.autocast(self.name, dtype=torch.bfloat16, enabled=self.uses_bf16):
            yield


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
        """Return the probabilities of the most probable tokens, (..., K), zero for those cut off.

        logits: (..., K). Those of the tokens, up to a constant, the most probable first.
        """
        probs = (logits / self.temperature).softmax(-1)
        probs[..., self.top_k :] = 0.0
        probs /= probs.sum(-1, keepdim=True)
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= self.top_p, 0.0)
        return probs / probs.sum(-1, keepdim=True)


TEXT_SAMPLING = Sampling(temperature=1.0, top_k=20)
CHAT_SAMPLING = Sampling(temperature=0.7, top_k=NUM_TOP, top_p=0.9)


@dataclass(frozen=True)
class Labelled:
    """Token rows, and the teacher's distributions behind the last ``num_labels`` of each.

    Attributes:
        tokens: (num_rows, length) uint32. Shorter rows end with zeros.
        ids: (num_rows, num_labels, NUM_TOP) uint32. The most probable tokens, best first.
        log_probs: (num_rows, num_labels, NUM_TOP) float32. Theirs, in the full distribution.
        counted: (num_rows, num_labels) bool. Whether there is a distribution to learn from: not
            inside a chat prompt, nor behind the end of an answer.
        features: of each row, (n, width), where a draft reads them: of its tokens up to the last
            one that counts, that one left out.
    """

    tokens: NDArray[np.uint32]
    ids: NDArray[np.uint32]
    log_probs: NDArray[np.float32]
    counted: NDArray[np.bool_]
    features: FeatureRows | None = None

    def batch(self, rows: NDArray[np.int64], device: TorchDevice) -> tuple[Tensor, ...]:
        """Return tokens, ids, log-probabilities, counted, and features if any, of ``rows``.

        Labels before the first and behind the last that counts are left out, and tokens behind it.
        """
        used = np.flatnonzero(self.counted[rows].any(0))
        labels = slice(used[0], used[-1] + 1)
        length = self.tokens.shape[1] - self.counted.shape[1] + labels.stop
        features: list[Tensor] = []
        if self.features is not None:
            chosen = [self.features[row] for row in rows]
            features.append(unpacked(chosen, length - 1, device.name))
        return (
            torch.from_numpy(self.tokens[rows, :length].astype(np.int64)).to(device.name),
            torch.from_numpy(self.ids[rows, labels].astype(np.int64)).to(device.name),
            torch.from_numpy(self.log_probs[rows, labels]).to(device.name),
            torch.from_numpy(self.counted[rows, labels]).to(device.name),
            *features,
        )

    def within(self, length: int, num_labels: int) -> Labelled:
        """Return the rows in more room: of ``length`` tokens, with ``num_labels`` labels each.

        With 5 tokens and 2 labels, 7 and 5 put two tokens behind, one label before, two behind.
        """
        behind = length - self.tokens.shape[1]
        before = num_labels - behind - self.counted.shape[1]
        labels = ((0, 0), (before, behind))
        return Labelled(
            np.pad(self.tokens, ((0, 0), (0, behind))),
            np.pad(self.ids, (*labels, (0, 0))),
            np.pad(self.log_probs, (*labels, (0, 0))),
            np.pad(self.counted, labels),
            self.features,
        )

    def with_features(self, parts: Sequence[Tensor]) -> Labelled:
        """Return the rows with the features of all their tokens, (num_rows, n, width) a part."""
        features = np.concatenate([packed(part) for part in parts], axis=1)
        lengths = read_lengths(self.tokens, self.counted)
        rows = (row[:length] for row, length in zip(features, lengths.tolist(), strict=True))
        return dataclasses.replace(self, features=tuple(rows))


def read_lengths(tokens: NDArray[np.integer], counted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return how many features rows have: one less than tokens up to the last that counts.

    tokens: (num_rows, length). counted: (num_rows, num_labels), behind the last of them.
    """
    behind = counted[:, ::-1].argmax(1)
    lengths: NDArray[np.int64] = tokens.shape[1] - behind - 1
    return lengths


def joined(parts: Sequence[Labelled]) -> Labelled:
    """Return the rows of all parts, one behind the other, in the room that all of them need."""
    length = max(part.tokens.shape[1] for part in parts)
    begins = [part.tokens.shape[1] - part.counted.shape[1] for part in parts]
    wide = [part.within(length, length - min(begins)) for part in parts]
    arrays = ((part.tokens, part.ids, part.log_probs, part.counted) for part in wide)
    rows = [row for part in parts for row in part.features or ()]
    features = None if parts[0].features is None else tuple(rows)
    tokens, ids, log_probs, counted = map(np.concatenate, zip(*arrays, strict=True))
    return Labelled(tokens, ids, log_probs, counted, features)


def num_labels(length: int, vocab_size: int) -> int:
    """Return behind how many tokens of a row distributions can be had at once."""
    return min(length, max(1, _MOST_LOGITS // vocab_size))


class Teacher:
    """A target, its vocabulary and its device.

    Attributes:
        target: in evaluation mode, on the device.
        vocab_size: of its logits.
        device: where it is.
        features: what a draft reads of the target beside its tokens, kept with them; None: nothing.
        spread: tokens by which prompts that are answered together differ, less one at most.
    """

    spread = 64

    def __init__(
        self,
        target: nn.Module,
        vocab_size: int,
        cache_bytes: int,
        device: TorchDevice,
        features: TeacherFeatures | None = None,
    ) -> None:
        """Take a target.

        cache_bytes: of keys and values of a token.
        """
        self.target = target
        self.vocab_size = vocab_size
        self._cache_bytes = cache_bytes
        self.device = device
        self.features = features

    @torch.inference_mode()
    def label(self, tokens: NDArray[np.int64], num_labels: int) -> Labelled:
        """Return the distributions behind the last tokens of each row, (num_rows, length) int64."""
        at_once = self.device.rows_at_once(num_labels, self.vocab_size)
        begins = range(at_once, len(tokens), at_once)
        return joined([self._labelled(row, num_labels) for row in np.split(tokens, begins)])

    def _labelled(self, tokens: NDArray[np.int64], num_labels: int) -> Labelled:
        """As ``label``, of all rows at once."""
        with self._features_taken() as parts:
            ids, log_probs = self.top(self._logits(torch.from_numpy(tokens), num_labels))
        counted = np.ones(ids.shape[:2], bool)
        found = Labelled(tokens.astype(np.uint32), ids, log_probs, counted)
        return found if self.features is None else found.with_features(parts)

    def _features_taken(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Return what yields the features of each call of the target, or nothing."""
        if self.features is None:
            return contextlib.nullcontext([])
        return self.features.taken()

    @torch.inference_mode()
    def sample(
        self, prompts: NDArray[np.int64], length: int, sampling: Sampling, seed: int
    ) -> tuple[NDArray[np.int64], Labelled]:
        """Continue texts until every row has ``length`` tokens.

        The end-of-sequence token does not stop a row: what follows it is a new text.

        Args:
            prompts: (num_rows, prompt_length) int64.
            length: of the rows, prompts included.
            sampling: how tokens are drawn.
            seed: of the draws.

        Returns:
            The rows, (num_rows, length) int64; and the rows without their last token, with the
            distribution behind every token from the last of the prompt on.
        """
        num_new = length - prompts.shape[1]
        generator = torch.Generator(self.device.name).manual_seed(seed)
        parts = [
            self.continued([*rows], num_new, sampling, generator, ends=())
            for rows in np.split(prompts, range(0, len(prompts), self._rows_at_once(length))[1:])
        ]
        tokens = np.concatenate([tokens for tokens, _ in parts])
        return tokens, joined([labelled for _, labelled in parts])

    @torch.inference_mode()
    def answer(
        self,
        prompts: Sequence[NDArray[np.integer]],
        num_new: int,
        sampling: Sampling,
        ends: Sequence[int],
        seed: int,
    ) -> Labelled:
        """Answer prompts of any lengths, each with ``num_new`` tokens or up to one of ``ends``.

        Prompts of about one length are answered together, without padding before them, which not
        every family of models can leave out of account: rows whose prompt is longer than the
        shortest read its tokens where the others draw theirs.

        Returns:
            The distributions behind the last token of each prompt and behind those of its answer
            but the last.
        """
        generator = torch.Generator(self.device.name).manual_seed(seed)
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        groups: list[list[int]] = []
        for row in order:
            shortest = len(prompts[groups[-1][0]]) if groups else -self.spread
            most = self._rows_at_once(len(prompts[row]) + num_new)
            if len(prompts[row]) >= shortest + self.spread or len(groups[-1]) >= most:
                groups.append([])
            groups[-1].append(row)
        parts = [
            self.continued([prompts[row] for row in group], num_new, sampling, generator, ends)[1]
            for group in groups
        ]
        found, places = joined(parts), np.argsort(order)
        features = found.features
        return Labelled(
            found.tokens[places],
            found.ids[places],
            found.log_probs[places],
            found.counted[places],
            None if features is None else tuple(features[place] for place in places),
        )

    def _rows_at_once(self, length: int) -> int:
        """Return how many rows of a length are sampled together."""
        of_caches = _MOST_CACHE_BYTES // (length * self._cache_bytes)
        return max(1, min(of_caches, _MOST_LOGITS // self.vocab_size))

    def continued(
        self,
        prompts: Sequence[NDArray[np.integer]],
        num_new: int,
        sampling: Sampling,
        generator: torch.Generator,
        ends: Sequence[int],
    ) -> tuple[NDArray[np.int64], Labelled]:
        """Return rows (num_rows, length), and all but their last token with the distributions.

        length: of the longest prompt with its new tokens, or less where all rows have ended. What
        a row has behind its own end does not count.
        """
        name, device = cache_name(self.target), self.device.name
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        given = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64, device=device)
        for row, prompt in zip(given, prompts, strict=True):
            row[: len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
        shortest, longest = int(lengths.min()), int(lengths.max())
        past, pieces = None, [given[:, :shortest]]
        draws = Draws(self, len(prompts), sampling, generator, ends)
        with self._features_taken() as parts:
            for position in range(shortest, longest + num_new):
                with self.device.autocast():
                    out = self.target(
                        input_ids=pieces[-1], use_cache=True, logits_to_keep=1, **{name: past}
                    )
                past = getattr(out, name)
                drawn = draws.draw(out.logits.float(), lengths <= position)
                draws.end(position + 1 >= lengths + num_new)
                if position < longest:
                    drawn = torch.where(lengths <= position, drawn, given[:, position])
                pieces.append(drawn[:, None])
                if draws.are_over:
                    break
        tokens = torch.cat(pieces, dim=1).cpu().numpy()
        found = Labelled(tokens[:, :-1].astype(np.uint32), *draws.labels())
        return tokens, found if self.features is None else found.with_features(parts)

    def _logits(self, tokens: Tensor, num_labels: int) -> Tensor:
        with self.device.autocast():
            out = self.target(
                input_ids=tokens.to(self.device.name), use_cache=False, logits_to_keep=num_labels
            )
        logits: Tensor = out.logits.float()
        return logits

    def top(self, logits: Tensor) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Return ids and log-probabilities of the most probable tokens of (..., vocab) logits."""
        top = logits.topk(min(NUM_TOP, self.vocab_size))
        log_probs = top.values - logits.logsumexp(-1, keepdim=True)
        return top.indices.cpu().numpy().astype(np.uint32), log_probs.cpu().numpy()


class Draws:
    """Tokens that are drawn for several rows, and the distributions that they are drawn from."""

    def __init__(
        self,
        teacher: Teacher,
        num_rows: int,
        sampling: Sampling,
        generator: torch.Generator,
        ends: Sequence[int],
    ) -> None:
        """Take a teacher; see ``Teacher.continued``."""
        device = teacher.device.name
        self._teacher = teacher
        self._sampling = sampling
        self._generator = generator
        self._ends = torch.tensor([*ends], dtype=torch.int64, device=device)
        self._is_over = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._tops: list[tuple[NDArray[np.uint32], NDArray[np.float32]]] = []
        self._counted: list[Tensor] = []

    def draw(self, logits: Tensor, has_begun: Tensor | None = None) -> Tensor:
        """Return a token for each row, (B,) int64.

        logits: (B, 1, V) float32. has_begun: (B,) bool. Rows that draw, and not yet read their
        prompt; None: all.
        """
        teacher, sampling = self._teacher, self._sampling
        self._tops.append(teacher.top(logits))
        draws = ~self._is_over if has_begun is None else has_begun & ~self._is_over
        self._counted.append(draws)
        best = logits[:, -1].topk(min(sampling.top_k, teacher.vocab_size))
        picked = torch.multinomial(sampling.probs(best.values), 1, generator=self._generator)
        drawn = best.indices.gather(-1, picked)[:, 0]
        self._is_over = self._is_over | (draws & torch.isin(drawn, self._ends))
        return drawn

    def end(self, rows: Tensor) -> None:
        """End rows, (B,) bool."""
        self._is_over = self._is_over | rows

    @property
    def are_over(self) -> bool:
        """Return whether all rows have ended."""
        return bool(self._is_over.all())

    def labels(self) -> tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.bool_]]:
        """Return ids and log-probabilities, (B, T, NUM_TOP), and which count, (B, T)."""
        ids, log_probs = (
            np.concatenate(arrays, axis=1) for arrays in zip(*self._tops, strict=True)
        )
        return ids, log_probs, torch.stack(self._counted, dim=1).cpu().numpy()
