"""Tokenizers without tokenizer.json: their files, and how each is built and checked.

file                         built                                          checked by
vocab.json and merges.txt    by the class that tokenizer_config.json names  decoding of its ids
tekken.json (Mistral)        by transformers, special tokens from the file  decoding of its ids
tokenizer.model              by the settings in the file, not by its class  sentencepiece itself
tiktoken, any name           not built: it has no splitting into words and no special tokens
source.spm and target.spm    from both and vocab.json                       MarianTokenizer
vocab.txt of characters      here, like BertJapaneseTokenizer (manga-ocr)   tests, with MeCab

source.spm and target.spm are Marian's (OPUS-MT): two sentencepiece files with separate ids.
source.spm splits sources and target.spm writes targets. vocab.json has the ids of pieces; if the
vocabularies differ, target_vocab.json has the ids of target pieces. In the tokenizer for sources,
pieces that only targets have get names that occur in no text. Pieces without an id in vocab.json
get ids after all others, which are read as the unknown token.
"""

import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    MarianTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TokenizersBackend,
)

from dsbd_export.checkpoints.checkpoint_files import json_object
from dsbd_export.errors import ExportError
from dsbd_runtime.bundle_files.bundle import (
    SOURCE_TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from dsbd_runtime.text.tokenizer import Tokenizer as SourceReader

OLDER_FILES = ("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of tokenizer files other than tokenizer.json."""

_SENTENCEPIECE_FILE, _TEKKEN_FILE = "tokenizer.model", "tekken.json"
_VOCABULARIES = ("vocab.json", "vocab.txt")
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")  # a token in base64, its rank
_STACKS = ("a\u0308\u0323", "\u00a0\u200d\ufeff")
_TEKKEN_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}


def is_built(folder: Path) -> bool:
    """Return whether a folder has no tokenizer.json, so that transformers builds one."""
    return not (folder / TOKENIZER_FILE).is_file()


def has_older_files(folder: Path) -> bool:
    """Return whether there are files to build a tokenizer from."""
    return any(file for pattern in OLDER_FILES for file in folder.glob(pattern))


def load_folder(folder: Path, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder, loaded by transformers except for characters."""
    tokenizer: PreTrainedTokenizerBase
    if is_of_characters(folder):
        tokenizer = character_tokenizer(folder)
    elif sentencepiece_file(folder) is not None:
        # Classes such as LlamaTokenizer set spaces and merges differently from the file.
        tokenizer = TokenizersBackend.from_pretrained(str(folder), **options)
    else:
        options |= _tekken_options(folder)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), mistral_format=False, **options)
    return tokenizer


def is_of_characters(folder: Path) -> bool:
    """Return whether a folder has a Japanese character tokenizer and no tokenizer.json."""
    file = folder / TOKENIZER_CONFIG_FILE
    settings = json_object(file) if file.is_file() and is_built(folder) else {}
    is_japanese = settings.get("tokenizer_class") == "BertJapaneseTokenizer"
    return is_japanese and settings.get("subword_tokenizer_type") == "character"


def character_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return a BertJapaneseTokenizer of characters without MeCab, which would only drop spaces."""
    settings = json_object(folder / TOKENIZER_CONFIG_FILE)
    names = {f"{n}_token": f"[{n.upper()}]" for n in ("unk", "sep", "pad", "cls", "mask")}
    named = {name: settings.get(name) or default for name, default in names.items()}
    tokens = {n: t["content"] if isinstance(t, dict) else str(t) for n, t in named.items()}
    lines = (folder / "vocab.txt").read_text("utf-8").removesuffix("\n").split("\n")
    ids = {token: index for index, token in enumerate(lines)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=tokens["unk_token"]))
    lower = [normalizers.Lowercase()] if settings.get("do_lower_case") else []
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), *lower])
    each = pre_tokenizers.Split(Regex(r"\S"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), each])
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    first, last = tokens["cls_token"], tokens["sep_token"]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=[(t, ids[t]) for t in (first, last)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **tokens
    )


def tiktoken_file(folder: Path) -> Path | None:
    """Return the tiktoken file if it is the only tokenizer file, else None."""
    if _has_other_files(folder):
        return None
    files = sorted([*folder.glob("*.tiktoken"), *folder.glob("*.model")])
    return next((file for file in files if _is_tiktoken(file)), None)


def sentencepiece_file(folder: Path) -> Path | None:
    """Return the sentencepiece file if it is the only tokenizer file, else None."""
    file = folder / _SENTENCEPIECE_FILE
    if not file.is_file() or _has_other_files(folder) or _is_tiktoken(file):
        return None
    return file


def sentencepiece_ids(file: Path, texts: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield texts with their ids by sentencepiece, without leading spaces and ``_STACKS``."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for text in texts:
        plain = without_stacks(text.lstrip(" "))
        yield plain, processor.encode(plain)


def without_stacks(text: str) -> str:
    """Return a text without ``_STACKS``, see ``sentencepiece_ids``."""
    for stack in _STACKS:
        text = text.replace(stack, "")
    return text


def is_tekken(folder: Path) -> bool:
    """Return whether a folder has a tekken.json and no tokenizer.json."""
    return (folder / _TEKKEN_FILE).is_file() and is_built(folder)


def _tekken_options(folder: Path) -> dict[str, Any]:
    """Return settings in tekken.json that transformers ignores and tokenizer_config.json lacks."""
    if not is_tekken(folder):
        return {}
    named = json_object(folder / _TEKKEN_FILE).get("special_tokens")
    special_tokens = {entry["token_str"] for entry in named or ()}
    options: dict[str, Any] = {
        name: token for name, token in _TEKKEN_TOKENS.items() if token in special_tokens
    }
    options["add_bos_token"] = "bos_token" in options
    config = folder / TOKENIZER_CONFIG_FILE
    settings = json_object(config) if config.is_file() else {}
    return {name: value for name, value in options.items() if name not in settings}


def _has_other_files(folder: Path) -> bool:
    names = (TOKENIZER_FILE, _TEKKEN_FILE, *_VOCABULARIES)
    return any((folder / name).is_file() for name in names)


def _is_tiktoken(file: Path) -> bool:
    with file.open("rb") as content:
        return _TIKTOKEN_LINE.match(content.readline()) is not None


_SOURCE, _TARGET = "source.spm", "target.spm"
_VOCABULARY, _TARGET_VOCABULARY = "vocab.json", "target_vocab.json"
_SPECIAL = ("</s>", "<unk>", "<pad>")
_NO_TEXT = "\N{REPLACEMENT CHARACTER}"  # first character of names of pieces that occur in no source


def is_marian(folder: Path) -> bool:
    """Return whether a folder has Marian's own tokenizer files, without tokenizer.json."""
    files = (_SOURCE, _TARGET, _VOCABULARY)
    has_files = all((folder / name).is_file() for name in files)
    return has_files and not (folder / TOKENIZER_FILE).is_file()


def target_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer for targets of a Marian model."""
    target_vocabulary = folder / _TARGET_VOCABULARY
    id_by_piece = _vocabulary(
        target_vocabulary if target_vocabulary.is_file() else folder / _VOCABULARY
    )
    content = sentencepiece_content(folder / _TARGET)
    return PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(content, _in_order(id_by_piece), id_by_piece),
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def source_tokenizer(folder: Path, vocab_size: int) -> tuple[Tokenizer, int]:
    """Return the tokenizer for sources of a Marian model, and the id of the unknown token."""
    id_by_piece = _vocabulary(folder / _VOCABULARY)
    content = sentencepiece_content(folder / _SOURCE)
    source_pieces = [piece for piece, _ in content["model"]["vocab"]]
    readable = {*source_pieces, *_whole(id_by_piece)}
    pieces = [
        piece if piece in readable else f"{_NO_TEXT}{index}"
        for index, piece in enumerate(_in_order(id_by_piece))
    ]
    pieces += [f"{_NO_TEXT}{index}" for index in range(len(pieces), vocab_size)]
    pieces += [piece for piece in source_pieces if piece not in id_by_piece]
    return _tokenizer(content, pieces, id_by_piece), id_by_piece["<unk>"]


def write_source_tokenizer(
    folder: Path, output: Path, vocab_size: int, texts: tuple[str, ...]
) -> None:
    """Write the tokenizer for sources; ExportError if a tokenizer differs from transformers'."""
    source, unknown = source_tokenizer(folder, vocab_size)
    target = target_tokenizer(folder)
    source.save(str(output / SOURCE_TOKENIZER_FILE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends sacremoses, which it does not use
        theirs = MarianTokenizer.from_pretrained(str(folder), local_files_only=True)
    ours = SourceReader(output, bos_token_id=None, file=SOURCE_TOKENIZER_FILE)
    codes = [token.content for token in source.get_added_tokens_decoder().values()]
    codes = [code for code in codes if code not in _SPECIAL][:1]
    of_codes = [text for code in codes for text in (f"{code} a b", f"a {code} b", f"{code}{code}")]
    for text in map(without_stacks, (*texts, *of_codes)):
        ids = ours.encode(text)
        read_ids = [index if index < vocab_size else unknown for index in ids]
        _compare(text, "reads", read_ids, _source_ids(theirs, text))
        if any(token in text for token in _SPECIAL):
            continue  # transformers has only the id of the source for each
        ids = theirs(text_target=text)["input_ids"]
        wanted = theirs.decode(ids, skip_special_tokens=True, use_source_tokenizer=False)
        _compare(text, "writes", target.decode(ids, skip_special_tokens=True), wanted)


def _source_ids(theirs: Any, text: str) -> list[int]:
    """Return transformers' ids of a text; characters that source.spm lacks become unknown."""
    splitter, is_whole = theirs.spm_source, theirs.get_added_vocab()
    ids = [
        theirs.unk_token_id
        if splitter.is_unknown(splitter.piece_to_id(piece))
        and piece not in is_whole
        and not piece.startswith(">>")
        else theirs.convert_tokens_to_ids(piece)
        for piece in theirs.tokenize(text)
    ]
    return [*ids, theirs.eos_token_id]


def _compare(text: str, verb: str, ours: Any, theirs: Any) -> None:
    if isinstance(ours, str):  # transformers strips what it writes
        ours, theirs = ours.strip(), theirs.strip()
    if ours != theirs:
        raise ExportError(
            f"Marian's tokenizer cannot be exported: built from {_SOURCE} and {_TARGET} it {verb} "
            f"{text!r} as {ours!r}, in transformers as {theirs!r}; give a converted copy of the "
            f"model, with {TOKENIZER_FILE}"
        )


def _vocabulary(file: Path) -> dict[str, int]:
    content: dict[str, int] = json_object(file)
    if (
        not all(type(i) is int for i in content.values())
        or sorted(content.values()) != list(range(len(content)))
        or "<unk>" not in content
    ):
        raise ExportError(
            f"{file} has {len(content)} pieces, expected one for each id from 0 on, and <unk>; "
            "copy the file again"
        )
    return content


def _in_order(id_by_piece: dict[str, int]) -> list[str]:
    return sorted(id_by_piece, key=id_by_piece.__getitem__)


def _whole(id_by_piece: dict[str, int]) -> list[str]:
    """Return the pieces that are never split: special tokens, and codes of languages."""
    codes = [piece for piece in id_by_piece if piece.startswith(">>") and piece.endswith("<<")]
    return [piece for piece in (*_SPECIAL, *codes) if piece in id_by_piece]


def sentencepiece_content(file: Path) -> dict[str, Any]:
    """Return a sentencepiece file, converted by transformers to the form of tokenizer.json."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(file, Path(folder) / _SENTENCEPIECE_FILE)
        built = TokenizersBackend.from_pretrained(folder, local_files_only=True)
    content: dict[str, Any] = json.loads(built.backend_tokenizer.to_str())
    if content["model"]["type"] != "Unigram":
        raise ExportError(
            f"{file} is a sentencepiece model of type {content['model']['type']}, expected "
            f"Unigram; give a converted copy of the model, with {TOKENIZER_FILE}"
        )
    return content


def tokenizer_of_pieces(content: dict[str, Any], pieces: list[str], unknown_id: int) -> Tokenizer:
    """Return the tokenizer with ``pieces``, which are in the order of their ids.

    Pieces that the content of a sentencepiece file lacks have its lowest score.
    """
    scores = dict(content["model"]["vocab"])
    lowest = min(scores.values())
    vocabulary = [[piece, scores.get(piece, lowest)] for piece in pieces]
    model = {**content["model"], "vocab": vocabulary, "unk_id": unknown_id}
    return Tokenizer.from_str(json.dumps({**content, "model": model, "added_tokens": []}))


def _tokenizer(
    content: dict[str, Any], pieces: list[str], id_by_piece: dict[str, int]
) -> Tokenizer:
    """Return the tokenizer with ``pieces`` in the order of their ids; texts end with </s>."""
    tokenizer = tokenizer_of_pieces(content, pieces, id_by_piece["<unk>"])
    whole = [AddedToken(piece, normalized=False) for piece in _whole(id_by_piece)]
    tokenizer.add_special_tokens([token for token in whole if token.content in _SPECIAL])
    tokenizer.add_tokens([token for token in whole if token.content not in _SPECIAL])
    tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", id_by_piece["</s>"])]
    )
    return tokenizer
