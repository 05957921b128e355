"""Replica of the HTTP server on a node, and the arguments that configure it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field, model_validator

from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.engine import Service, ServiceLimits
from dsbd_ort.engine.limits import MOST, MOST_SECONDS
from dsbd_ort.openai_server.api_keys import read_api_keys
from dsbd_ort.openai_server.app import create_app
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.pipeline import PipelineSettings
from dsbd_ort.pipeline_options import PipelineOptions

_NOT_GIVEN = {"num_threads", "chat_defaults", "keys", "defaults", "tries"}
"""Fields of the records that are no arguments; ``threads`` and ``api_key_file`` set two of them."""


class AppArguments(BaseModel, extra="forbid", arbitrary_types_allowed=True):
    """Arguments of the application, ``name=value`` after its import path.

    In addition to these, the fields of the records below are arguments, except ``_NOT_GIVEN``.
    Their names are those of dsbd-serve's options.

    Attributes:
        bundle: folder of the bundle, the same on every node.
        replicas: number of pipelines.
        threads: of each replica, and the cores that it reserves on its node.
        api_key_file: read here; the keys are sent to the replicas.
        shutdown_timeout: seconds for requests to finish when a replica is stopped.
        engines, service, server: the other arguments.
    """

    bundle: Path
    replicas: int = Field(1, ge=1, le=MOST)
    threads: int = Field(1, ge=1, le=MOST)
    api_key_file: Path | None = None
    shutdown_timeout: float = Field(30.0, ge=0, le=MOST_SECONDS, allow_inf_nan=False)
    engines: PipelineOptions
    service: ServiceLimits
    server: ServingSettings

    @model_validator(mode="before")
    @classmethod
    def _by_record(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Move every argument that is a field of a record into it."""
        others, records = dict(given), {}
        for record, field in cls.model_fields.items():
            if is_dataclass(field.annotation):
                names = {member.name for member in fields(field.annotation)} - _NOT_GIVEN
                records[record] = {name: others.pop(name) for name in names & others.keys()}
        records["server"]["model_name"] = records["server"].get("model_name") or ""
        return {**records, **others}

    def pipeline(self) -> PipelineSettings:
        """Return the settings of a replica's pipeline."""
        return PipelineSettings(
            **{**vars(self.engines), "num_threads": self.threads},
            bundle=self.bundle.absolute(),  # Ray runs replicas in folders of its own
        )

    def limits(self) -> ServiceLimits:
        """Return the limits of a replica's service."""
        return self.service

    def settings(self) -> ServingSettings:
        """Return the settings of a replica's HTTP server.

        Raises:
            ServingError: the file of keys cannot be used.
        """
        name = self.server.model_name or self.bundle.absolute().name
        keys = None if self.api_key_file is None else read_api_keys(self.api_key_file)
        return replace(self.server, model_name=name, keys=keys)


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
