"""Languages that an encoder-decoder translates between, found by names of special tokens."""

from __future__ import annotations

import re
from dataclasses import replace

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.tokenizers.marian_tokenizer import is_marian, source_tokenizer
from dsbd_export.tokenizers.tokenizer_files import load_tokenizer

_LANGUAGE = re.compile(r"(?:__)?([a-z]{2,3}(?:_[A-Z]{2}|_[A-Z][a-z]{3})?)(?:__)?")
"""Such as NLLB's eng_Latn, mBART's en_XX, and M2M100's __en__."""
_FEWEST = 2


def with_languages(checkpoint: Checkpoint) -> Checkpoint:
    """Return a target with the tokens of its languages, unchanged if there are none.

    Marian's languages are part of a source's text (">>deu<< The house"); it gets its unknown token.
    """
    if checkpoint.encoder is None or checkpoint.encoder.speech is not None:
        return checkpoint
    if is_marian(checkpoint.tokenizer_folder):
        size = checkpoint.encoder.vocab_size
        unknown = source_tokenizer(checkpoint.tokenizer_folder, size).unknown
        return replace(checkpoint, encoder=replace(checkpoint.encoder, unknown_token_id=unknown))
    tokenizer = load_tokenizer(checkpoint)
    found = {
        match[1]: int(tokenizer.convert_tokens_to_ids(token))
        for token in tokenizer.all_special_tokens
        if (match := _LANGUAGE.fullmatch(token)) is not None
    }
    known = {name: token for name, token in found.items() if token < checkpoint.vocab_size}
    if len(known) < _FEWEST:
        return checkpoint
    return replace(checkpoint, encoder=replace(checkpoint.encoder, languages=known))
