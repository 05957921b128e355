"""Engine of the parity gate: the one that hosts open, on ONNX Runtime's CPU provider.

Two things differ from an engine that serves. Cache rows that no forward has written hold noise: a
graph that reads rows hidden by its masks fails the gate. And fp16 weights are widened when they are
used, because an export has no memory for all of them at once; then no graph is optimized.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsbd_export.errors import ExportError, reason_of
from dsbd_export.gate.bf16_twin import runnable_on_cpu
from dsbd_export.gate.case_forwards import nodes_forward, prefix_forward, source_of
from dsbd_export.gate.mapped_pages import dropped_pages
from dsbd_export.parity_cases import ForestCase
from dsbd_forward.features import ParentFeatures
from dsbd_forward.forward import Forward, ForwardResult, joined_forward
from dsbd_forward.rows import NO_INTS
from dsbd_runtime.bundle_files.bundle import WEIGHTS_FILE, Bundle, ModelEntry
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.providers import parse_placement
from dsbd_runtime.engine.session import EngineOptions
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import open_causal_lm
from dsbd_runtime.ort.ort_module import import_ort
from dsbd_runtime.parts.cache_entries import recent
from dsbd_runtime.parts.feature_memory import HostFeatures
from dsbd_runtime.parts.kv_cache import NUMPY_DTYPES
from dsbd_runtime.parts.sources import Sources


@contextlib.contextmanager
def parity_engine(bundle: Bundle, role: str) -> Iterator[ParityEngine]:
    """Open the engine of a bundle, which may have no manifest yet, to run parity cases.

    Raises:
        ExportError: ONNX Runtime cannot load the graph, or it is not that of its entry.
    """
    with contextlib.ExitStack() as stack:
        bundle_on_cpu = stack.enter_context(runnable_on_cpu(bundle, role))
        with as_export_errors():
            model = stack.enter_context(_opened(bundle_on_cpu, bundle.entry(role), role))
        weights = bundle_on_cpu.model_path(role).with_name(WEIGHTS_FILE)
        stack.enter_context(dropped_pages(weights))  # not longer than they are mapped
        engine = ParityEngine(model, bundle_on_cpu.entry(role))
        yield stack.enter_context(contextlib.closing(engine))


def _opened(bundle: Bundle, entry: ModelEntry, role: str) -> CausalLM:
    """Return the engine; ``entry``: as it will be written, the bundle may have the twin's."""
    rng = np.random.default_rng(0)

    def noise(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    is_widened = entry.dtype != "fp32" and entry.quantization == "none"
    return open_causal_lm(
        EngineOptions(
            bundle=bundle,
            role=role,
            placement=parse_placement("cpu"),
            settings=EngineSettings(
                num_threads=torch.get_num_threads(),  # see ``limited_threads``
                spin_us=0,  # a few calls between which others compute
            ),
            new_rows=noise,
            adapt=_widen_one_by_one if is_widened else None,
        )
    )


def _widen_one_by_one(options: Any) -> None:
    """Let a weight be widened to fp32 when it is used, and dropped after it.

    The CPU provider computes in fp32. By default it widens all weights when it opens a graph,
    which takes twice their size; and it would widen many ahead of their use, and keep the memory.
    """
    ort = import_ort()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.disable_prepacking", "1")


class ParityEngine:
    """An engine that runs parity cases, one after the other, each in fresh caches."""

    def __init__(self, model: CausalLM, entry: ModelEntry) -> None:
        self.model = model
        self._float_type = NUMPY_DTYPES[entry.dtype]
        self._has_recent_rows = bool(recent(entry.caches))
        self._held = contextlib.ExitStack()

    def close(self) -> None:
        """Release the sound that was encoded last."""
        self._held.close()

    def logits(self, case: ForestCase) -> NDArray[np.float32]:
        """Return all logits of the compared nodes, (R, V), of an engine without a top-k head."""
        whole = self.result(case).logits.whole
        assert whole is not None  # as its head returns
        return whole

    def result(self, case: ForestCase, *, with_features: bool = False) -> ForwardResult:
        """Return what the engine returns for the R compared nodes.

        Every request's prefix is a forward of its own, then all of their nodes are one.

        Args:
            case: with its requests.
            with_features: whether the features of all nodes are wanted.
        """
        requests = case.requests
        if self._has_recent_rows:
            requests = (_stranger(case), *requests)
        with as_export_errors():
            self.model.keep(NO_INTS)
            self._hold(case)
            prefixes = [self._append_prefix(request) for request in requests]
            forwards: list[Forward] = []
            first_row = self.model.num_rows
            for request, prefix in zip(requests, prefixes, strict=True):
                forward = nodes_forward(request, first_row, prefix)
                forward.logit_rows = request.rows
                forward.parent_features = self._features_of_nodes(request, prefix)
                if with_features:
                    forward.feature_rows = np.arange(forward.num_new)
                forwards.append(forward)
                first_row += forward.num_new
            return self.model.forward(joined_forward(forwards))

    def _hold(self, case: ForestCase) -> None:
        """Keep the encoder output of a sound until a case has another one: encoding is slow."""
        self._held.close()
        if case.sound is not None:
            self._held.enter_context(self.model.part(Sources).slots.held(source_of(case)))

    def _append_prefix(self, case: ForestCase) -> tuple[int, int]:
        """Append the prefix of a request; return its first row, and the one after the last."""
        first_row, num_rows = self.model.num_rows, len(case.prefix_ids)
        if num_rows:
            forward = prefix_forward(case, first_row)
            if case.features is not None:
                forward.parent_features = self._features(case.features[:num_rows])
            self.model.forward(forward)
        return first_row, self.model.num_rows

    def _features(self, target: NDArray[np.float32]) -> ParentFeatures:
        """Return the target's features, (n, width), as parents' features of n rows."""
        features = HostFeatures("target", target.astype(self._float_type))
        rows = np.arange(len(target))
        return ParentFeatures((features,), np.zeros_like(rows), rows)

    def _features_of_nodes(
        self, case: ForestCase, prefix: tuple[int, int]
    ) -> ParentFeatures | None:
        """Return the features of the parents of all nodes; own ones are computed layer by layer."""
        if case.features is None:
            return None
        found = self._features(case.features[len(case.prefix_ids) :])
        if not case.uses_own:
            return found
        is_root, num_nodes = case.parents < 0, len(case.parents)
        found = replace(
            found, sources=np.where(is_root, 0, 1), rows=np.where(is_root, found.rows, case.parents)
        )
        target, num_known = found.forwards[0], int(is_root.sum())
        while num_known < num_nodes:  # nodes stand in the order of their depths
            forward = nodes_forward(case, prefix[1], prefix, num_known)
            forward.parent_features = found.part(0, num_known)
            own = self.model.forward(forward).features
            assert own is not None  # of a feature draft
            self.model.keep(np.arange(prefix[1]))
            found = replace(found, forwards=(target, own))
            num_known = int((case.parents < num_known).sum())
        return found


def _stranger(case: ForestCase) -> ForestCase:
    """Return a request of one node, whose logits are not compared.

    Its path has no checkpoint when a long prefix has one: neither may be read for the other.
    """
    none = case.prefix_ids[:0]
    return ForestCase(
        name="stranger",
        prefix_ids=none,
        node_ids=case.node_ids[:1],
        parents=np.array([-1]),
        rows=none,
    )


@contextlib.contextmanager
def as_export_errors() -> Iterator[None]:
    """Turn any failure of an engine into an ExportError."""
    try:
        yield
    except Exception as error:
        raise ExportError(
            f"parity failed: onnxruntime cannot run the graph: {reason_of(error)}; "
            "this family is not supported"
        ) from error
