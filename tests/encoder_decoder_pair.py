"""Tiny encoder-decoders: their bundles, sources, and what transformers generates from them."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSeq2SeqLM

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from scripts.family_checkpoints import tiny_tokenizer, write_family_checkpoint
from scripts.shared_captures import SharedCaptures
from tests.exports import export_quietly

DEFAULTS = {
    "num_beams": 4,
    "length_penalty": 0.6,
    "early_stopping": True,
    "max_length": 17,
    "min_length": 4,
    "no_repeat_ngram_size": 3,
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 1,
}
NO_DEFAULTS = {"max_length": 17, "forced_eos_token_id": None}

LANGUAGES = {"eng_Latn": 290, "fra_Latn": 291, "zho_Hans": 292}


def with_defaults(folder: Path, defaults: dict[str, Any] = DEFAULTS) -> Path:
    """The checkpoint with a generation_config.json that says these."""
    file = folder / "generation_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **defaults}))
    return folder


def exported(
    target: str,
    draft: str | None,
    captures: SharedCaptures,
    folder: Path,
    prepared: Callable[[Path], Path] = with_defaults,
) -> Path:
    """Fill a folder with "bundle" and the checkpoints of these families; return it."""
    names = [target] if draft is None else [target, draft]
    sources = [prepared(write_family_checkpoint(name, folder / name)) for name in names]
    export_quietly(captures, folder / "bundle", *sources)
    return folder


def with_languages(folder: Path) -> Path:
    """A checkpoint as NLLB's: a source is its language, its tokens, and the end."""
    content = json.loads(tiny_tokenizer().to_str())
    vocab = content["model"]["vocab"]
    taken = {token: i for token, i in vocab.items() if i in LANGUAGES.values()}
    for token, (language, index) in zip(taken, LANGUAGES.items(), strict=False):
        del vocab[token]
        vocab[language] = index
    content["model"]["merges"] = [
        merge for merge in content["model"]["merges"] if "".join(merge) in vocab
    ]
    vocab |= {name: index for name, index in LANGUAGES.items() if name not in vocab}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", *LANGUAGES])
    tokenizer.post_processor = TemplateProcessing(
        single="eng_Latn $A <|end|>",
        pair="eng_Latn $A $B <|end|>",
        special_tokens=[("eng_Latn", 290), ("<|end|>", 1)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "extra_special_tokens": list(LANGUAGES),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return with_defaults(folder, {"num_beams": 3, "max_length": 9})


def exported_translator(draft: str | None, captures: SharedCaptures, folder: Path) -> Path:
    """The folder with the bundle of M2M100, which has languages, and of a draft of a family."""
    return exported("m2m_100", draft, captures, folder, with_languages)


def some_sources(number: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, number)
    return [[*rng.integers(3, 290, length).tolist(), 1] for length in lengths]


@functools.cache
def model_of(folder: Path) -> Any:
    with quiet_libraries():
        return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()


def generated(folder: Path, source: list[int], **options: Any) -> tuple[list[list[int]], Any]:
    """The new tokens of transformers' sequences up to their end, and their scores."""
    with quiet_libraries(), torch.no_grad():
        output = model_of(folder).generate(
            torch.tensor([source]),
            attention_mask=torch.ones(1, len(source), dtype=torch.int64),
            output_scores=True,
            return_dict_in_generate=True,
            use_cache="t5" not in folder.name,  # which fails with another number of encoder layers
            **options,
        )
    rows = [row[1:] for row in output.sequences.tolist()]
    ended = [row[: row.index(1) + 1] if 1 in row else row for row in rows]
    scores = getattr(output, "sequences_scores", None)
    return ended, None if scores is None else scores.numpy()
