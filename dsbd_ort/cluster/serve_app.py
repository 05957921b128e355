"""The HTTP service as a Ray Serve application: ``build_app`` is what ``serve run`` is given.

Ray Serve listens, hands every request to a replica that has room, restarts one that ended or is
unhealthy, and waits for requests when one is to go; a replica is what dsbd-serve is on one machine.
"""

# No deferred annotations: Ray reads the type of build_app's argument as it stands here.

from ray import serve
from ray.serve import Application

from dsbd_ort.cluster.http_replica import HttpReplica
from dsbd_ort.cluster.room import num_gpus
from dsbd_ort.cluster.serve_arguments import ServeArguments

_SPARE_REQUESTS = 32  # beyond a full queue: they get its 429, and /health an answer


def build_app(arguments: ServeArguments) -> Application:
    """Return the application that Ray Serve is to run."""
    pipeline, limits = arguments.pipeline(), arguments.limits()
    as_deployed = serve.deployment(
        name="dsbd",
        num_replicas=arguments.replicas,
        max_ongoing_requests=limits.max_requests + limits.max_queued + _SPARE_REQUESTS,
        graceful_shutdown_timeout_s=arguments.shutdown_timeout,
        ray_actor_options={"num_cpus": arguments.threads, "num_gpus": num_gpus(pipeline)},
    )
    deployment = as_deployed(serve.ingress()(HttpReplica))
    return deployment.bind(pipeline, limits, arguments.settings())
