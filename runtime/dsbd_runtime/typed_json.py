"""Typed JSON: the files of a bundle as frozen dataclasses; every mismatch names its place."""

import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from dsbd_errors.text_files import text_of
from dsbd_runtime.errors import BundleError

Entry = TypeVar("Entry")
_MOST_BYTES = 64 * 2**20
_LARGEST = 2**31 - 1
_MOST_NAMES = 4  # names of entries in a message


class UnknownEntryError(BundleError):
    """A file of a bundle has an entry that is unknown here: a later version made the bundle."""

    def __init__(self, name: str, value: object, where: str, made_by: str = "it") -> None:
        self.entry = name, value, where
        super().__init__(
            f"{where} has {name_in_short(name)} {in_short(value)}, which this version of dsbd-ort "
            f"does not know; use the version that made {made_by} or a later one"
        )


def json_from_file(file: Path) -> Any:
    """Read a JSON file of a bundle; raise BundleError if it is missing or invalid."""
    try:
        if (size := file.stat().st_size) > _MOST_BYTES:
            raise BundleError(f"{file} has {size} bytes, expected at most {_MOST_BYTES}")
        return json.loads(text_of(file.read_bytes()))
    except (ValueError, OSError, RecursionError) as error:
        raise BundleError(f"{file} cannot be read as JSON ({error}); export again") from error


def json_object_in(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is absent or has another JSON value."""
    content = json_from_file(file) if file.exists() else {}
    return content if isinstance(content, dict) else {}


def json_from_text(text: str) -> Any:
    """Read JSON; raise ValueError for an invalid text, NaN, or a number that is too large."""
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"the number {digits[:40]} is too large for 64 bits")
    return number


def typed(kind: type[Entry], value: Any, where: str) -> Entry:
    """Return parsed JSON as the dataclass ``kind``; raise BundleError at the first mismatch.

    Fields are str, int, bool, float, None, lists and dicts of them, dataclasses, and unions. Fields
    without a default must be present. An unknown field is ignored if it is null, else it raises
    UnknownEntryError. If a dataclass has subclasses, the field ``kind`` selects the subclass.
    ``where`` names the value in messages.
    """
    entry: Entry = _parsed(kind, value, where)
    return entry


def mismatch(expected: str, value: object, where: str) -> BundleError:
    """Return the BundleError for an unexpected value at a place."""
    return BundleError(
        f"{where} is {in_short(value)}, expected {expected}; export the bundle again"
    )


def check_counts(counts: dict[str, int], where: str, most: int = _LARGEST) -> None:
    """Raise BundleError for a number below 1 or above ``most``; ``counts``: by name in the file."""
    for name, count in counts.items():
        if count < 1:
            raise mismatch("a number above 0", count, f"{where}: {name}")
        if count > most:
            raise mismatch(f"at most {most}", count, f"{where}: {name}")


def in_short(value: object) -> str:
    """Return at most 100 characters, in one line, that show a value."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep, or a number with too many digits
        return f"a {type(value).__name__} too large to show"
    if not text.isprintable():  # an array of several lines
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 100 else f"{text[:97]}..."


def name_in_short(name: str) -> str:
    """Return a name from a file unchanged, or by ``in_short`` if it is long or not printable."""
    return name if len(name) <= 100 and name.isprintable() else in_short(name)


def _parsed(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kinds := _by_kind(kind):
        first = next(iter(kinds.values()))
        kind = _chosen(kinds, value, where) if isinstance(value, dict) else first
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _parsed_dataclass(kind, value, where)
    if origin is list and isinstance(value, list):
        return [_parsed(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {
            k: _parsed(arguments[1], v, f"{where}: {name_in_short(k)}") for k, v in value.items()
        }
    if origin is types.UnionType:
        scalars = (argument for argument in arguments if type(value) is argument)
        return _parsed(next(scalars, arguments[0]), value, where)
    if kind is float and type(value) in (int, float) and math.isfinite(_as_float(value)):
        return float(value)
    if origin is None and type(value) is kind and kind is not float:
        return value
    raise mismatch(_in_words(kind), value, where)


def _in_words(kind: Any) -> str:
    """Return the expected type in words; a dataclass is called an object with its entries."""
    if not dataclasses.is_dataclass(kind):
        return getattr(kind, "__name__", str(kind))
    names = [field.name for field in dataclasses.fields(kind)]
    shown = names if len(names) <= _MOST_NAMES else [*names[: _MOST_NAMES - 1], "..."]
    return f"an object ({', '.join(shown)})"


def _by_kind(base: Any) -> dict[str, Any]:
    """Return the subclasses of a dataclass by the default of their field ``kind``."""
    if not (isinstance(base, type) and dataclasses.is_dataclass(base)):
        return {}
    return {member.kind: member for member in base.__subclasses__() if hasattr(member, "kind")}


def _chosen(kinds: dict[str, Any], value: dict[str, Any], where: str) -> Any:
    kind = value.get("kind")
    if not isinstance(kind, str):
        raise mismatch(f"one of {', '.join(kinds)}", kind, f"{where}: kind")
    if kind not in kinds:
        raise UnknownEntryError("kind", kind, where)
    return kinds[kind]


def _parsed_dataclass(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    required = {
        field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING
    }
    unknown = sorted(name for name in set(value) - set(hints) if value[name] is not None)
    if missing := required - set(value):
        odd = in_short(sorted([*missing, *unknown]))
        raise BundleError(f"{where}: missing or unknown entries {odd}; export the bundle again")
    if unknown:
        raise UnknownEntryError(unknown[0], value[unknown[0]], where)
    return kind(
        **{k: _parsed(t, value[k], f"{where}: {k}") for k, t in hints.items() if k in value}
    )


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
