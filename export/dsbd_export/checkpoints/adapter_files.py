"""Files of an adapter (PEFT): settings and shapes of weights, checked before a model is loaded.

PEFT itself sets no limits: it allocates memory for any rank, matches a pattern for any time, and
may raise any error.
"""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors import safe_open
from torch import Tensor

from dsbd_export.errors import ExportError, reason_of

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
BY_HAND = (
    "merge it by peft's merge_and_unload(), save model and tokenizer with save_pretrained to "
    "another folder, and export that"
)

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of weights by their names."""

_EMBEDDING = r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings|embeddings|tok_embeddings)\."
_HEAD = r"(?:^|\.)(?:lm_head|embed_out)\."
_WHOLE = r"(?:(?:token_adapter\.)?base_layer\.|original_module\.|modules_to_save\.)?weight"
_EMBEDDING_AXES = {rf"{_EMBEDDING}{_WHOLE}$": 0, rf"{_EMBEDDING}lora_embedding_A(?:\.weight)?$": 1}
_OF_EACH_TOKEN = rf"(?:{_WHOLE}|lora_B(?:\.weight)?|hada_w1_a|ia3_l|vera_lambda_b)"
_HEAD_AXES = {rf"{_HEAD}{_OF_EACH_TOKEN}$": 0}
"""Axis with one entry per token, by patterns of names of weights."""

_ABOUT = ("auto_mapping", "peft_version")  # fields of adapter_config.json that are not settings
_EMPTY: tuple[object, ...] = (None, False, 0, "", [], {})
_LISTS_OF_NAMES = ("target_modules", "exclude_modules", "modules_to_save", "target_parameters")
_PATTERNS = (*_LISTS_OF_NAMES, "layers_pattern", "rank_pattern", "alpha_pattern")
_TOKENS = ("trainable_token_indices", "token_indices")
_NO_SIZES = (*_TOKENS, "alora_invocation_tokens", "layers_to_transform", "total_step", "tinit")
_NO_SIZE = re.compile(r"alpha|seed|prng|warmup|interval|tfinal|deltaT|lambda|_config$|dropout")
_ANY_SIZE = ("LOKR", "r")  # a rank above half of the width stands for weights without a rank
_LEAST = 256  # smallest limit of a setting: defaults of unused settings may be this large
_SECONDS = 10.0  # for all patterns of an adapter
_MATCH_ALL = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for form in (f"({pattern})$", rf"(.*\\.)?({pattern})$", rf"(^|.*\\.){pattern}($|\\..*)"):
        try:
            compiled = re.compile(form)
        except Exception:
            continue
        for name in names:
            compiled.match(name)
"""


def weight_shapes(where: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights by name; raise ExportError if damaged or not finite."""
    file = next(each for name in WEIGHT_FILES if (each := folder / name).is_file())
    shapes = {}
    try:
        for name, weight in _weights(file):
            if weight.is_floating_point() and not bool(weight.isfinite().all()):
                raise ExportError(
                    f"the weight {name} of {where} has values that are not finite; copy "
                    f"{file.name} again, or train the adapter again"
                )
            shapes[name] = tuple(weight.shape)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"{file.name} of {where} cannot be read: {reason_of(error)}; copy it again"
        ) from error
    if not shapes:
        raise ExportError(f"{file.name} of {where} has no weights; copy it again")
    return shapes


def _weights(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():
                yield name, weights.get_tensor(name)
        return
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError("it has no weights by their names")
    yield from content.items()


def num_embedded(shapes: Shapes) -> int | None:
    """Return the vocabulary size by an adapter's weights of the embedding, None if it has none."""
    return max(_sizes(shapes, _EMBEDDING_AXES), default=None)


def fewest_tokens(content: Mapping[str, Any], shapes: Shapes) -> int:
    """Return the smallest vocabulary that an adapter's weights of head and single tokens need."""
    rows = (token + 1 for name in _TOKENS for token in _integers(content.get(name)))
    return max((*rows, *_sizes(shapes, _HEAD_AXES)), default=0)


def _sizes(shapes: Shapes, axis_by_pattern: Mapping[str, int]) -> Iterator[int]:
    for pattern, axis in axis_by_pattern.items():
        for name, shape in shapes.items():
            if len(shape) > axis and re.search(pattern, name):
                yield shape[axis]


def check_settings(where: str, content: Mapping[str, Any], kind: str, shapes: Shapes) -> None:
    """Raise ExportError for a setting that peft would ignore, or whose value is invalid."""
    supported = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])}
    largest = max(_LEAST, *(size for shape in shapes.values() for size in shape))
    for name, value in content.items():
        if name not in supported and name not in _ABOUT and value not in _EMPTY:
            raise ExportError(
                f"{where} sets {name} = {value!r}, which the installed peft does not support; "
                "install the version that made it "
                f"({content.get('peft_version', 'not named')}), and {BY_HAND}"
            )
        if (expected := _expected(name, value)) is not None:
            raise ExportError(f"{where} sets {name} = {value!r}, expected {expected}; {_AGAIN}")
        is_size = (kind, name) != _ANY_SIZE and name not in _NO_SIZES
        max_size = len(shapes) if name == "layer_replication" else largest
        too_large = [number for number in _integers(value) if number > max_size]
        if is_size and not _NO_SIZE.search(name) and too_large:
            raise ExportError(
                f"{where} sets {name} = {_short(value)}, expected numbers up to {max_size}, the "
                f"largest size in its weights; {_AGAIN}"
            )


_AGAIN = f"copy {CONFIG_FILE} again"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _expected(name: str, value: object) -> str | None:
    """Return the expected kind of value for a setting, None if the value is valid."""
    if name == "base_model_name_or_path" and not isinstance(value, str | None):
        return "the name of a model"
    if name == "r" and not (type(value) is int and value >= 0):
        return "a number from 0 on"
    if name in _LISTS_OF_NAMES and not isinstance(value, str | None):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            return "names of modules"
    if name in ("rank_pattern", "alpha_pattern") and not isinstance(value, dict | None):
        return "numbers by names of modules"
    return None


def _integers(value: object) -> Iterator[int]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _integers(each)
    elif type(value) is int:
        yield value


def check_patterns(where: str, content: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ExportError if matching a pattern takes too long; a separate process tries it."""
    patterns = [pattern for name in _PATTERNS for pattern in _strings(content.get(name))]
    if all(re.fullmatch(r"[\w.]*", pattern) for pattern in patterns):
        return
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH_ALL],
            input=json.dumps([patterns, list(names)]).encode(),
            timeout=_SECONDS,
            capture_output=True,
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        shown = next(each for each in patterns if not re.fullmatch(r"[\w.]*", each))
        raise ExportError(
            f"{where} has patterns for names of modules, such as {_short(shown)}, that take more "
            f"than {_SECONDS:g} s to match; name the modules in {CONFIG_FILE} instead"
        )


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        yield from (each for each in value if isinstance(each, str))


def module_names(shapes: Iterable[str]) -> set[str]:
    """Return the names of modules in an adapter's weights, each also with "!", to match nothing."""
    names = set()
    for weight in shapes:
        parts = weight.removeprefix("base_model.model.").split(".")
        names |= {".".join(parts[:number]) for number in range(1, len(parts))}
    return names | {f"{name}!" for name in names}
