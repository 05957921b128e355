"""The model: a small Llama that continues a query with the id of a document."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from documents import Document
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

QUERY_ENDS = "<id>"
"""Token after a query; the id follows it."""
_PAD, _END = "<pad>", "<end>"
_LONGEST = 48  # maximum tokens of a query or of a part of a document
_IGNORED = -100  # label of a position without loss
_NAME_WORDS = 6  # words of a document's name, which come first
_SORTED = 16  # number of batches whose rows are sorted by length together
Row = tuple[list[int], list[int]]
"""Tokens of a text, including ``QUERY_ENDS``, and tokens of its document's id."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Sizes and length of the training; it ends after ``minutes`` or ``steps``."""

    vocabulary: int = 4096
    width: int = 192
    layers: int = 4
    batch: int = 96
    minutes: float = 25.0
    steps: int = 1_000_000
    learning_rate: float = 2e-3
    seed: int = 0


def id_token(level: int, number: int) -> str:
    """Return the token of one number of an id."""
    return f"<{level}:{number}>"


def train_tokenizer(
    documents: Sequence[Document], ids: Sequence[tuple[int, ...]], vocabulary: int
) -> Tokenizer:
    """Return a byte-level BPE of the documents' words, with a token for each number of an id."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()  # like the words of documents
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    numbers = sorted({pair for each in ids for pair in enumerate(each)})
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_PAD, _END, QUERY_ENDS, *(id_token(*pair) for pair in numbers)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for each in documents for text in (each.query, " ".join(each.words)))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Examples:
    """Draws training examples: a text, and the id of its document."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        documents: Sequence[Document],
        ids: Sequence[tuple[int, ...]],
        is_held_out: np.ndarray,
        seed: int,
    ) -> None:
        """is_held_out: (num_documents,) bool. Documents whose queries are not used for training."""
        self._rng = np.random.default_rng(seed)
        self._tokenizer = tokenizer
        self._documents = documents
        self._queries = np.flatnonzero(~is_held_out)
        self._answers = [
            [tokenizer.token_to_id(id_token(*pair)) for pair in enumerate(each)] for each in ids
        ]
        self._query_ends = tokenizer.token_to_id(QUERY_ENDS)

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield tokens and labels, (size, longest) int64 each, without end.

        Rows of a batch have similar lengths, because padding costs as much as tokens.
        """
        while True:
            rows = sorted(self._rows(size * _SORTED), key=lambda row: len(row[0]))
            for part in self._rng.permutation(_SORTED):
                yield _padded(rows[part * size : (part + 1) * size])

    def _rows(self, number: int) -> list[Row]:
        """Return texts and the ids of their documents; half of the texts are queries."""
        rows = []
        for place in range(number):
            if place % 2 and len(self._queries):
                index = int(self._rng.choice(self._queries))
                text = self._documents[index].query
            else:
                index = int(self._rng.integers(len(self._documents)))
                text = self._some_words(self._documents[index].words)
            tokens = self._tokenizer.encode(text).ids[:_LONGEST]
            rows.append(([*tokens, self._query_ends], self._answers[index]))
        return rows

    def _some_words(self, words: Sequence[str]) -> str:
        """Return some words of a document, like a query has: mostly words of its name."""
        number = min(int(self._rng.integers(3, 16)), len(words))
        chances = 1 / (_NAME_WORDS + np.arange(len(words)))
        places = self._rng.choice(len(words), number, replace=False, p=chances / chances.sum())
        return " ".join(words[place] for place in places)


def _padded(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of rows; the text and the padding have no label."""
    longest = max(len(text) + len(answer) for text, answer in rows)
    inputs = torch.zeros((len(rows), longest), dtype=torch.long)
    labels = torch.full((len(rows), longest), _IGNORED)
    for row, (text, answer) in enumerate(rows):
        whole = torch.tensor([*text, *answer])
        inputs[row, : len(whole)] = whole
        labels[row, len(text) : len(whole)] = whole[len(text) :]
    return inputs, labels


def _loss(model: LlamaForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the labels; the head is computed only for labelled rows."""
    hidden = model.model(input_ids=inputs[:, :-1]).last_hidden_state
    is_labelled = labels[:, 1:] != _IGNORED
    logits = model.lm_head(hidden[is_labelled])
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:][is_labelled])


def train(tokenizer: Tokenizer, examples: Examples, options: TrainingOptions) -> LlamaForCausalLM:
    """Return the trained model; print the loss during training."""
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=options.width,
            intermediate_size=3 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=max(options.width // 32, 1),
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    batches = examples.batches(options.batch)
    began, mean = time.monotonic(), math.nan
    for step in range(options.steps):
        share = max(step / options.steps, (time.monotonic() - began) / (60 * options.minutes))
        if share >= 1.0:
            break
        rate = min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * rate
        loss = _loss(model, *next(batches))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.item() if math.isnan(mean) else 0.98 * mean + 0.02 * loss.item()
        if step % 200 == 0:
            print(f"step {step}, {share:.0%}: {mean:.3f} nats a number", flush=True)
    return model


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a checkpoint in the layout of Hugging Face."""
    model.to(torch.float16).save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_END,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)
