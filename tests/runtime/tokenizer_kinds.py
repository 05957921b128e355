"""Small tokenizers of every kind that checkpoints have: how tokens join into text differs."""

from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from dsbd_runtime.text.tokenizer import Tokenizer
from tests.runtime.tiny_tokenizer import tiny_tokenizer

SPECIAL = "</s>"
TEXTS = (
    "Hello world, isn't it? don't do not! a  b   c\n\tx = 1",
    "naïve café e\u0301 a\u0308\u0323 \u200d",
    "日本語です 한국어 ไทย ☃",
    "😀👩‍👩‍👧🏳️‍🌈 🇩🇪 ok",
    "שלום עולם مرحبا بالعالم \u200f!",
    "\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} end",
)
_COMMON = TEXTS[:2] * 8  # of the others, most characters are unknown
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_bpe() -> tokenizers.Tokenizer:
    """Like GPT-2 and Llama 3: merges may end within a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    return backend


def byte_fallback_bpe(*last_steps: decoders.Decoder) -> tokenizers.Tokenizer:
    """Like Gemma, and with ``last_steps`` Llama 2 and Mistral."""
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(_COMMON, trainer)
    symbols = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    vocab = {token: index for index, token in enumerate([*symbols, *_BYTES])}
    merges = [
        (token[:cut], token[cut:])
        for token in symbols
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *last_steps])
    backend.add_special_tokens([SPECIAL])
    return backend


def llama_2() -> tokenizers.Tokenizer:
    """Byte fallback, with the first space of the text dropped."""
    backend = byte_fallback_bpe(decoders.Strip(" ", 1, 0))
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """Like BERT: words are put together again with spaces, punctuation without."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", SPECIAL], show_progress=False
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    backend.add_tokens(["n't", "do not", "##", ".", "'s"])
    return backend


def metaspace_bpe() -> tokenizers.Tokenizer:
    """SentencePiece without bytes: unknown characters are lost."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", SPECIAL], show_progress=False
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    return backend


def unigram() -> tokenizers.Tokenizer:
    """Like T5 and XLM-R, with byte fallback."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), *((piece, -3.0) for piece in "Helo wrdabcx=1,.!?'")]
    pieces += [("▁Hello", -1.0), ("▁world", -1.0), ("é", -3.0), *((byte, -9.0) for byte in _BYTES)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens([SPECIAL])
    return backend


def word_ends() -> tokenizers.Tokenizer:
    """Like the first GPT: a suffix marks the end of a word."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", SPECIAL],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    return backend


def no_decoder() -> tokenizers.Tokenizer:
    """Tokens joined by spaces."""
    backend = metaspace_bpe()
    backend.decoder = None  # type: ignore[assignment]
    return backend


def two_leading_spaces() -> tokenizers.Tokenizer:
    """Up to two spaces at the beginning dropped."""
    return byte_fallback_bpe(decoders.Strip(" ", 2, 0))


def across_tokens() -> tokenizers.Tokenizer:
    """A last step that looks for text across tokens: every later token may change it."""
    return byte_fallback_bpe(decoders.Replace(Regex(" +([,.!])"), "!"))


def stripped_at_the_end() -> tokenizers.Tokenizer:
    """A space at the end dropped, until more text follows."""
    return byte_fallback_bpe(decoders.Strip(" ", 0, 1))


def bytes_in_lower_case() -> tokenizers.Tokenizer:
    """Byte tokens as no exporter writes them, but the library reads them."""
    words = ["▁", "a", *(byte.lower() for byte in _BYTES), "<0x+A>"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend


_LAST_STEPS: dict[str, Callable[[], decoders.Decoder]] = {
    "byte_level": decoders.ByteLevel,
    "metaspace": decoders.Metaspace,
    "word_piece": decoders.WordPiece,
    "strip": lambda: decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
}


def with_piece(decoder: str, piece: str) -> tokenizers.Tokenizer:
    """A vocabulary of a piece, which is token 0, and two letters."""
    vocab = {word: index for index, word in enumerate(dict.fromkeys((piece, "a", "b")))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = _LAST_STEPS[decoder]()
    backend.add_special_tokens([SPECIAL])
    return backend


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    make.__name__: make
    for make in (
        tiny_tokenizer,
        byte_level_bpe,
        byte_fallback_bpe,
        llama_2,
        word_piece,
        metaspace_bpe,
        unigram,
        word_ends,
        no_decoder,
        two_leading_spaces,
        across_tokens,
        stripped_at_the_end,
        bytes_in_lower_case,
    )
}


class CountingTokenizer(Tokenizer):
    """Counts the tokens that it decodes."""

    num_decoded = 0

    def decode(self, token_ids: tuple[int, ...] | list[int]) -> str:  # type: ignore[override]
        """See Tokenizer.decode."""
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


def saved(backend: tokenizers.Tokenizer, folder: Path) -> CountingTokenizer:
    """Return a tokenizer as a bundle in ``folder`` has it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return CountingTokenizer(folder, bos_token_id=None)
