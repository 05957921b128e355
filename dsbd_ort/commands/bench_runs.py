"""Reading ``--run "dsbd num_beams=4 width_policy=fixed name=fast"``."""

from __future__ import annotations

import shlex
from typing import Any

import click

from dsbd_ort.benchmark.bench_run import BenchRun
from dsbd_ort.benchmark.default_runs import CommonSettings
from dsbd_ort.commands.decoding_options import OPTIONS, option_type

_OWN_KEYS = ("name", "baseline")


def run_from_text(text: str, common: CommonSettings) -> BenchRun:
    """Return the run that ``text`` means: a strategy, then ``key=value`` words.

    Keys are the fields of DecodingConfig, ``name`` (what to call the run) and ``baseline`` (the
    name of the run to compare with, or none). What it does not name comes from ``common``.
    """
    try:
        strategy, *words = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(
            f"--run {text!r} names no strategy; write one such as 'dsbd num_beams=4'"
        ) from error
    options: dict[str, Any] = {"strategy": strategy, **common.options_of(strategy)}
    own: dict[str, str] = {}
    for word in words:
        key, is_pair, value = word.partition("=")
        if not is_pair or not value or key not in (*OPTIONS, *_OWN_KEYS) or key == "strategy":
            raise click.UsageError(
                f"--run {text!r} has {word!r}; expected key=value with a key among "
                f"{', '.join([*_OWN_KEYS, *OPTIONS])}"
            )
        if key in _OWN_KEYS:
            own[key] = value
        else:
            options[key] = _converted(key, value)
    return BenchRun(options=options, given_name=own.get("name"), baseline=own.get("baseline"))


def _converted(key: str, value: str) -> Any:
    try:
        return option_type(key).convert(value, None, None)
    except click.BadParameter as error:
        raise click.UsageError(f"--run has {key}={value}: {error.message}") from error
