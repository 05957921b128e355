"""Exports of the same models in several precisions; each graph is captured only once.

The capture takes most of the time of a tiny model's export. It does not depend on later changes of
the graph.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import onnx
import onnx_ir as ir

from dsbd_export.capture.forest_graph import ExportPart
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.model_source import EngineGraph, ModelSource
from dsbd_export.opening import source_of
from dsbd_export.progress import Report


class SharedCaptures:
    """``source_of`` for several exports: one capture for equal files and equal parts."""

    def __init__(self, folder: Path | None = None) -> None:
        """Begin without a graph.

        folder: folder of graphs, shared with other processes; None: graphs are in memory.
        """
        self._graphs: _GraphStore = {} if folder is None else _GraphFiles(folder)

    def __call__(self, checkpoint: Checkpoint) -> ModelSource:
        """Return the source of a checkpoint; its ``capture`` reuses that of an earlier export."""
        return cast(
            ModelSource, _SharedSource(source_of(checkpoint), _key_of(checkpoint), self._graphs)
        )


def _key_of(checkpoint: Checkpoint) -> str:
    """Return a hash that is equal for checkpoints with the same graphs."""
    digest = hashlib.sha256()
    for folder in filter(None, (checkpoint.folder, checkpoint.target_folder)):
        for file in sorted(folder.iterdir()):
            if file.is_file():
                digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    proposed = (
        checkpoint.proposed_tokens
    )  # hashed separately: the repr of a long array is shortened
    digest.update(repr(None if proposed is None else proposed.tolist()).encode())
    digest.update(repr(replace(checkpoint, role="", folder=Path(), target_folder=None)).encode())
    return digest.hexdigest()


class _GraphStore(Protocol):
    """Serialized graphs by key."""

    def get(self, key: str, /) -> bytes | None: ...

    def __setitem__(self, key: str, graph: bytes, /) -> None: ...


class _GraphFiles:
    """A store that processes share: one file per graph, which appears only when complete."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> bytes | None:
        file = self._folder / key
        return file.read_bytes() if file.exists() else None

    def __setitem__(self, key: str, graph: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(graph)
        Path(file.name).rename(self._folder / key)


class _SharedSource:
    """The source of one export; everything except the capture is delegated to it."""

    def __init__(self, source: ModelSource, key: str, graphs: _GraphStore) -> None:
        self._source, self._key, self._graphs = source, key, graphs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        """See ModelSource."""
        checkpoint = self._source.probed(model, dtype)
        self._key = _key_of(checkpoint)
        return checkpoint

    def capture(self, model: Any, parts: Sequence[ExportPart], report: Report) -> list[EngineGraph]:
        """Return graphs with separate weights, because an export releases its model's weights."""
        key = "-".join((self._key, *(type(part).__name__ for part in parts)))
        if self._graphs.get(key) is None:
            captured = self._source.capture(model, parts, report)
            for each in captured:
                graph = ir.serde.serialize_model(each.graph).SerializeToString()
                self._graphs[f"{key}-{each.file}"] = graph
            places = [(each.file, each.weights, each.name) for each in captured]
            self._graphs[key] = json.dumps(places).encode()
        places = json.loads(self._graphs.get(key) or b"")
        return [EngineGraph(self._stored(f"{key}-{place[0]}"), *place) for place in places]

    def _stored(self, key: str) -> ir.Model:
        graph = self._graphs.get(key)
        assert graph is not None  # its place is stored, and places are stored last
        return ir.serde.deserialize_model(onnx.load_from_string(graph))
