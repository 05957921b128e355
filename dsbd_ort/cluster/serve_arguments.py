"""What the Ray Serve application is told, as ``name=value`` behind its import path."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from dsbd_ort.engine import ServiceLimits
from dsbd_ort.number_checks import MOST, MOST_SECONDS
from dsbd_ort.openai_server.api_keys import read_api_keys
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.pipeline_settings import PipelineSettings


class ServeArguments(BaseModel, extra="forbid", protected_namespaces=()):
    """The arguments; all but these are those of dsbd-serve by their names.

    Attributes:
        bundle: folder of the bundle, the same on every node.
        replicas: how many pipelines answer.
        threads: of a replica; so many cores it takes of its node.
        shutdown_timeout: seconds for requests to finish when a replica goes.
    """

    bundle: Path
    replicas: int = Field(1, ge=1, le=MOST)
    threads: int = Field(1, ge=1, le=MOST)
    provider: str = PipelineSettings.provider
    draft_provider: str | None = None
    cuda_graphs: bool = False
    api_key_file: Path | None = None
    shutdown_timeout: float = Field(30.0, ge=0, le=MOST_SECONDS, allow_inf_nan=False)

    max_requests: int = ServiceLimits.max_requests
    max_queued: int = ServiceLimits.max_queued
    kv_bytes: int | None = None

    model_name: str | None = None
    keys_everywhere: bool = ServingSettings.keys_everywhere
    max_prompt_tokens: int | None = None
    max_new_tokens: int = ServingSettings.max_new_tokens
    max_beams: int = ServingSettings.max_beams
    max_draft_nodes: int = ServingSettings.max_draft_nodes
    max_best_of: int = ServingSettings.max_best_of
    max_prompts: int = ServingSettings.max_prompts
    max_body_bytes: int = ServingSettings.max_body_bytes
    body_timeout_s: float = ServingSettings.body_timeout_s
    request_timeout_s: float = ServingSettings.request_timeout_s

    def pipeline(self) -> PipelineSettings:
        """Return how a replica opens the bundle."""
        return PipelineSettings(
            bundle=self.bundle.absolute(),  # replicas work in folders of Ray's
            provider=self.provider,
            draft_provider=self.draft_provider,
            num_threads=self.threads,
            cuda_graphs=self.cuda_graphs,
        )

    def limits(self) -> ServiceLimits:
        """Return how many requests share a replica's engine."""
        return ServiceLimits(
            max_requests=self.max_requests, max_queued=self.max_queued, kv_bytes=self.kv_bytes
        )

    def settings(self) -> ServingSettings:
        """Return what a replica allows.

        Raises:
            ServingError: the file of keys cannot be used.
        """
        given: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in fields(ServingSettings)
            if field.name != "keys"
        }
        given["model_name"] = self.model_name or self.bundle.absolute().name
        keys = None if self.api_key_file is None else read_api_keys(self.api_key_file)
        return ServingSettings(**given, keys=keys)
