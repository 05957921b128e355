"""Ray Serve application: the HTTP server of dsbd-serve, replicated over a cluster.

``build_app`` is the import path for ``serve run``. Ray Serve listens, routes each request to a
replica with room, replaces replicas that ended or are unhealthy, and drains those that it stops.
"""

# No deferred annotations: Ray reads the type of build_app's argument at run time.

from ray import serve
from ray.serve import Application

from dsbd_ort.cluster.http_replica import AppArguments, HttpReplica
from dsbd_ort.cluster.replica import num_gpus

_SPARE_REQUESTS = 32  # beyond a full queue: they get its 429, and /health a response


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
