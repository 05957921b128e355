"""What all lines of a batch have in common."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from dsbd_ort.pipeline_settings import PipelineSettings
from dsbd_ort.version import __version__
from dsbd_runtime.bundle import MANIFEST_NAME, open_bundle


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """The settings of a batch.

    Attributes:
        pipeline: how every process opens the bundle.
        options: fields of DecodingConfig that were given; a line may set others or the same.
        is_chat: whether a prompt is a message of the user's.
        system: the system message before such a prompt, None for none.
    """

    pipeline: PipelineSettings
    options: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = False
    system: str | None = None

    def fingerprint(self) -> str:
        """Return a hash of what an answer depends on besides its line.

        That is the bundle (by its manifest, which holds a hash of every file), the options and
        this version; not how many threads or workers there are.
        """
        bundle = open_bundle(self.pipeline.bundle)
        manifest = (bundle.path / MANIFEST_NAME).read_bytes()
        parts = [
            __version__,
            hashlib.sha256(manifest).hexdigest(),
            self.pipeline.provider,
            self.pipeline.draft_provider,
            sorted(self.options.items()),
            self.is_chat,
            self.system,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
