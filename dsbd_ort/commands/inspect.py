"""dsbd-inspect: the contents of a bundle, its memory, and the providers that can run it here."""

import ctypes
import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dsbd_ort.commands.bundle_summary import Summary, summarize_bundle
from dsbd_ort.commands.option_types import PATH
from dsbd_ort.commands.options import argument, flag
from dsbd_ort.decoding.native_decoder import NOT_INSTALLED
from dsbd_ort.requests.option_defaults import OF_SEARCHES, WARPING, listed
from dsbd_ort.requests.results import json_text
from dsbd_runtime.bundle_files.bundle import CacheEntry, open_bundle
from dsbd_runtime.bundle_files.draft_record import DraftAgreement, DraftRecord
from dsbd_runtime.engine.providers import find_provider
from dsbd_runtime.parts.attention.cache_entries import AttentionRows, ConvolutionRows, RecurrentRows
from dsbd_runtime.parts.feature.features import FeatureEntry
from dsbd_runtime.parts.head.head import FULL

JSON_FIELDS = """\b
The object that --json prints has these fields:
  bundle, schema_version, verified, versions {tool: version}
  vocab_size, context_length, kv_bytes_per_token, kv_bytes_full_context (of both models)
  target, draft (null without one):
    family, dtype, quantization, quantize (the option that gave it), form, logits, full_logits,
    bit_exact, weight_bytes,
    vocab_size, context_length, num_layers,
    caches [{kind, layer, dtype, and by kind: num_heads, key_width, value_width (attention rows);
      width, num_ancestors (convolution rows); num_heads, value_width, num_key_heads, key_width,
      most_new_rows (recurrent rows)}],
    kv_bytes_per_token, kv_bytes_full_context,
    kv_bytes_per_path (in addition, of each request and of each beam that has diverged),
    masks, sliding_window,
    features {width, layers, own_width} (null without a feature draft),
    adapter (null unless one was merged), unread_inputs ["images", ...],
    encoder {vocab_size, context_length, start_token_id, cross [{as in caches}],
      reads_positions, languages {name: token}, hidden_width, fingerprint,
      is_shared (true: by the target's encoder),
      speech {sampling_rate, num_mels, languages, tasks, ...} (null except for a speech model)}
      (null except for an encoder-decoder),
    agreement {num_tokens, best, overlap, best_four} of a draft (null if not measured),
    source_bytes_per_token,
    parity {measure, value, limit,
      accepted (null unless a person accepted a refused engine)}
  generation_config {option: value}, not_built {name: value}
  has_text_checks (true: the native library compares its text with Python's at opening),
  native_text {encodes, decodes, renders, reason} (what the export of an older bundle measured;
    null: nothing)
  has_native_loop (true: dsbd_ort_native is installed, and decodes what it knows)
  total_bytes, files {name: bytes}
  draft_record (null unless dsbd-distill made the draft):
    target, num_parameters, num_target_parameters, acceptance, acceptance_error,
    temperature, top_k, top_p, are_chats, are_sources, seed, steps, minutes, num_train_tokens,
    num_held_out_tokens, num_train_prompts, greedy_acceptance, coverage, coverage_beams,
    num_proposed_tokens, curve [{step, seconds, loss, acceptance}],
    speeds [{num_beams, tokens_per_iteration, speedup, is_greedy}], measured_on
  engines [{role, built {flavour, tensorrt_version, compute_capability, capacity,
    step_profiles, move_profiles, attention, onnx_sha256}, problems, not_checked}]
  providers [{name, can_run, problems}]
"""
"""The end of the command's help; \\b keeps click from wrapping the lines."""

_DRIVER = "libcuda.so.1"
_OF_NVIDIA = ("cuda", "tensorrt", "tensorrt-rtx")
_PRINTED_WIDTH = 100  # without a terminal; rich would cut lines at 80 columns


@dataclass(frozen=True, kw_only=True)
class InspectArguments:
    """The arguments of dsbd-inspect."""

    bundle: Path = argument(type=PATH)
    verify: bool = flag(help="Check the hash of every file too.")
    as_json: bool = flag("--json", help="Print one JSON object.")


def run(arguments: InspectArguments) -> None:
    """Print the summary of a bundle: tables, or one JSON object."""
    bundle = open_bundle(arguments.bundle, verify=arguments.verify)
    summary = summarize_bundle(bundle, verified=arguments.verify)
    if arguments.as_json:
        click.echo(json_text(_plain(summary), indent=2))
    else:
        print_summary(summary)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Summary | dict):
        entries = vars(value) if isinstance(value, Summary) else value
        return {name: _plain(entry) for name, entry in entries.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


def print_summary(summary: Summary) -> None:
    """Print models, files and providers on stdout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PRINTED_WIDTH)
    console.print(_models_table(summary))
    models = "both"
    if summary.draft is None:
        models = "the target"
        command = shlex.join(["dsbd-export", "--bundle", summary.bundle, "--draft", "DRAFT"])
        _print_lines(
            console, ["no draft: requests draft by n-grams", f"add a draft with: {command}"]
        )
    console.print(
        f"keys and values of {models}: {summary.kv_bytes_per_token:,} bytes a token, "
        f"{summary.kv_bytes_full_context:,} in a context of {summary.context_length:,}",
        highlight=False,
    )
    if summary.context_length < summary.target.context_length:
        shorter = (
            f"the draft's context is shorter than the target's {summary.target.context_length:,}"
        )
        _print_lines(console, [f"requests can use {summary.context_length:,} tokens: {shorter}"])
    if summary.draft_record is not None:
        _print_lines(console, _record_lines(summary.draft_record))
    _print_lines(console, _defaults_lines(summary))
    _print_lines(console, [_native_text_line(summary), _loop_line(summary)])
    console.print(_files_table(summary))
    versions = ", ".join(f"{tool} {version}" for tool, version in summary.versions.items())
    console.print(
        f"schema version {summary.schema_version}, made with {versions}",
        highlight=False,
        markup=False,
    )
    for engine in summary.engines:
        _print_lines(console, _engine_lines(engine))
    for lines in providers_lines(summary, shows_all=has_driver()):
        _print_lines(console, lines)


def has_driver() -> bool:
    """Return whether this machine has NVIDIA's driver, which its providers need."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def providers_lines(summary: Summary, *, shows_all: bool) -> Iterator[list[str]]:
    """Yield the lines of every provider; without ``shows_all`` one line for all of NVIDIA's."""
    unusable, not_tried = [], []
    for provider in summary.providers:
        if provider.name in _OF_NVIDIA and not provider.can_run and not shows_all:
            unusable.append(provider.name)
            continue
        if not find_provider(provider.name).is_tried:
            not_tried.append(provider.name)
            continue
        verdict = "runs this bundle here" if provider.can_run else "cannot run this bundle here"
        yield [f"provider {provider.name}: {verdict}", *provider.problems]
    if unusable:
        names = ", ".join(unusable)
        yield [f"providers {names}: no NVIDIA driver ({_DRIVER}) here; all problems: --json"]
    yield [f"plug-ins of ONNX Runtime, not tried: {', '.join(not_tried)}"]


def _print_lines(console: Console, lines: list[str]) -> None:
    console.print("\n  ".join(lines), highlight=False, markup=False, soft_wrap=True)


def _defaults_lines(summary: Summary) -> list[str]:
    lines = ["defaults of generation_config.json: " + (listed(summary.generation_config) or "none")]
    if warped := [name for name in WARPING if name in summary.generation_config]:
        lines.append(f"not read by search strategies: {', '.join(warped)}")
    if ranked := [n for n in summary.generation_config if n in OF_SEARCHES]:
        lines.append(f"read only by searches with several beams: {', '.join(ranked)}")
    if summary.not_built:
        lines.append(f"dsbd-ort cannot do yet: {listed(summary.not_built)}")
    return lines


def _native_text_line(summary: Summary) -> str:
    measured = summary.native_text
    if summary.has_text_checks:
        says = "compares its text with Python's at opening, by text_checks.json"
    elif measured is None:
        says = "refuses text: no text_checks.json; export again for text without Python"
    elif measured.encodes and measured.decodes and measured.renders is not False:
        says = "reads and writes the text of this bundle"
    else:
        says = f"refuses some text: {measured.reason}"
    return f"the native library {says}"


def _loop_line(summary: Summary) -> str:
    if summary.has_native_loop:
        return "requests are decoded by the loop in C++ as far as it can (docs/python.md)"
    return f"requests are decoded by the loop in numpy: {NOT_INSTALLED}"


def _record_lines(record: DraftRecord) -> list[str]:
    lines = [
        f"the draft was distilled from {record.target}: held-out acceptance "
        f"{record.acceptance:.3f} at temperature {record.temperature:g}, top-k {record.top_k}"
        f"{'' if record.top_p == 1.0 else f', top-p {record.top_p:g}'}"
        f"{' after prompts of chats' if record.are_chats else ''}"
        f"{' after sources' if record.are_sources else ''}"
    ]
    for speed in record.speeds:
        lines.append(
            f"{speed.num_beams} beams{', greedy' if speed.is_greedy else ''}: "
            f"{speed.tokens_per_iteration:.2f} tokens an iteration, "
            f"{speed.speedup:.2f}x expected ({record.measured_on})"
        )
    return lines


def _engine_lines(engine: Summary) -> list[str]:
    built = engine.built
    calls = ", ".join(map(str, built.step_profiles))
    if engine.problems:
        verdict = "does not fit this machine"
    elif engine.not_checked:
        verdict = "may fit this machine"
    else:
        verdict = "fits this machine"
    return [
        f"engine of the {engine.role}: {verdict}",
        f"built by {built.flavour} {built.tensorrt_version} for compute capability "
        f"{built.compute_capability}, {built.capacity:,} cache rows, calls of up to {calls} rows, "
        f"attention {built.attention}",
        *engine.problems,
        *(f"not compared: {name}" for name in engine.not_checked),
    ]


def _models_table(summary: Summary) -> Table:
    table = Table("", "target", "draft", title=summary.bundle)
    target = _model_cells(summary.target)
    draft = {"family": "none"} if summary.draft is None else _model_cells(summary.draft)
    for name in dict.fromkeys([*target, *draft]):  # the parity row is named by its measure
        table.add_row(name, target.get(name, ""), draft.get(name, ""))
    return table


def _model_cells(model: Summary) -> dict[str, str]:
    parity = model.parity
    reads_more = model.full_logits and model.logits != FULL
    shapes = Counter(f"{_shape(cache)}, {cache.dtype}" for cache in model.caches)
    return {
        "family": model.family,
        "dtype, quantization, form": f"{model.dtype}, {model.quantize}, {model.form}",
        "weights": f"{model.weight_bytes:,} bytes",
        "adapter": model.adapter or "none",
        "inputs not read": ", ".join(model.unread_inputs) or "none",
        "logits": f"{model.logits}{', full to read' if reads_more else ''}",
        "bit-exact": "not claimed" if model.bit_exact is None else str(model.bit_exact or "no"),
        "vocabulary": f"{model.vocab_size:,}",
        "context": f"{model.context_length:,}",
        **_source_cells(model),
        "features": _features_cell(model.features),
        "masks": "\n".join(model.masks),
        "sliding window": "none" if model.sliding_window is None else f"{model.sliding_window:,}",
        "key/value cache": "\n".join(f"{number} x {shape}" for shape, number in shapes.items()),
        "key/value bytes a token": f"{model.kv_bytes_per_token:,}",
        "in a full context": f"{model.kv_bytes_full_context:,}",
        **_agreement_cells(model.agreement),
        **(
            {"in addition, a request or diverged beam": f"{model.kv_bytes_per_path:,}"}
            if model.kv_bytes_per_path
            else {}
        ),
        f"parity: {parity.measure}": f"{parity.value:.1e} (limit {parity.limit:.0e})"
        + ("" if parity.accepted is None else f"\nREFUSED, accepted to {parity.accepted:.1e}"),
    }


def _agreement_cells(agreement: DraftAgreement | None) -> dict[str, str]:
    if agreement is None:
        return {}
    return {
        "agreement with the target": f"{agreement.best:.0%} of {agreement.num_tokens} tokens, "
        f"{agreement.best_four:.0%} in the four best, overlap {agreement.overlap:.2f}"
    }


def _source_cells(model: Summary) -> dict[str, str]:
    if model.encoder is None:
        return {}
    source = f"{model.encoder.context_length:,} tokens of {model.encoder.vocab_size:,}"
    if model.encoder.is_shared:
        source += "\nby the target's encoder"
    languages = model.encoder.languages
    if (speech := model.encoder.speech) is not None:
        source = f"{speech.chunk_seconds} s of sound, {speech.num_mels} mels"
        if speech.alignment is not None:
            source += f"\ntimes of words, by {len(speech.alignment_heads or ())} heads"
        languages = speech.languages
    if (picture := model.encoder.picture) is not None:
        source = f"a picture, {picture.height} x {picture.width}: {picture.num_positions:,} rows"
    if languages is not None:
        source += f"\n{len(languages)} languages: {', '.join(list(languages)[:3])}, ..."
    return {"source": source, "bytes a source token": f"{model.source_bytes_per_token:,}"}


def _shape(cache: CacheEntry) -> str:
    if isinstance(cache, ConvolutionRows):
        return f"convolution of {cache.width:,} channels"
    if isinstance(cache, RecurrentRows):
        keys = f"{cache.num_key_heads} keys x {cache.key_width}"
        return f"recurrence of {keys} and {cache.num_heads} deltas x {cache.value_width}"
    if not isinstance(cache, AttentionRows):
        return cache.kind
    values = f" and {cache.value_width}" if cache.value_width != cache.key_width else ""
    return f"{cache.num_heads} heads x {cache.key_width}{values}"


def _features_cell(features: FeatureEntry | None) -> str:
    if features is None:
        return "none"
    if features.layers is not None:
        return f"returns what enters layers {', '.join(map(str, features.layers))}"
    return f"reads {features.width:,}, or {features.own_width:,} of its own"


def _files_table(summary: Summary) -> Table:
    checked = "sizes and hashes checked" if summary.verified else "sizes checked"
    table = Table("file", "bytes", title=f"{summary.total_bytes:,} bytes, {checked}")
    table.columns[1].justify = "right"
    for name, size in summary.files.items():
        table.add_row(name, f"{size:,}")
    return table
