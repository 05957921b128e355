"""Tokens of a GGUF file that end an answer: named by the file, or recognized by their texts.

Converters name one to three such tokens. llama.cpp also ends answers at tokens that it recognizes
by their texts (``special_eog_ids`` in its llama-vocab.cpp). Among them are separators between the
files of a repository: a model writes one after a text that it fills in. This module follows
llama.cpp's list with one exception: ``</s>`` ends an answer only if the file marks it as a control
token, because in Qwen2.5 and Gemma it is HTML.
"""

from collections.abc import Iterator

from gguf import TokenType

from dsbd_export.checkpoints.gguf_file import GgufHeader

CLOSING_TAG = "</s>"  # ends an answer in Llama 2
END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> "
    "<turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~[".split()
)
FILL_IN_TEXTS = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> "
    "\u2581<PRE> <|code_prefix|> <|prefix|>".split(),
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> "
    "\u2581<SUF> <|code_suffix|> <|suffix|>".split(),
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> "
    "\u2581<MID> <|code_middle|> <|middle|>".split(),
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]".split(),
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>".split(),
    "fim_sep": ["<|file_sep|>"],
}
"""Texts of the tokens around a text to fill in, by ggml's names for the tokens."""

_NAMES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# If a vocabulary has all tokens of a row, the first of them separates parts of an answer.
_ENDS_NO_ANSWER = (
    ("<|end|>", "<|return|>", "<|call|>"),
    ("<|end|>", "<|flush|>", "<|call|>"),
    ("<|end|>", "<|flush|>", "<|calls|>"),
    (CLOSING_TAG, "<|tool_response>"),
)


def named_ends(header: GgufHeader) -> list[int]:
    """Return the tokens that a file names as ends of an answer."""
    ids = (header.token_id(name) for name in _NAMES)
    return list(dict.fromkeys(index for index in ids if index is not None))


def ends_by_text(header: GgufHeader) -> dict[str, int]:
    """Return the ids of further tokens that end an answer, by their texts."""
    ids = {text: i for i, text in enumerate(header.values.get("tokenizer.ggml.tokens") or ())}
    closing = [CLOSING_TAG] if _is_control(header, ids.get(CLOSING_TAG)) else []
    texts = END_TEXTS.union(_fill_in_ends(header, ids), closing) & ids.keys()
    texts -= {first for first, *others in _ENDS_NO_ANSWER if texts.issuperset(others)}
    named = named_ends(header)
    return {
        text: ids[text] for text in sorted(texts, key=ids.__getitem__) if ids[text] not in named
    }


def _fill_in_ends(header: GgufHeader, ids: dict[str, int]) -> Iterator[str]:
    """Yield one text for each fill-in token that ends an answer and that the file does not name."""
    for name, texts in FILL_IN_TEXTS.items():
        if name in _NAMES and header.token_id(name) is None:
            yield from [text for text in texts if text in ids][:1]


def _is_control(header: GgufHeader, index: int | None) -> bool:
    """Return whether a file marks a token as a control token; ``index`` None: no such token."""
    kinds = header.values.get("tokenizer.ggml.token_type")
    if index is None or kinds is None or index >= len(kinds):
        return False
    return bool(kinds[index] == TokenType.CONTROL)
