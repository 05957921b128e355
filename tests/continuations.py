"""Bundles with the tokenizers of the corpus, and what a continuation is by the library's decode."""

import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from dsbd_ort.constraints import TokenTrie
from dsbd_runtime.bundle_files.bundle import write_manifest
from dsbd_runtime.text.stream_decoder import TextWindow
from dsbd_runtime.text.tokenizer import Tokenizer
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle
from tests.tokenizer_corpus import CORPUS

KINDS = ("llama_2", "gemma", "metaspace", "word_piece", "unigram", "gpt_2")
PROMPT, ANSWER = "the text in each line", " the words are"


def write_bundle(kind: str, path: Path) -> tokenizers.Tokenizer:
    """Write random models with the tokenizer of a kind; return that as the library has it.

    Its chat template is the content of the last message.
    """
    backend = CORPUS[kind].make()
    size = backend.get_vocab_size()
    models = [TinyModel(vocab_size=size, seed=seed) for seed in (0, 1)]
    write_tiny_bundle(path, target=models[0], draft=models[1], tokenizer=backend)
    (path / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    write_manifest(path, versions={}, target=models[0].entry(), draft=models[1].entry())
    return backend


def prompt_and_answer(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of PROMPT, begun as the tokenizer begins a text, and of ANSWER after it."""
    ids = [*backend.encode(PROMPT).ids]
    while backend.decode([*ids[:-1]]) == backend.decode(ids):  # a token at the end of every text
        del ids[-1]
    plain = backend.encode(PROMPT, add_special_tokens=False).ids
    whole = backend.encode(PROMPT + ANSWER, add_special_tokens=False).ids
    assert whole[: len(plain)] == plain
    return ids, whole[len(plain) :]


def continuation(
    backend: tokenizers.Tokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> str:
    """Return what the tokens add to the text of a prompt that ends with a whole character."""
    before, whole = backend.decode([*prompt_ids]), backend.decode([*prompt_ids, *token_ids])
    assert whole.startswith(before)
    return whole[len(before) :]


def spelled_text(start: TextWindow, token_ids: Sequence[int]) -> str:
    """Return the text with special tokens spelled, each after the text of the tokens before it."""
    text, tokenizer = start.text_of(token_ids), start.tokenizer
    for place, token in reversed([*enumerate(token_ids)]):
        if token in tokenizer.special_token_ids:
            at = len(start.text_of(token_ids[:place]))
            text = text[:at] + tokenizer.piece(token) + text[at:]
    return text


def without_special(tokenizer: Tokenizer, text: str) -> str:
    pieces = map(tokenizer.piece, tokenizer.special_token_ids)
    return re.sub("|".join(map(re.escape, pieces)), "", text)


def answered_by(token_ids: Sequence[int]) -> TokenTrie:
    """Return the constraint to these tokens alone."""
    return TokenTrie.from_sequences([list(token_ids)])
