"""Replica of the HTTP server on a node, and the arguments that configure it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.engine import Service, ServiceLimits
from dsbd_ort.engine.limits import MOST, MOST_SECONDS
from dsbd_ort.openai_server.api_keys import read_api_keys
from dsbd_ort.openai_server.app import create_app
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.pipeline import PipelineSettings
from dsbd_ort.pipeline_options import PipelineOptions


class AppArguments(BaseModel, extra="forbid", protected_namespaces=()):
    """Arguments of the application, ``name=value`` after its import path.

    All but these are options of dsbd-serve with the same names.

    Attributes:
        bundle: folder of the bundle, the same on every node.
        replicas: number of pipelines.
        threads: of each replica, and the cores that it reserves on its node.
        shutdown_timeout: seconds for requests to finish when a replica is stopped.
    """

    bundle: Path
    replicas: int = Field(1, ge=1, le=MOST)
    threads: int = Field(1, ge=1, le=MOST)
    provider: str = PipelineOptions.provider
    draft_provider: str | None = PipelineOptions.draft_provider
    spin_us: int | None = PipelineOptions.spin_us
    engine_cache: str | None = PipelineOptions.engine_cache
    cuda_graphs: bool | None = PipelineOptions.cuda_graphs
    unfused_attention: bool = PipelineOptions.unfused_attention
    generation_config: bool = PipelineOptions.generation_config
    api_key_file: Path | None = None
    shutdown_timeout: float = Field(30.0, ge=0, le=MOST_SECONDS, allow_inf_nan=False)

    max_requests: int = ServiceLimits.max_requests
    max_queued: int = ServiceLimits.max_queued
    kv_bytes: int | None = None

    model_name: str | None = None
    keys_everywhere: bool = ServingSettings.keys_everywhere
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    max_beams: int = ServingSettings.max_beams
    max_draft_nodes: int = ServingSettings.max_draft_nodes
    max_best_of: int = ServingSettings.max_best_of
    max_prompts: int = ServingSettings.max_prompts
    max_body_bytes: int = ServingSettings.max_body_bytes
    body_timeout_s: float = ServingSettings.body_timeout_s
    request_timeout_s: float = ServingSettings.request_timeout_s

    def pipeline(self) -> PipelineSettings:
        """Return the settings of a replica's pipeline."""
        return PipelineSettings(
            bundle=self.bundle.absolute(),  # Ray runs replicas in folders of its own
            num_threads=self.threads,
            **self._fields_of(PipelineOptions),
        )

    def limits(self) -> ServiceLimits:
        """Return the limits of a replica's service."""
        return ServiceLimits(**self._fields_of(ServiceLimits))

    def settings(self) -> ServingSettings:
        """Return the settings of a replica's HTTP server.

        Raises:
            ServingError: the file of keys cannot be used.
        """
        given = self._fields_of(ServingSettings)
        given["model_name"] = self.model_name or self.bundle.absolute().name
        keys = None if self.api_key_file is None else read_api_keys(self.api_key_file)
        return ServingSettings(**given, keys=keys)

    def _fields_of(
        self, options: type[PipelineOptions | ServiceLimits | ServingSettings]
    ) -> dict[str, Any]:
        """Return the arguments that are fields of ``options``."""
        names = {field.name for field in fields(options)} & set(type(self).model_fields)
        return {name: getattr(self, name) for name in names}


class HttpReplica:
    """One replica: the application of dsbd-serve over its own pipeline.

    Ray Serve calls the methods, including the dunder ones.
    """

    def __init__(
        self, pipeline: PipelineSettings, limits: ServiceLimits, settings: ServingSettings
    ) -> None:
        self._settings = settings
        self._pipeline = pipeline.open()
        self.service = Service(self._pipeline, limits)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application; called after the constructor."""
        return create_app(self.service, self._settings, logs_access=False)  # Ray Serve logs

    def check_health(self) -> None:
        """Raise if the replica has to be replaced; called every ten seconds."""
        if not self.service.is_open:
            raise ClusterError("the thread that runs the engines has ended; see the replica's log")

    def __del__(self) -> None:
        """Release the engines; called after the response to the last request."""
        if hasattr(self, "service"):  # else the bundle could not be opened
            self.service.close(drain=False)
            self._pipeline.close()
