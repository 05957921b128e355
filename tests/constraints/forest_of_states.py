"""Walks over the states of a constraint, as decoding does them."""

import numpy as np
import tokenizers

from dsbd_export.demo import demo_pair
from dsbd_ort.constraints import GrammarTokenizer

VOCAB_SIZE = 4096
EOS = 1

TOKENIZER_JSON = (demo_pair()[0] / "tokenizer.json").read_text(encoding="utf-8")
TOKENIZER = tokenizers.Tokenizer.from_str(TOKENIZER_JSON)


def grammar_tokenizer(vocab_size=VOCAB_SIZE, eos=(EOS,), **more):
    return GrammarTokenizer(TOKENIZER_JSON, vocab_size=vocab_size, eos_token_ids=eos, **more)


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def tokens_of(bits):
    """Return the tokens of a mask, (words,) int32."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def allowed_of(constraint, state):
    return tokens_of(constraint.allowed(state).bits[0])


def advanced(constraint, state, tokens):
    for token in tokens:
        state = constraint.advance(state, np.array([token], dtype=np.int64))
    return state


def random_text(constraint, rng, most=400):
    """Return the tokens of a path that ended, by uniform choices; None if it did not end."""
    state, tokens = constraint.start([0]), []
    while len(tokens) < most:
        if constraint.has_ended(state)[0]:
            return tokens
        choices = allowed_of(constraint, state)
        if constraint.accepts(state)[0] and rng.random() < 0.3:
            return tokens
        assert len(choices), "the path neither ends nor goes on"
        tokens.append(int(rng.choice(choices)))
        state = constraint.advance(state, np.array(tokens[-1:], dtype=np.int64))
    return None


def accepts_text(constraint, text):
    """Return whether the text, as the tokenizer spells it, may be the whole."""
    state = constraint.start([])
    for token in ids_of(text):
        if token not in allowed_of(constraint, state):
            return False
        state = advanced(constraint, state, [token])
    return bool(constraint.accepts(state)[0])
