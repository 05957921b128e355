"""Pre-tokenizers by the names in GGUF files: how each splits a text into words.

A file has the vocabulary and the merges of a byte-level BPE. For the pre-tokenizer it has only one
of llama.cpp's names. There are no rows for names whose expression llama.cpp itself misreads (afmoe,
tiny_aya, cohere2moe, youtu), for a name with special code (kimi-k2), and for models that generate
no text (jina, granite-embed).
"""

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)
_CASED_AND_CONTRACTED = "|".join(f"{word}{_CONTRACTIONS}?" for word in _CASED)
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACES}"
_GPT4O = rf"{_CASED_AND_CONTRACTED}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n/]*|{_SPACES}"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DIGIT, _THREE_DIGITS, _LINES = r"\p{N}", r"\p{N}{1,3}", r"[^\n]+|[\n]+"
_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_OF_DEEPSEEK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SIGNS_OF_FALCON = r"\p{P}\$\+<=>\^~\|"
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How a text is split into words, and related settings."""

    # regular expressions, applied in order. Each splits the remaining pieces into its matches and
    # the text between them.
    splits: tuple[str, ...]
    takes_whole_words: bool = False
    # whether a prompt begins with the file's begin token if the file does not say
    begins: bool = False
    # whether the vocabulary spells bytes like GPT-2. Otherwise it spells characters, with "▁" for a
    # space and <0xE2> for a byte
    spells_bytes: bool = True


def _row(names: str, *splits: str, **options: bool) -> tuple[str, PreTokenizer]:
    return names, PreTokenizer(splits=splits, **options)


_ROWS: tuple[tuple[str, PreTokenizer], ...] = (
    _row("default", f"[{_SIGNS_OF_FALCON}]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    _row(
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling", _GPT2
    ),
    _row("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGIT, _GPT2),
    _row("falcon", f"[{_SIGNS_OF_FALCON}`]+", _GPT2, "[0-9][0-9][0-9]"),
    _row(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        takes_whole_words=True,
        begins=True,
    ),
    _row("dbrx smaug-bpe glm4 chatglm-bpe", _LLAMA3),
    _row(
        "jais-2",
        rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|\s*[\r\n]+|"
        + "|".join(rf"\s{{{number}}}(?!\S)" for number in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s{1}",
    ),
    _row(
        "minicpm5",
        _THREE_DIGITS,
        rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_SIGNS}[\r\n]*|{_SPACES}",
        takes_whole_words=True,
    ),
    _row("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    _row("laguna", _LINES, _QWEN2),
    _row(
        "qwen35",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    _row("ufakzeka", rf"{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACES}"),
    _row("seed-coder", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"),
    _row(
        "bailingmoe bailingmoe2 llada-moe",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    _row(
        "exaone-moe",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
        rf"|\p{{N}}|{_SIGNS}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    _row(
        "tekken",
        rf"{'|'.join(_CASED)}|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACES}",
        takes_whole_words=True,
        begins=True,
    ),
    _row("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    _row(
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        _THREE_DIGITS,
        _HAN,
        rf"{_ASCII_SIGNS}|{_MARKED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    ),
    _row(
        "spark2_5",
        _THREE_DIGITS,
        _HAN,
        rf"{_ASCII_SIGNS}|{_MARKED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
        _DIGIT,
    ),
    _row(
        "deepseek-llm",
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN_OF_DEEPSEEK,
        r"\p{N}+",
    ),
    _row("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_OF_DEEPSEEK, _DIGIT),
    _row("poro-chat bloom gpt3-finnish", _BLOOM),
    _row("viking", _BLOOM, _DIGIT),
    _row("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    _row(
        "chameleon",
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        _DIGIT,
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
        begins=True,
    ),
    _row("gemma4", _LINES, begins=True, spells_bytes=False),
    _row("sarvam-moe", _LINES, spells_bytes=False),
)
PRE_TOKENIZERS = {name: row for names, row in _ROWS for name in names.split()}
"""Pre-tokenizers by the names in ``tokenizer.ggml.pre``."""
