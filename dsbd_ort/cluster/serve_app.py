"""Ray Serve application: the HTTP server of dsbd-serve, replicated over a cluster.

``build_app`` is the import path for ``serve run``. Ray Serve listens, routes each request to a
replica with room, replaces replicas that ended or are unhealthy, and drains replicas that it stops.
"""

# No deferred annotations: Ray reads the type of build_app's argument at run time.

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field, model_validator
from ray import serve
from ray.serve import Application

from dsbd_ort.cluster.replica import ClusterError, num_gpus
from dsbd_ort.engine import Service, ServiceLimits
from dsbd_ort.engine.limits import MOST, MOST_SECONDS
from dsbd_ort.openai_server.app import create_app
from dsbd_ort.openai_server.middleware import read_api_keys
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.pipeline import PipelineSettings
from dsbd_ort.pipeline_options import SERVER_NGRAM_POOL


class AppArguments(BaseModel, extra="forbid", arbitrary_types_allowed=True):
    """Arguments of the application, ``name=value`` after its import path.

    shutdown_timeout: seconds for requests to finish when a replica is stopped.
    pipeline, limits, settings: their fields are arguments too, with the defaults of dsbd-serve.
    threads: threads of a replica; it reserves as many cores on its node.
    api_key_file: is read here; its keys are sent to the replicas.
    """

    replicas: int = Field(1, ge=1, le=MOST)
    shutdown_timeout: float = Field(30.0, ge=0, le=MOST_SECONDS, allow_inf_nan=False)
    pipeline: PipelineSettings
    limits: ServiceLimits
    settings: ServingSettings

    @model_validator(mode="before")
    @classmethod
    def _by_record(cls, given: dict[str, Any]) -> dict[str, Any]:
        if "keys" in given:
            raise ValueError("keys cannot be given as an argument; use api_key_file")
        bundle = Path(given["bundle"]).absolute()  # Ray runs replicas in folders of its own
        others = {"model_name": bundle.name, "ngram_pool": SERVER_NGRAM_POOL, "threads": 1, **given}
        others |= {"bundle": bundle, "num_threads": others.pop("threads")}
        if "api_key_file" in others:
            others["keys"] = read_api_keys(Path(others.pop("api_key_file")))
        records: dict[str, dict[str, Any]] = {}
        for record, field in cls.model_fields.items():
            if is_dataclass(field.annotation):
                names = {member.name for member in fields(field.annotation)} & others.keys()
                records[record] = {name: others.pop(name) for name in names}
        return {**others, **records}


class HttpReplica:
    """One replica: the application of dsbd-serve over its own pipeline; Ray Serve calls it."""

    def __init__(
        self, pipeline: PipelineSettings, limits: ServiceLimits, settings: ServingSettings
    ) -> None:
        self._settings = settings
        self._pipeline = pipeline.open()
        self.service = Service(self._pipeline, limits)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self.service, self._settings, logs_access=False)  # Ray Serve logs

    def check_health(self) -> None:
        """Raise ClusterError if the replica must be replaced; called every ten seconds."""
        if not self.service.is_open:
            raise ClusterError("the thread that runs the engines has ended; see the replica's log")

    def __del__(self) -> None:
        """Release the engines; called after the response to the last request."""
        if hasattr(self, "service"):  # else the bundle could not be opened
            self.service.close(drain=False)
            self._pipeline.close()


_SPARE_REQUESTS = 32  # accepted beyond a full queue, so that they get a 429, and /health answers


def build_app(arguments: AppArguments) -> Application:
    """Return the application for ``serve run``."""
    limits = arguments.limits
    as_deployment = serve.deployment(
        name="dsbd",
        num_replicas=arguments.replicas,
        max_ongoing_requests=limits.max_requests + limits.max_queued + _SPARE_REQUESTS,
        graceful_shutdown_timeout_s=arguments.shutdown_timeout,
        ray_actor_options={
            "num_cpus": arguments.pipeline.num_threads,
            "num_gpus": num_gpus(arguments.pipeline),
        },
    )
    deployment = as_deployment(serve.ingress()(HttpReplica))
    return deployment.bind(arguments.pipeline, limits, arguments.settings)
