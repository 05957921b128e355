"""How a pipeline is opened, as one value that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsbd_ort.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """How a pipeline is opened.

    Attributes:
        bundle: folder of the bundle.
        provider, draft_provider, num_threads, cuda_graphs, verify, prefix_cache: see
            Pipeline.from_bundle.
    """

    bundle: Path
    provider: str = "cpu"
    draft_provider: str | None = None
    num_threads: int | None = None
    cuda_graphs: bool = False
    verify: bool = False
    prefix_cache: bool = True

    def open(self) -> Pipeline:
        """Open the bundle."""
        return Pipeline.from_bundle(
            self.bundle,
            provider=self.provider,
            draft_provider=self.draft_provider,
            num_threads=self.num_threads,
            cuda_graphs=self.cuda_graphs,
            verify=self.verify,
            prefix_cache=self.prefix_cache,
        )
