"""Session on ONNX Runtime with caches in host memory, updated in place by IO binding."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.engine.providers import check_runnable, find_provider
from dsbd_runtime.engine.session import EngineOptions
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import EngineError
from dsbd_runtime.ort.ort_module import LOG_ERRORS, OrtGraphs
from dsbd_runtime.ort.prepared_engine import PreparedEngine
from dsbd_runtime.parts.attention.attention_rows import Rows
from dsbd_runtime.parts.graph_check import call_error, check_graph
from dsbd_runtime.parts.head.head import Head
from dsbd_runtime.parts.host_binder import HostBinder
from dsbd_runtime.parts.part import Call, HostPlace, NewRows, Part, PartEntry, part_of


def _no_target(kind: type[PartEntry]) -> Part:
    raise AssertionError("the engine shares a part of its target, and none was given")


class OrtSession:
    """One engine on ONNX Runtime together with its parts."""

    def __init__(
        self,
        model_path: Path,
        entry: ModelEntry,
        *,
        provider: str = "cpu",
        settings: EngineSettings = EngineSettings(),
        prepared: PreparedEngine | None = None,
        log_severity: int = LOG_ERRORS,
        of_target: Callable[[type[PartEntry]], Part] = _no_target,
        new_rows: NewRows = np.zeros,
        adapt: Callable[[Any], None] | None = None,
    ) -> None:
        """Open the engine at ``model_path``; the weight file is mapped, matrices are packed.

        entry: manifest entry of the engine; a contradiction is a BundleError.
        prepared: the prepared engine in the cache; None opens the original.
        log_severity: lowest that ONNX Runtime writes to stderr; ``LOG_WARNINGS`` shows when a cache
            is not updated in place.
        of_target: see ``HostPlace``; new_rows, adapt: see ``EngineOptions``.
        """
        row = find_provider(provider)
        check_runnable(row, entry, model_path)
        self._model_path = model_path
        graphs = OrtGraphs(row, entry, settings, log_severity=log_severity, adapt=adapt)
        if prepared is None:
            self._engine = graphs.open(model_path)
        else:
            self._engine = prepared.open(graphs.ort, model_path, graphs.options, graphs.open_with)
        check_graph(model_path, entry.contract, self._engine)
        name = f"the engine {model_path}"
        self._binder = HostBinder(graphs.ort, self._engine.io_binding(), name)
        place = HostPlace(self._binder, model_path.parent, graphs, of_target, new_rows)
        for part in entry.parts:
            place.opened.append(part.on_host(place))
        self.parts = tuple(place.opened)
        self.part_by_kind = dict(zip(map(type, entry.parts), self.parts, strict=True))
        self.rows = part_of(self.parts, Rows)
        self._head = part_of(self.parts, Head)

    @property
    def grows_at_a_cost(self) -> bool:
        return False

    def run(self, call: Call) -> None:
        if self._engine is None:
            raise EngineError(f"{self._binder.name} is closed; load it again")
        for part in self.parts:
            part.bind(call, self._binder)
        began = time.perf_counter()
        try:
            outputs = self._binder.run(self._engine)
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            sizes = (
                f"{call.forward.num_new} rows from row {call.first_row} on, logits of "
                f"{len(call.forward.logit_rows)}, caches of {self.rows.capacity}"
            )
            remedy = "shorten the prompt, ask for fewer beams or a shorter draft"
            raise call_error(self._model_path, sizes, error, remedy) from error
        call.count_run(time.perf_counter() - began)
        self._head.collect(call, outputs)

    def close(self) -> None:
        self._engine = None
        self._binder.close()
        for part in self.parts:
            part.close()


def open_host_session(request: EngineOptions) -> OrtSession:
    """Open the engine of "target" or "draft" with its caches in host memory."""
    prepared, folder = None, request.settings.engine_cache
    if folder is not None:
        prepared = PreparedEngine.of_bundle(Path(folder), request.bundle, request.role)
    return OrtSession(
        request.bundle.model_path(request.role),
        request.bundle.entry(request.role),
        provider=request.placement.provider.name,
        settings=request.settings,
        prepared=prepared,
        of_target=functools.partial(_part_of_target, request),
        new_rows=request.new_rows,
        adapt=request.adapt,
    )


def _part_of_target(request: EngineOptions, kind: type[PartEntry]) -> Part:
    """Return the part that a draft shares: the target's, or the draft's own if opened alone."""
    if isinstance(request.target, OrtSession) and kind in request.target.part_by_kind:
        return request.target.part_by_kind[kind]
    entry, path = request.bundle.entry("target"), request.bundle.model_path("target")
    graphs = OrtGraphs(request.placement.provider, entry, request.settings)
    unbound = HostBinder(graphs.ort, None, f"the engine {path}")
    place = HostPlace(unbound, path.parent, graphs, _no_target, request.new_rows)
    return next(part for part in entry.parts if type(part) is kind).on_host(place)
