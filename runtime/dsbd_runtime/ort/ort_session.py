"""Session on ONNX Runtime with caches in host memory, updated in place by IO binding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import RowSources, SourceReading
from dsbd_runtime.bundle_files.bundle import FOLD_FILE
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.engine import graph
from dsbd_runtime.engine.graph_check import check_graph
from dsbd_runtime.engine.providers import check_runnable, find_provider
from dsbd_runtime.engine.session import EngineInputs, EngineOptions, EngineOutputs
from dsbd_runtime.errors import CapacityError, EngineError
from dsbd_runtime.ort.host_values import HostValues
from dsbd_runtime.ort.ort_module import (
    LOG_ERRORS,
    import_ort_for,
    opened_engine,
    releasing_options,
    session_options,
    without_packing,
)
from dsbd_runtime.ort.prepared_engine import PreparedEngine
from dsbd_runtime.parts.cache_entries import attending, past_name, present_name, recent
from dsbd_runtime.parts.cross_slots import CrossSlots, places_of_rows
from dsbd_runtime.parts.encoder_entry import (
    ENCODER_FILE,
    ROW_POSITIONS,
    SOURCE_LENGTHS,
    SOURCE_PLACES,
    SOURCE_ROWS,
)
from dsbd_runtime.parts.features import HostFeatures, ReadFeatures, host_rows
from dsbd_runtime.parts.full_logits import HostLogits
from dsbd_runtime.parts.kv_cache import NUMPY_DTYPES, KVCache, NewRows, bucket_capacity
from dsbd_runtime.parts.ort_alignment import OrtAligner
from dsbd_runtime.parts.ort_encoder import OrtEncoder
from dsbd_runtime.parts.recent_memory import HostRecentMemory
from dsbd_runtime.parts.recent_rows import RecentInputs
from dsbd_runtime.parts.speech_entry import ALIGNMENT_FILE

_NO_MEMORY = ("Failed to allocate memory", "bad allocation", "bad_alloc")


class OrtSession:
    """One engine on ONNX Runtime together with its caches.

    Each cache is one OrtValue bound to both ``past`` and ``present``, so that TensorScatter
    writes in place; the OrtValues share the memory of the numpy buffers, so that ``move_rows``
    needs no engine call. The bindings of the caches last until their capacity changes, those of
    small inputs and outputs as long as calls have the same size.
    """

    def __init__(
        self,
        model_path: Path,
        entry: ModelEntry,
        *,
        provider: str = "cpu",
        num_threads: int | None = None,
        spin_us: int | None = None,
        prepared: PreparedEngine | None = None,
        log_severity: int = LOG_ERRORS,
        shared_encoder: OrtEncoder | None = None,
        new_rows: NewRows = np.zeros,
        adapt: Callable[[Any], None] | None = None,
    ) -> None:
        """Open the engine at ``model_path``; the weight file is mapped, matrices are packed.

        Args:
            model_path: the ONNX file; external data beside it.
            entry: manifest entry of the engine; a contradiction is a BundleError.
            provider: a name of the table in ``providers``.
            num_threads: threads of one call; None leaves the choice to ONNX Runtime.
            spin_us: microseconds for which an idle thread waits busily before it sleeps; None is
                ``ort_module.SPIN_US``.
            prepared: where the engine is kept as ONNX Runtime runs it; None opens it as it is.
            log_severity: lowest severity that ONNX Runtime writes to stderr; ``LOG_WARNINGS``
                shows when a cache is not updated in place.
            shared_encoder: the target's, for a draft that shares it; None opens the graph that lies
                beside the draft.
            new_rows: see EngineOptions.
            adapt: likewise.
        """
        row = find_provider(provider)
        check_runnable(row, entry, model_path)
        self._model_path = model_path
        self._head = entry.head
        self._num_full_bound: int | None = None
        self._features = entry.features
        self._feature_type = NUMPY_DTYPES[entry.dtype]
        self._ort = import_ort_for(row)
        self._full: HostLogits | None = None
        if entry.kept_output is not None:
            self._full = HostLogits(entry.vocab_size, self._ort.OrtValue.ortvalue_from_numpy)

        def new_options() -> Any:
            options = session_options(self._ort, entry, num_threads, spin_us)
            options.log_severity_level = log_severity
            if adapt is not None:
                adapt(options)
            return options

        open_engine = functools.partial(opened_engine, self._ort, row)
        if prepared is None:
            self._engine = open_engine(model_path, new_options())
        else:
            self._engine = prepared.open(self._ort, model_path, new_options, open_engine)
        check_graph(
            model_path, entry.contract, self._engine.get_inputs(), self._engine.get_outputs()
        )
        self._encoder: OrtEncoder | None = None
        self._sources: CrossSlots | None = None
        self._cross: dict[str, Any] | None = None  # that are bound
        if entry.encoder is not None:
            self._encoder = OrtEncoder(
                self._ort,
                model_path.with_name(ENCODER_FILE),
                entry.encoder,
                lambda path: open_engine(path, new_options()),
                shared=shared_encoder,
            )
            self._sources = CrossSlots(self._ort, self._encoder, entry.encoder)
        self._aligner: OrtAligner | None = None
        if self._sources is not None and entry.has_alignment:
            self._aligner = OrtAligner(
                self._ort,
                model_path.with_name(ALIGNMENT_FILE),
                entry,
                self._sources,
                lambda path: open_engine(path, without_packing(new_options(), entry)),
            )
        self._next_options: Any = None  # of the next call
        self._cache: KVCache | None = _new_cache(model_path, entry, new_rows)
        self._recent = None
        if recent(entry.caches):
            fold_path = model_path.with_name(FOLD_FILE)
            self._recent = HostRecentMemory(
                entry.caches, fold_path, lambda path: open_engine(path, new_options()), new_rows
            )
        self._recent_bound: dict[str, tuple[int, tuple[int, ...]]] = {}  # see ``_bind_recent``
        self._binding: Any = self._engine.io_binding()
        self._values = HostValues(self._ort, self._binding)
        self._bind_caches(self._cache)

    @property
    def capacity(self) -> int:
        """Rows that the caches hold now; 0 after ``close``."""
        return 0 if self._cache is None else self._cache.capacity

    @property
    def kv_bytes(self) -> int:
        """Bytes that the caches take now, those of recent rows and of sources included."""
        others = [part.num_bytes for part in (self._recent, self._sources) if part is not None]
        return sum(others) + (0 if self._cache is None else self._cache.num_bytes)

    @property
    def recent(self) -> HostRecentMemory | None:
        """See Session."""
        return self._recent

    @property
    def encoder(self) -> OrtEncoder | None:
        """The encoder of the sources, which a draft may share; None without one."""
        return self._encoder

    def take_reading(self) -> SourceReading | None:
        """See Session."""
        return None if self._encoder is None else self._encoder.take_reading()

    @property
    def sources(self) -> CrossSlots | None:
        """See Session."""
        return self._sources

    @property
    def aligner(self) -> OrtAligner | None:
        """See Session."""
        return self._aligner

    @property
    def feature_kind(self) -> type:
        """See Session."""
        return HostFeatures

    def new_features(self, num_rows: int) -> HostFeatures:
        """See Session."""
        assert self._features is not None  # the caller has asked the manifest
        role = "target" if self._features.own_width is None else "draft"
        width = self._features.returned_width
        return HostFeatures(role, np.empty((num_rows, width), self._feature_type))

    @property
    def grows_at_a_cost(self) -> bool:
        """See Session."""
        return False

    def reserve(self, num_rows: int, num_used: int) -> None:
        """Give the caches room for ``num_rows`` rows; keep the first ``num_used``."""
        cache = self._open_cache()
        capacity = bucket_capacity(num_rows)
        if num_rows == 0 and self._sources is not None:
            # No row is left that depends on a source. Not before a first call, whose sources may
            # have been read.
            self._sources.forget()
            self._cross = None
        if num_used == 0 or capacity > cache.capacity:
            self._resize(cache, capacity, num_used)

    def shrink(self, num_used: int) -> None:
        """Give the caches the smallest capacity for their first ``num_used`` rows, which stay."""
        cache = self._open_cache()
        if (capacity := bucket_capacity(num_used)) < cache.capacity:
            self._resize(cache, capacity, num_used)

    def _resize(self, cache: KVCache, capacity: int, num_used: int) -> None:
        # The binding holds the buffers: let go first, so that each can be freed once replaced.
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._values.forget_bound()
        self._num_full_bound = None
        self._recent_bound.clear()
        self._cross = None
        if capacity <= cache.capacity // 4:
            self._next_options = releasing_options(self._ort)
        try:
            cache.resize(capacity, num_used)
        finally:
            self._bind_caches(cache)

    def run(self, inputs: EngineInputs) -> EngineOutputs:
        """Append S rows at ``first_row``; return the outputs of the head for the R logit rows."""
        if self._cache is None:
            raise self._closed_error()
        self._values.bind_inputs(_engine_inputs(inputs))
        if inputs.recent is not None:
            self._bind_recent(inputs.recent)
        forward = inputs.forward
        num_logit_rows = len(forward.logit_rows)
        self._values.bind_outputs(self._head, num_logit_rows, forward.num_pairs)
        if self._full is not None and num_logit_rows != self._num_full_bound:
            value = self._full.room_for(num_logit_rows)
            self._binding.bind_ortvalue_output(graph.LOGITS, value)
            self._num_full_bound = num_logit_rows
        if inputs.features is not None:
            self._bind_features(inputs)
        if self._sources is not None:
            self._bind_sources(self._sources, forward.row_sources)
        try:
            self._engine.run_with_iobinding(self._binding, self._next_options)
            self._next_options = None
        except Exception as error:  # ONNX Runtime's exceptions share no base but this one
            raise self._call_error(inputs, error) from error
        return self._values.take_outputs(self._head)

    def read_full_logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a copy of all logits of some of the last run's logit rows, (n, V)."""
        assert self._full is not None  # the caller has asked the manifest
        return self._full.read(rows)

    def move_rows(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        """Copy the rows ``src_rows`` (K,) to ``first_row .. first_row + K - 1``, as if at once."""
        self._open_cache().move_rows(src_rows, first_row)

    def close(self) -> None:
        """Release the engine and the caches; calling it again does nothing."""
        self._binding = None
        self._values = HostValues(self._ort, None)  # those of the binding hold the engine
        self._engine = None
        self._cache = None
        self._recent = None
        self._full = None
        self._cross = None
        if self._sources is not None:
            self._sources.forget()
        if self._encoder is not None:
            self._encoder.close()
        if self._aligner is not None:
            self._aligner.close()

    def _open_cache(self) -> KVCache:
        if self._cache is None:
            raise self._closed_error()
        return self._cache

    def _closed_error(self) -> EngineError:
        return EngineError(f"the engine {self._model_path} is closed; load it again")

    def _call_error(self, inputs: EngineInputs, error: Exception) -> EngineError | CapacityError:
        """Return the error for a failed call: the engine, the sizes of the call, and the reason."""
        reason = " ".join(str(error).split())
        sizes = (
            f"{inputs.forward.num_new} rows from row {inputs.first_row} on, logits of "
            f"{len(inputs.forward.logit_rows)}, caches of {self.capacity}"
        )
        if any(sign in reason for sign in _NO_MEMORY):
            return CapacityError(
                f"no memory for a call of {self._model_path} ({sizes}): {reason}; shorten the "
                "prompt, ask for fewer beams or a shorter draft"
            )
        return EngineError(
            f"ONNX Runtime failed in a call of {self._model_path} ({sizes}): {reason}; copy the "
            "bundle or export again"
        )

    def _bind_caches(self, cache: KVCache) -> None:
        for (layer, part), buffer in cache.buffers.items():
            value = self._ort_value(buffer)
            self._binding.bind_ortvalue_input(past_name(layer, part), value)
            self._binding.bind_ortvalue_output(present_name(layer, part), value)

    def _bind_recent(self, call: RecentInputs) -> None:
        """Bind the recent rows and the states, where others are bound than those of the call."""
        assert self._recent is not None  # it was asked of it
        rows = self._recent.rows.buffers
        inputs = {past_name(*key): buffer for key, buffer in rows.items()}
        outputs = {past_name(*key): present_name(*key) for key in rows}
        inputs |= self._recent.inputs(call)
        for name, array in inputs.items():
            memory = array.ctypes.data, array.shape  # as long as it is bound no other array's
            if self._recent_bound.get(name) == memory:
                continue
            value = self._ort_value(array)
            self._binding.bind_ortvalue_input(name, value)
            if name in outputs:
                self._binding.bind_ortvalue_output(outputs[name], value)
            self._recent_bound[name] = memory

    def _bind_sources(self, sources: CrossSlots, of_rows: RowSources) -> None:
        """Bind what the decoder reads of sources, unless it is bound, and which row reads which."""
        found = sources.of_call(of_rows.distinct)
        if found.values is not self._cross:
            for name, value in found.values.items():
                self._binding.bind_ortvalue_input(name, value)
            self._cross = found.values
        rows, places = places_of_rows(found.items[of_rows.index], len(found.lengths))
        arrays = {SOURCE_ROWS: rows, SOURCE_PLACES: places, SOURCE_LENGTHS: found.lengths}
        for name, array in arrays.items():
            self._binding.bind_ortvalue_input(name, self._ort_value(array))

    def _bind_features(self, inputs: EngineInputs) -> None:
        """Bind the features that the call reads, and the rows that it writes."""
        forward, first = inputs.forward, inputs.first_feature
        assert forward.feature_rows is not None and self._features is not None
        kept = inputs.features.array[first : first + len(forward.feature_rows)]
        self._binding.bind_ortvalue_output(graph.FEATURES, self._ort_value(kept))
        if forward.parent_features is None:
            arrays = {graph.FEATURE_ROWS: forward.feature_rows}
        else:
            assert self._features.own_width is not None
            read = ReadFeatures.of(forward.parent_features)
            width, own_width = self._features.width, self._features.own_width
            arrays = {
                graph.TARGET_FEATURES: host_rows(read.target, width, self._feature_type),
                graph.OWN_FEATURES: host_rows(read.own, own_width, self._feature_type),
                graph.FEATURE_INDEX: read.index,
            }
        for name, array in arrays.items():
            self._binding.bind_ortvalue_input(name, self._ort_value(np.ascontiguousarray(array)))

    def _ort_value(self, array: NDArray[Any]) -> Any:
        """Return an OrtValue on the memory of ``array``, which the value keeps alive."""
        return self._ort.OrtValue.ortvalue_from_numpy(array)


def open_host_session(request: EngineOptions) -> OrtSession:
    """Open the engine of "target" or "draft" with its caches in host memory."""
    folder = request.engine_cache
    prepared = (
        None if folder is None else PreparedEngine.of_bundle(folder, request.bundle, request.role)
    )
    return OrtSession(
        request.bundle.model_path(request.role),
        request.bundle.entry(request.role),
        provider=request.placement.provider.name,
        num_threads=request.num_threads,
        spin_us=request.spin_us,
        prepared=prepared,
        shared_encoder=_shared_encoder(request),
        new_rows=request.new_rows,
        adapt=request.adapt,
    )


def _shared_encoder(request: EngineOptions) -> OrtEncoder | None:
    """Return the target's encoder for a draft that shares it.

    It is that of the target's session or, where the draft is opened alone, one of its own.
    """
    bundle, encoder = request.bundle, request.bundle.entry(request.role).encoder
    if encoder is None or not encoder.is_shared:
        return None
    if isinstance(request.target, OrtSession) and request.target.encoder is not None:
        return request.target.encoder
    entry, row = bundle.entry("target"), request.placement.provider
    assert entry.encoder is not None  # checked when the bundle was opened
    ort = import_ort_for(row)

    def open_engine(path: Path) -> Any:
        options = session_options(ort, entry, request.num_threads, request.spin_us)
        options.log_severity_level = LOG_ERRORS
        return opened_engine(ort, row, path, options)

    return OrtEncoder(ort, bundle.encoder_path("target"), entry.encoder, open_engine)


def _engine_inputs(inputs: EngineInputs) -> dict[str, NDArray[Any]]:
    """Return the inputs by name besides the caches, in the engine's shapes."""
    forward = inputs.forward
    arrays: dict[str, NDArray[Any]] = {
        graph.WRITE_INDICES: np.array([inputs.first_row], np.int64),  # (1,)
        graph.LOGIT_ROWS: forward.logit_rows,  # (R,)
    }
    for name, of_rows in graph.ROW_INPUTS.items():
        arrays[name] = of_rows(forward)[None]  # (1, S)
    for name, mask in inputs.masks.items():
        arrays[name] = mask[None, None]  # (1, 1, S, C)
    if forward.gather is not None:
        arrays[graph.GATHER_ROWS] = forward.gather.rows  # (N,)
        arrays[graph.GATHER_IDS] = forward.gather.token_ids  # (N,)
    if inputs.row_positions is not None:
        arrays[ROW_POSITIONS] = inputs.row_positions  # (C,)
    return arrays


def _new_cache(model_path: Path, entry: ModelEntry, new_rows: NewRows) -> KVCache:
    try:
        return KVCache(attending(entry.caches), new_rows=new_rows)
    except (MemoryError, ValueError) as error:  # numpy has no shape that large, or no memory
        raise CapacityError(
            f"no memory for the smallest key/value cache of {model_path}, "
            f"{entry.caches[0]} and as many as {len(entry.caches)} in all: {error}; "
            "close other programs that use the memory, or export again"
        ) from error
