"""Bytes of tokens as grammars see them: those of the text that the tokens become."""

from __future__ import annotations

import pytest

from dsbd_ort.constraints import GrammarTokenizer
from tests.runtime.tokenizer_kinds import KINDS, SPECIAL, saved

READ = ["tiny_tokenizer", "byte_level_bpe", "byte_fallback_bpe", "llama_2", "unigram"]


@pytest.mark.parametrize("kind", READ)
def test_grammars_see_the_bytes_that_a_token_adds(tmp_path, kind):
    backend = KINDS[kind]()
    tokenizer, size = saved(backend, tmp_path), backend.get_vocab_size()
    ends = [] if (end := backend.token_to_id(SPECIAL)) is None else [end]
    read = GrammarTokenizer(backend.to_str(), vocab_size=size, eos_token_ids=ends)
    special = {t for t, added in backend.get_added_tokens_decoder().items() if added.special}
    for token in set(range(size)) - special:
        content = tokenizer.bytes_of(token)
        if content != b"\xff":  # which the library shows of no token
            assert read._tokenizer.decode_bytes([token]) == content
