"""Folder of CTranslate2 as a checkpoint of transformers: config, settings, tokenizer.

model.bin has the sizes of the model, CTranslate2's config.json the special tokens. A folder may
have further files of the checkpoint that it was converted from; these are used unchanged. Missing
settings are derived from the vocabulary, or are the family's defaults. A folder without a tokenizer
is refused.

A model with norms before its layers (M2M100, NLLB) is loaded as Pegasus, whose positions are
weights as in model.bin. A model with norms after its layers is loaded as Marian.
"""

import json
import math
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsbd_export.checkpoints.checkpoint_files import json_object_or_none, pointer_in
from dsbd_export.checkpoints.ctranslate2_file import (
    EMBEDDINGS,
    PROJECTION,
    WHISPER,
    Ctranslate2File,
    read_ctranslate2_file,
)
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.tokenizers.older_tokenizers import sentencepiece_content, tokenizer_of_pieces
from dsbd_export.tokenizers.tokenizer_files import id_by_token, tokenizer_content

_WEIGHTS, _CONFIG, _GENERATION = "model.bin", "config.json", "generation_config.json"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_COPIED = ("*.json", "*.spm", "*.jinja")
_ACTIVATIONS = {0: "relu", 1: "gelu_new", 2: "swish", 3: "gelu", 4: "quick_gelu"}
_DEFAULTS = {  # values that hold for OPUS-MT and M2M100
    "marian": {"num_beams": 4, "max_length": 512},
    "pegasus": {"num_beams": 5, "max_length": 200},
}
_MAX_INITIAL_TIMESTAMP = 50  # Whisper's: 1 s

_PAD, _ARGOS = "<pad>", ".argosmodel"

Contents = dict[str, dict[str, Any]]  # contents of JSON files by file name


def is_ctranslate2(place: Path) -> bool:
    """Return whether this is a folder with a model.bin of CTranslate2, or a package of Argos."""
    folder = _model_folder(place)
    if (folder / _WEIGHTS).is_file():
        return "model_type" not in (json_object_or_none(folder / _CONFIG) or {})
    return place.suffix == _ARGOS and place.is_file()


def _model_folder(place: Path) -> Path:
    """Return the folder of model.bin: place/model in an unpacked package of Argos."""
    return place if (place / _WEIGHTS).is_file() else place / "model"


def transformers_files(place: Path) -> tuple[Path, Ctranslate2File]:
    """Return a folder with all files of a checkpoint except weights, and model.bin.

    The folder is deleted when the returned file object is. Raises ExportError for a model that is
    not supported.
    """
    folder = Path(tempfile.mkdtemp(prefix="dsbd-")) / place.resolve().stem
    try:
        model = _write_files(place, folder)
    except Exception as error:
        shutil.rmtree(folder.parent)
        if isinstance(error, ExportError):
            raise
        raise ExportError(
            f"the model of CTranslate2 at {place} cannot be read: {reason_of(error)}; copy its "
            "files again"
        ) from error
    weakref.finalize(model, shutil.rmtree, folder.parent, ignore_errors=True)
    return folder, model


def _write_files(place: Path, folder: Path) -> Ctranslate2File:
    """Fill a new folder with files of transformers; return model.bin."""
    if place.is_file():
        place = _unpacked(place, folder.parent / "package")
    source = _model_folder(place)
    if reason := pointer_in(source):
        raise ExportError(reason)
    model = read_ctranslate2_file(source / _WEIGHTS)
    settings = json_object_or_none(source / _CONFIG) or {}
    is_whisper = model.specification == WHISPER
    tokens = _vocabulary(source, "vocabulary" if is_whisper else "shared_vocabulary")
    if len(tokens) != (rows := model.array(EMBEDDINGS).shape[0]):
        raise ExportError(
            f"the vocabulary at {source} has {len(tokens)} tokens, model.bin {rows}; copy both "
            "again"
        )
    folder.mkdir()
    for file in (file for pattern in _COPIED for file in source.glob(pattern)):
        shutil.copyfile(file, folder / file.name)
    if not is_whisper and (file := place / "sentencepiece.model").is_file():
        _write_sentencepiece(file, folder / _TOKENIZER, settings, tokens)
    _check_tokenizer(folder, source, tokens, is_whisper=is_whisper)
    contents = (_whisper if is_whisper else _translator)(model, folder, settings, tokens)
    names = (*contents, "preprocessor_config.json") if is_whisper else contents
    lacking = [name for name in names if not (source / name).is_file()]
    for name in {_CONFIG, *lacking} & contents.keys():
        text = json.dumps(contents[name], ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")
    return replace(model, lacking=tuple(lacking))


def _unpacked(file: Path, folder: Path) -> Path:
    """Return the single folder in a package of Argos, which is a zip file."""
    try:
        with zipfile.ZipFile(file) as package:
            package.extractall(folder)
        [place] = folder.iterdir()
    except (zipfile.BadZipFile, ValueError) as error:
        raise ExportError(
            f"{file} is no package of Argos, a zip of one folder: {error}; download it again"
        ) from error
    if is_ctranslate2(place):
        return place
    raise ExportError(f"{file} has no model/{_WEIGHTS} of CTranslate2; choose another package")


def _write_sentencepiece(
    file: Path, output: Path, settings: dict[str, Any], tokens: list[str]
) -> None:
    """Write tokenizer.json for a sentencepiece model, with the ids of the vocabulary ``tokens``.

    Pieces that the vocabulary lacks are left out.
    """
    content = sentencepiece_content(file)
    unknown = settings.get("unk_token", "<unk>")
    if unknown not in tokens or settings.get("add_source_eos"):
        raise ExportError(
            f"{file} cannot be used, expected a vocabulary with {unknown}, and sources without an "
            "end (add_source_eos false); choose another model"
        )
    tokenizer = tokenizer_of_pieces(content, tokens, tokens.index(unknown))
    names = [unknown, settings.get("bos_token", "<s>"), settings.get("eos_token", "</s>")]
    tokenizer.add_special_tokens([token for token in names if token in tokens])
    tokenizer.save(str(output))


def _vocabulary(source: Path, name: str) -> list[str]:
    """Return the tokens in the order of their ids."""
    if (file := source / f"{name}.json").is_file():
        return [str(token) for token in json.loads(file.read_text(encoding="utf-8"))]
    if (file := source / f"{name}.txt").is_file():
        return file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    raise ExportError(
        f"{source} lacks {name}.json, and {name}.txt, which CTranslate2 writes next to model.bin; "
        "copy it there (separate vocabularies of sources and targets are not read)"
    )


def _check_tokenizer(folder: Path, source: Path, tokens: list[str], *, is_whisper: bool) -> None:
    """Raise ExportError if the tokenizer is missing or belongs to another model."""
    files = (_TOKENIZER,) if is_whisper else (_TOKENIZER, "source.spm", "target.spm")
    has_json, *has_spm = ((folder / name).is_file() for name in files)
    if not has_json and not (has_spm and all(has_spm)):
        others = "" if is_whisper else ", or source.spm and target.spm (OPUS-MT)"
        raise ExportError(
            f"{source} lacks {_TOKENIZER}{others}; copy it there from the checkpoint that the "
            "folder was converted from"
        )
    if not has_json:
        return
    content = tokenizer_content(folder / _TOKENIZER)
    added = {each["content"]: each["id"] for each in content.get("added_tokens", [])}
    for token, index in {**id_by_token(content), **added}.items():
        if index < len(tokens) and tokens[index] != token:
            raise ExportError(
                f"token {index} is {token!r} in {source / _TOKENIZER} and {tokens[index]!r} in the "
                "vocabulary of the model; copy the tokenizer that it was converted with"
            )


def _sizes(model: Ctranslate2File, embeddings: set[str]) -> dict[str, Any]:
    """Return the fields of a config that are derived from model.bin."""
    rows, width = model.array(EMBEDDINGS).shape
    sizes = {
        "d_model": width,
        "vocab_size": rows + model.starts_from_zeros,
        "tie_word_embeddings": len({model.array(name) for name in embeddings}) == 1,
    }
    for stack in ("encoder", "decoder"):
        layers = {name.split("/")[1] for name in model.arrays if name.startswith(f"{stack}/layer_")}
        sizes |= {
            f"{stack}_layers": len(layers - {"layer_norm"}),
            f"{stack}_attention_heads": model.setting(f"{stack}/num_heads", 8),
            f"{stack}_ffn_dim": model.array(f"{stack}/layer_0/ffn/linear_0/weight").shape[0],
        }
    return sizes


def _id(ids: Mapping[str, int], token: Any, what: str) -> int:
    """Return the id of a token; ``what``: where the token is named, for the error."""
    if token in ids:
        return ids[token]
    raise ExportError(f"{what} names {token!r}, which the vocabulary lacks; copy both files again")


def _whisper(
    model: Ctranslate2File, folder: Path, settings: Mapping[str, Any], tokens: list[str]
) -> Contents:
    """Return the JSON files of a Whisper; special tokens have the same names in all Whispers."""
    ids = {token: index for index, token in enumerate(tokens)}

    def of(name: str) -> int:
        return _id(ids, f"<|{name}|>", "Whisper")

    end, start = of("endoftext"), of("startoftranscript")
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    max_target = model.array("decoder/position_encodings/encodings").shape[0]
    generation: dict[str, Any] = {
        **ends,
        "decoder_start_token_id": start,
        "max_length": max_target,
        "is_multilingual": "" in ids,  # CTranslate2 recognizes multilingual models by this token
        "no_timestamps_token_id": of("notimestamps"),
        "prev_sot_token_id": of("startofprev"),
        "suppress_tokens": settings.get("suppress_ids") or [],
        "begin_suppress_tokens": settings.get("suppress_ids_begin") or [],
        "alignment_heads": settings.get("alignment_heads") or [],
        "max_initial_timestamp_index": _MAX_INITIAL_TIMESTAMP,
        "task_to_id": {name: of(name) for name in ("transcribe", "translate") if "" in ids},
    }
    languages = settings.get("lang_ids") or range(start + 1, of("translate"))
    generation["lang_to_id"] = {tokens[index]: index for index in languages if "" in ids}
    config = {
        "model_type": "whisper",
        **_sizes(model, {EMBEDDINGS, PROJECTION}),
        **ends,
        "decoder_start_token_id": start,
        "num_mel_bins": model.array("encoder/conv1/weight").shape[1],
        "max_source_positions": model.array("encoder/position_encodings/encodings").shape[0],
        "max_target_positions": max_target,
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens")),
    }
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), tokens[end])
    tokenizer = {"tokenizer_class": "WhisperTokenizer", **names}
    return {_CONFIG: config, _GENERATION: generation, _TOKENIZER_CONFIG: tokenizer}


def _translator(
    model: Ctranslate2File, folder: Path, settings: Mapping[str, Any], tokens: list[str]
) -> Contents:
    """Return the JSON files of a translator."""
    ids = {token: index for index, token in enumerate(tokens)}
    family = _family(model, settings)
    what = f"config.json of {model.file.parent}"
    end = _id(ids, settings.get("eos_token", "</s>"), what)
    start, pad = len(tokens), len(tokens)  # in transformers' Marian, this row is zeros
    if not model.starts_from_zeros:
        start = _id(ids, settings.get("decoder_start_token", "<s>"), what)
        pad = ids.get(_PAD, end)
    special = {
        "bos_token_id": ids.get(settings.get("bos_token", "<s>")),
        "eos_token_id": end,
        "pad_token_id": pad,
        "decoder_start_token_id": start,
        "forced_eos_token_id": None,
    }
    config = {
        "model_type": family,
        **_sizes(model, {"encoder/embeddings_0/weight", EMBEDDINGS, PROJECTION}),
        **special,
        "max_position_embeddings": model.array("decoder/position_encodings/encodings").shape[0],
        "activation_function": _ACTIVATIONS[model.setting("decoder/activation", 0)],
        "scale_embedding": _is_scaled(model),
    }
    contents = {_CONFIG: config, _GENERATION: {**special, **_DEFAULTS[family]}}
    if model.starts_from_zeros:
        contents[_GENERATION]["bad_words_ids"] = [[pad]]
    if not (folder / _TOKENIZER).is_file():
        marian = {"tokenizer_class": "MarianTokenizer"}
        return {**contents, _TOKENIZER_CONFIG: marian, "vocab.json": {**ids, _PAD: pad}}
    added = tokenizer_content(folder / _TOKENIZER).get("added_tokens", [])
    contents[_TOKENIZER_CONFIG] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[end],
        "unk_token": settings.get("unk_token", "<unk>"),
        "extra_special_tokens": [each["content"] for each in added if each["special"]],
    }
    return contents


def _family(model: Ctranslate2File, settings: Mapping[str, Any]) -> str:
    """Return the family of transformers that has the same layers as a model."""
    has_norms_before = "decoder/layer_norm/gamma" in model.arrays
    is_known = model.setting("decoder/activation", 0) in _ACTIVATIONS
    if not is_known or model.setting("decoder/pre_norm", 1) != has_norms_before:
        raise model.refusal("has other norms or another activation")
    if (epsilon := settings.get("layer_norm_epsilon")) not in (None, 1e-5):
        raise model.refusal(f"has layer_norm_epsilon {epsilon}, expected 1e-5")
    return "pegasus" if has_norms_before else "marian"


def _is_scaled(model: Ctranslate2File) -> bool:
    """Return whether embeddings are multiplied by the root of their width."""
    width = model.array(EMBEDDINGS).shape[1]
    by = model.setting("decoder/scale_embeddings", 1)  # an integer is a flag, a float the factor
    factor = math.sqrt(width) if isinstance(by, int) and by else float(by or 1)
    if not any(
        math.isclose(factor, supported, rel_tol=1e-3) for supported in (1, math.sqrt(width))
    ):
        raise model.refusal(f"multiplies embeddings by {factor}")
    return factor != 1
