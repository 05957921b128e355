"""A byte-level tokenizer without merges: every byte is a token."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

BOS, EOS = "<bos>", "<eos>"
VOCAB_SIZE = 258  # 256 bytes and the two above


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level BPE without merges: one token a byte, then BOS and EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    return backend
