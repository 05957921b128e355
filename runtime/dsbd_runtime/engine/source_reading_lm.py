"""CausalLM of an encoder-decoder, which decoding asks to read and release sources."""

from __future__ import annotations

from dsbd_forward.forward import Source
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.session import Session
from dsbd_runtime.parts.sources import Sources


class SourceReadingLM(CausalLM):
    """An engine whose forwards may have rows of several sources: a ``SourceReader``."""

    def read_source(self, source: Source) -> None:
        """See SourceReader; raises as ``forward``."""
        self.part(Sources).read(source)

    def release_source(self, source: Source) -> None:
        """See SourceReader."""
        self.part(Sources).release(source)


def language_model(session: Session, entry: ModelEntry) -> CausalLM:
    """Return the language model of an open engine."""
    return (SourceReadingLM if entry.spec.joins_sources else CausalLM)(session, entry)
