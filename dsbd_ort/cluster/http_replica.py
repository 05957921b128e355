"""What Ray Serve runs on a node: dsbd-serve's application over a pipeline of its own."""

from __future__ import annotations

from fastapi import FastAPI

from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.engine import Service, ServiceLimits
from dsbd_ort.openai_server.app import create_app
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.pipeline_settings import PipelineSettings


class HttpReplica:
    """A deployment of Ray Serve, which calls what has no other caller here."""

    def __init__(
        self, pipeline: PipelineSettings, limits: ServiceLimits, settings: ServingSettings
    ) -> None:
        self._settings = settings
        self._pipeline = pipeline.open()
        self.service = Service(self._pipeline, limits)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application; Ray Serve asks after the constructor."""
        return create_app(self.service, self._settings, logs_access=False)  # Ray Serve does

    def check_health(self) -> None:
        """Raise where the replica has to be replaced; Ray Serve asks every ten seconds."""
        if not self.service.is_open:
            raise ClusterError("the thread that runs the engines has ended; see the replica's log")

    def __del__(self) -> None:
        """Release the engines; Ray Serve calls it when the last request is answered."""
        if hasattr(self, "service"):  # else the bundle could not be opened
            self.service.close(drain=False)
            self._pipeline.close()
