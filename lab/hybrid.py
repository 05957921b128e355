"""Engine calls of a hybrid model beside those of a Llama of as many parameters, by context.

Random models: one in the shapes of Qwen3.5-0.8B (a gated delta rule of 16 heads of 128 x 128 in
three layers of four), and a Llama of as many layers, whose MLPs are as much wider as that has more
parameters. Both have a small vocabulary: its head would take the same time in both. They are made
and exported into --work, if missing.

The third figure is what ONNX Runtime's operator LinearAttention takes for the recurrences alone, as
engines without rows would call it: a call for each of three levels of the forest, every node with a
state of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper
from transformers import LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig

from dsbd_export.config import ExportConfig
from dsbd_export.pipeline import export_bundle
from dsbd_ort.benchmark.bootstrap import spread
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.ort.ort_module import session_options
from dsbd_runtime.ort.ort_session import OrtSession
from dsbd_runtime.parts.cache_entries import RecurrentRows, every_row, recurrent
from dsbd_runtime.parts.kv_cache import row_bytes
from dsbd_runtime.parts.part import part_of
from dsbd_runtime.parts.recent_rows import RecentRows, path_bytes
from lab.calls.command import Engine, Found, measured
from lab.frame.page import RESULTS, Page, ratio_cell, spread_cell, writes
from scripts.document_sections import table
from scripts.family_checkpoints import write_checkpoint

CONTEXTS, ROWS, LEVELS = (64, 1024, 4096), (1, 4, 12, 20), 3
HIDDEN, FEED_FORWARD, VOCAB, POSITIONS = 1024, 3584, 4096, 8192
ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
SPECIAL = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "tie_word_embeddings": True}
SPECIAL |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
COLUMNS = ("context", "rows", "hybrid, ms", "Llama, ms", "hybrid / Llama", "LinearAttention, ms")
_DEVIATION = 0.02  # of the weights: activations stay moderate
_WORST_ROUNDING = 1e-2


def hybrid_config(num_layers: int) -> PreTrainedConfig:
    """Return the shapes of Qwen3.5-0.8B with so many layers."""
    linear: dict[str, Any] = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
    types = ["linear_attention"] * 3 + ["full_attention"]
    return Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=num_layers,
        layer_types=(types * num_layers)[:num_layers],
        **linear,
        **ATTENTION,
        **SPECIAL,
    )


def llama_config(num_layers: int) -> PreTrainedConfig:
    """Return a Llama of as many parameters as the hybrid, up to 1 %."""
    mixer = HIDDEN * (6144 + 2048 + 2 * 16) + 2048 * HIDDEN  # of a gated delta rule
    attention = HIDDEN * (2 * 2048 + 2 * 512) + 2048 * HIDDEN  # with a gate, as Qwen3.5's
    own = HIDDEN * (2048 + 2 * 512) + 2048 * HIDDEN
    more = (3 * mixer + attention) / 4 - own
    wider = round(more / (3 * HIDDEN) / 64) * 64
    return LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD + wider,
        num_hidden_layers=num_layers,
        **ATTENTION,
        **SPECIAL,
    )


def bundle_of(name: str, config: PreTrainedConfig, work: Path) -> Bundle:
    """Return the bundle of a random model, made if missing."""
    bundle = work / name
    if not bundle.exists():
        checkpoint = work / f"{name}-checkpoint"
        if not checkpoint.exists():
            write_checkpoint(checkpoint, config, deviation=_DEVIATION)
        options = ExportConfig(target=str(checkpoint), output=bundle, atol=_WORST_ROUNDING)
        export_bundle(options, report=lambda line: click.echo(line, err=True))
    return open_bundle(bundle)


def operator_graph(entry: RecurrentRows) -> bytes:
    """Return a graph of one LinearAttention node over B states, a token each."""
    heads, key, value = entry.num_heads, entry.key_width, entry.value_width
    shapes: dict[str, list[int | str]] = {
        "query": ["B", 1, heads * key],
        "key": ["B", 1, heads * key],
        "value": ["B", 1, heads * value],
        "state": ["B", heads, key, value],
        "decay": ["B", 1, heads],
        "rate": ["B", 1, heads],
    }
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    outputs = [
        helper.make_tensor_value_info("outputs", TensorProto.FLOAT, shapes["value"]),
        helper.make_tensor_value_info("states", TensorProto.FLOAT, shapes["state"]),
    ]
    node = helper.make_node(
        "LinearAttention",
        list(shapes),
        ["outputs", "states"],
        domain="com.microsoft",
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule="gated_delta",
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "recurrence", inputs, outputs)
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


def operator_ms(bundle: Bundle, threads: int, rounds: int) -> dict[int, str]:
    """Return what the operator takes for all recurrent layers, by rows, as cells."""
    entries = recurrent(bundle.entry("target").caches)
    session = ort.InferenceSession(
        operator_graph(entries[0]),
        session_options(ort, bundle.entry("target"), EngineSettings(num_threads=threads)),
        providers=["CPUExecutionProvider"],
    )
    cells = {}
    for rows in ROWS:
        times = []
        calls = [_operator_call(session, num) for num in _rows_of_levels(rows)]
        for _ in range(rounds + 1):
            began = time.perf_counter()
            for _ in entries:
                for call in calls:
                    call()
            times.append((time.perf_counter() - began) * 1e3)
        cells[rows] = spread_cell(spread(times[1:]))
    return cells


def _rows_of_levels(rows: int) -> list[int]:
    """Return the nodes of each level of a forest of so many."""
    return [len(part) for part in np.array_split(np.arange(rows), LEVELS) if len(part)]


def _operator_call(session: ort.InferenceSession, num_rows: int) -> Callable[[], None]:
    """Return a call of the operator for nodes whose states are gathered from their parents'."""
    rng = np.random.default_rng(0)
    inputs = {
        each.name: rng.random((num_rows, *each.shape[1:]), dtype=np.float32) / 100
        for each in session.get_inputs()
    }
    inputs["decay"] *= -1
    parents = np.arange(num_rows) // 2
    states = inputs["state"]

    def call() -> None:
        inputs["state"] = states[parents]
        session.run(["outputs", "states"], inputs)

    return call


def fold_ms(bundle: Bundle, threads: int, rounds: int) -> dict[int, str]:
    """Return what a fold of so many rows takes, as cells."""
    session = OrtSession(
        bundle.model_path("target"),
        bundle.entry("target"),
        settings=EngineSettings(num_threads=threads),
    )
    memory, cells = part_of(session.parts, RecentRows).memory, {}
    memory.reserve(128, 1)
    memory.reserve_checkpoints(2)
    for rows in (32, 64):
        times = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            memory.fold(np.arange(rows), 0, 1)
            times.append((time.perf_counter() - began) * 1e3)
        cells[rows] = spread_cell(spread(times[1:]))
    session.close()
    return cells


def call_rows(
    hybrid: Engine,
    llama: Engine,
    contexts: tuple[int, ...],
    found: dict[int, Found],
    operator: dict[int, str],
) -> Iterator[tuple[str, ...]]:
    """Yield a row a context and number of rows."""
    for context in contexts:
        for rows, here in found.items():
            mine, theirs = hybrid.label(context), llama.label(context)
            cells = (spread_cell(here.quiet.milliseconds(name)) for name in (mine, theirs))
            ratio = ratio_cell(here.quiet.ratio(mine, theirs))
            yield str(context), str(rows), *cells, ratio, operator[rows]


def memory_lines(hybrid: Bundle, llama: Bundle, fold: dict[int, str]) -> Iterator[str]:
    """Yield what each keeps, and what a fold takes."""
    for bundle in (hybrid, llama):
        caches = bundle.entry("target").caches
        yield (
            f"* {bundle.path.name}: {row_bytes(every_row(caches)) / 1e3:.1f} kB a token, "
            f"{path_bytes(caches) / 1e6:.1f} MB besides of a request or parted beam"
        )
    folds = ", ".join(f"{rows} rows {cell} ms" for rows, cell in fold.items())
    yield f"* a fold of {folds}"


@click.command(help=__doc__)
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/hybrid"))
@click.option("--layers", default=24, show_default=True)
@click.option("--context", "contexts", multiple=True, type=int, default=CONTEXTS, show_default=True)
@click.option("--rounds", default=4, show_default=True)
@writes(RESULTS / "hybrid.md")
def main(work: Path, layers: int, contexts: tuple[int, ...], rounds: int, page: Page) -> None:
    """Measure both models and write the section."""
    ort.set_default_logger_severity(3)
    work.mkdir(parents=True, exist_ok=True)
    page.begin("calls")
    hybrid = bundle_of(f"hybrid-{layers}", hybrid_config(layers), work)
    llama = bundle_of(f"llama-{layers}", llama_config(layers), work)
    engines = (
        Engine(hybrid, "target", "today", page.threads),
        Engine(llama, "target", "today", page.threads),
    )
    found = measured(list(engines), contexts, rounds, with_busy=False)
    operator = operator_ms(hybrid, page.threads, rounds)
    lines = table(COLUMNS, call_rows(*engines, contexts, found, operator))
    lines += ["", *memory_lines(hybrid, llama, fold_ms(hybrid, page.threads, rounds))]
    page.write("calls", lines, f"onnxruntime {ort.__version__}", f"medians over {rounds} rounds")
