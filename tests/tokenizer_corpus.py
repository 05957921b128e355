"""Corpus of tokenizers: small checkpoint folders of the kinds that published models have.

A row of ``CORPUS`` is a kind. ``write_tokenizer`` writes its files as transformers' AutoTokenizer
loads them: tokenizer.json, tokenizer_config.json, a config.json that names the model type, and the
older files where the kind has some. Between them the kinds have added tokens in every place that
transformers reads: ``added_tokens_decoder`` (llama_3, phi_3), ``additional_special_tokens``
(qwen_2), a new ``eos_token`` (phi_3, unigram) and named ``extra_special_tokens`` (named_tokens),
added_tokens.json (mistral) and special_tokens_map.json (metaspace). None of these tokens stands in
tokenizer.json.
"""

import functools
import inspect
import json
import random
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_SCRIPTS = (
    "naïve café, Straße, e\u0301 a\u0308\u0323; Zürich\u2013Köln 12.50 €",
    "日本語のテキストです。 한국어 문장입니다. ไทย ☃",
    "😀👩‍👩‍👧🏳️‍🌈 🇩🇪 ok",
    "שלום עולם مرحبا بالعالم \u200f!",
    "isn't don't we'll  two  spaces\n\n\ttabs, 3,141,592 numbers",
)
_SPACE = "▁"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_DEEPSEEK_BEGIN = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
_DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_DEEPSEEK_PAD = "<\uff5cpad\uff5c>"
LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA_2_CHAT = """{% if messages[0]['role'] == 'system' %}
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% set messages = messages[1:] %}
{% else %}
{% set system = '' %}
{% endif %}
{% for message in messages %}
{% set said = message['content'].strip() %}
{% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + (system if loop.first else '') + said + ' [/INST]' }}
{%- else %}
{{ ' ' + said + ' ' + eos_token }}
{%- endif %}
{% endfor %}"""
LLAMA_3_CHAT = """{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
    {{- 'Tools: ' + (tools | tojson) + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
CHATML = """{% if tools %}
<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PHI_3_CHAT = """{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
GEMMA_CHAT = """{{ bos_token }}{% for message in messages %}
{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
PLAIN_CHAT = """{{ bos_token }}{% for message in messages %}
{{ message['role'] + ': ' + message['content'] + (eos_token or '') }}
{%- endfor %}"""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CHATS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "Hello, who are you?"},),
    (
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "  What is 3 + 4?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Thanks! 日本語も? 😀"},
    ),
)
"""Conversations that every template here takes."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of tokenizer, by the files of its checkpoint.

    Attributes:
        make: returns the content of tokenizer.json.
        model_type: of config.json.
        config: the content of tokenizer_config.json.
        files: further files by name, with their content.
        own_tokens: tokens that do not stand in tokenizer.json.
    """

    make: Callable[[], Tokenizer]
    model_type: str = "llama"
    config: dict[str, Any]
    files: dict[str, Any] = field(default_factory=dict)
    own_tokens: tuple[str, ...] = ()


def write_tokenizer(name: str, folder: Path) -> Path:
    """Write the tokenizer files of a kind, and a config.json of its model type; return ``folder``.

    A config.json that is there already is kept.
    """
    kind = CORPUS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json(name), encoding="utf-8")
    if not (folder / "config.json").exists():
        _write_json(folder / "config.json", {"model_type": kind.model_type})
    for file, content in {"tokenizer_config.json": kind.config, **kind.files}.items():
        _write_json(folder / file, content)
    return folder


def random_texts(number: int, seed: int = 0, tokens: Sequence[str] = ()) -> list[str]:
    """Return seeded texts of words, spaces, several scripts and, here and there, ``tokens``."""
    rng = random.Random(seed)
    words = " ".join(training_texts()).split()
    parts: list[Callable[[], str]] = [
        *[lambda: rng.choice(words)] * 6,
        lambda: rng.choice("abcXYZ.,;!?'\"()[]{}0123456789_-+=<>/|#@"),
        lambda: rng.choice(_SCRIPTS)[rng.randrange(8) :],
        lambda: chr(rng.choice((rng.randrange(0x20, 0x250), rng.randrange(0x3000, 0x9FFF)))),
        lambda: rng.choice(("\n", "\t", "  ", "   ", "\r\n", "\u00a0")),
    ]
    if tokens:
        parts.append(lambda: rng.choice(tokens))
    return [
        "".join(rng.choice(("", " ")) + rng.choice(parts)() for _ in range(rng.randrange(1, 20)))
        for _ in range(number)
    ]


@functools.cache
def training_texts() -> tuple[str, ...]:
    return (*_source_lines(), *_SCRIPTS * 4)


def _source_lines() -> list[str]:
    return inspect.getsource(textwrap).splitlines()


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


@functools.cache
def _tokenizer_json(name: str) -> str:
    return CORPUS[name].make().to_str()


@functools.cache
def byte_level_model() -> dict[str, Any]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(training_texts(), trainer)
    return _model_of(trained)


@functools.cache
def _metaspace_model() -> dict[str, Any]:
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False)
    # Of the other scripts, most characters are unknown or bytes.
    trained.train_from_iterator(_source_lines() + list(_SCRIPTS[:1]), trainer)
    return _model_of(trained)


def _learnt_words() -> list[str]:
    """Return the tokens of the SentencePiece kinds in the order in which they were learnt."""
    vocab = _metaspace_model()["vocab"]
    return sorted(vocab, key=vocab.__getitem__)


def _model_of(tokenizer: Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def _byte_level(special: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE with GPT-2's words, ``special`` at the end of the vocabulary."""
    model = byte_level_model()
    merges = [(first, second) for first, second in model["merges"]]
    backend = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens(list(special))
    return backend


def _byte_fallback(special: Sequence[str]) -> Tokenizer:
    """Return a BPE as SentencePiece numbers it: ``special``, the bytes, what was learnt."""
    model = _metaspace_model()
    words = [*special, *_BYTES, *(word for word in _learnt_words() if word not in special)]
    backend = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[(first, second) for first, second in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(list(special))
    return backend


def _begins_with(token: str, backend: Tokenizer) -> processors.TemplateProcessing:
    """Return the post-processor that puts ``token`` first."""
    return processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token} $B",
        special_tokens=[(token, backend.token_to_id(token))],
    )


def gpt_2() -> Tokenizer:
    """Byte-level BPE, one special token, nothing around a prompt."""
    return _byte_level(["<|endoftext|>"])


def llama_3() -> Tokenizer:
    """Byte-level BPE, words by a regular expression, its begin token put first."""
    backend = _byte_level(["<|begin_of_text|>", "<|end_of_text|>"])
    words = pre_tokenizers.Split(Regex(LLAMA_3_WORDS), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    byte_offsets = processors.ByteLevel(trim_offsets=False)
    begin = _begins_with("<|begin_of_text|>", backend)
    backend.post_processor = processors.Sequence([byte_offsets, begin])
    return backend


def qwen_2() -> Tokenizer:
    """Byte-level BPE over NFC text; its class brings the regular expression itself."""
    backend = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.normalizer = normalizers.NFC()
    return backend


def deepseek() -> Tokenizer:
    """Byte-level BPE that calls itself a LlamaTokenizer."""
    backend = _byte_level([_DEEPSEEK_BEGIN, _DEEPSEEK_END])
    backend.post_processor = _begins_with(_DEEPSEEK_BEGIN, backend)
    return backend


def llama_2() -> Tokenizer:
    """Byte fallback; a space is put before a text and stripped from the decoded one."""
    backend = _byte_fallback(["<unk>", "<s>", "</s>"])
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.post_processor = _begins_with("<s>", backend)
    return backend


def gemma() -> Tokenizer:
    """Byte fallback without a space before the text, its begin token put first."""
    backend = _byte_fallback(
        ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.post_processor = _begins_with("<bos>", backend)
    return backend


def metaspace() -> Tokenizer:
    """SentencePiece without bytes: unknown characters are lost."""
    model = _metaspace_model()
    merges = [(first, second) for first, second in model["merges"]]
    backend = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def word_piece() -> Tokenizer:
    """Lower case, words put together with spaces, a token at each end of the prompt."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    learnt = [word.lower() for word in _learnt_words() if word not in ("<unk>", _SPACE)]
    letters = dict.fromkeys(word.strip(_SPACE)[:1] for word in learnt)
    pieces = [w[1:] if w.startswith(_SPACE) else f"##{w}" for w in learnt]
    words = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *pieces])
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(special)
    ends = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    return backend


def unigram() -> Tokenizer:
    """SentencePiece's other model, as T5 and XLM-R have it."""
    words = [word for word in _learnt_words() if word != "<unk>"]
    scored = [(word, -2.0 - 0.01 * index) for index, word in enumerate(words)]
    pieces = [("<pad>", 0.0), ("<unk>", 0.0), *scored]
    backend = Tokenizer(models.Unigram(pieces, unk_id=1))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<pad>", "<unk>"])
    return backend


def _entry(token: str, **flags: bool) -> dict[str, Any]:
    """Return a token as ``added_tokens_decoder`` spells it."""
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": token, "special": True, **plain, **flags}


def named_tokens() -> Tokenizer:
    """Byte-level BPE with a token that joins the spaces around it and one that is no special."""
    backend = _byte_level(["<|endoftext|>"])
    backend.add_special_tokens([AddedToken("<sep>", lstrip=True, rstrip=True)])
    backend.add_tokens([AddedToken("tokenizer", single_word=True)])
    return backend


def _first_free(make: Callable[[], Tokenizer]) -> int:
    return int(make().get_vocab_size())


def _decoder_entries(
    make: Callable[[], Tokenizer], entries: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return ``added_tokens_decoder``: those of tokenizer.json, then ``entries``."""
    known = {
        str(index): _entry(token.content, lstrip=token.lstrip, rstrip=token.rstrip)
        for index, token in make().get_added_tokens_decoder().items()
    }
    first = _first_free(make)
    return known | {str(first + index): entry for index, entry in enumerate(entries)}


_LLAMA_3_OWN = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|reserved_0|>")
_PHI_3_OWN = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_PHI_3_ENTRIES = [
    _entry("<|endoftext|>"),
    *(_entry(token, rstrip=True) for token in _PHI_3_OWN[1:]),
]

CORPUS: dict[str, Kind] = {
    "gpt_2": Kind(
        make=gpt_2,
        model_type="gpt2",
        config={"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024},
    ),
    "llama_3": Kind(
        make=llama_3,
        config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "added_tokens_decoder": _decoder_entries(llama_3, [_entry(t) for t in _LLAMA_3_OWN]),
            "chat_template": LLAMA_3_CHAT,
            "clean_up_tokenization_spaces": True,
        },
        own_tokens=_LLAMA_3_OWN,
    ),
    "qwen_2": Kind(
        make=qwen_2,
        model_type="qwen2",
        config={
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
            "chat_template": CHATML,
        },
        own_tokens=("<think>", "</think>"),
    ),
    "deepseek": Kind(
        make=deepseek,
        config={
            "tokenizer_class": "LlamaTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": {"__type": "AddedToken", **_entry(_DEEPSEEK_BEGIN)},
            "eos_token": {"__type": "AddedToken", **_entry(_DEEPSEEK_END)},
            "pad_token": _DEEPSEEK_PAD,
            "chat_template": PLAIN_CHAT,
        },
        own_tokens=(_DEEPSEEK_PAD,),
    ),
    "llama_2": Kind(
        make=llama_2,
        config={
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": {"__type": "AddedToken", **_entry("<s>")},
            "eos_token": {"__type": "AddedToken", **_entry("</s>")},
            "unk_token": {"__type": "AddedToken", **_entry("<unk>")},
            "legacy": False,
            "chat_template": LLAMA_2_CHAT,
        },
    ),
    "mistral": Kind(
        make=llama_2,
        model_type="mistral",
        config={
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": LLAMA_2_CHAT,
        },
        files={
            "added_tokens.json": {
                "[TOOL_CALLS]": _first_free(llama_2),
                "[AVAILABLE_TOOLS]": _first_free(llama_2) + 1,
            }
        },
        own_tokens=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    ),
    "phi_3": Kind(
        make=llama_2,
        model_type="phi3",
        config={
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": "<s>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<unk>",
            "legacy": False,
            "added_tokens_decoder": _decoder_entries(llama_2, _PHI_3_ENTRIES),
            "chat_template": PHI_3_CHAT,
        },
        own_tokens=_PHI_3_OWN,
    ),
    "gemma": Kind(
        make=gemma,
        model_type="gemma2",
        config={
            "tokenizer_class": "GemmaTokenizer",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "chat_template": GEMMA_CHAT,
        },
    ),
    "metaspace": Kind(
        make=metaspace,
        config={"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": PLAIN_CHAT},
        files={
            "special_tokens_map.json": {
                "bos_token": "<s>",
                "eos_token": {**_entry("<end>"), "special": True},
                "pad_token": "<pad>",
                "unk_token": "<unk>",
                "additional_special_tokens": ["<tool>"],
            }
        },
        own_tokens=("<end>", "<pad>", "<tool>"),
    ),
    "word_piece": Kind(
        make=word_piece,
        config={
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "mask_token": "[MASK]",
            "chat_template": PLAIN_CHAT,
        },
    ),
    "unigram": Kind(
        make=unigram,
        config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "chat_template": PLAIN_CHAT,
        },
        own_tokens=("<s>", "</s>"),
    ),
    "named_tokens": Kind(
        make=named_tokens,
        config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "extra_special_tokens": {"image_token": "<image>", "audio_token": "<audio>"},
            "chat_template": PLAIN_CHAT,
        },
        own_tokens=("<image>", "<audio>"),
    ),
}
