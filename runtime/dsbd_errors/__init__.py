"""Root of all errors of this distribution, below the packages that raise them.

    DsbdError              every error that a user can fix; ``dsbd_ort.DsbdError``
    ├── dsbd_ort.decoding.errors: DecodingError, with ConfigError and ConstraintError
    ├── dsbd_forward.errors: ModelError
    ├── dsbd_ort.batch.prompt_lines: BatchError
    ├── dsbd_ort.benchmark.bench_run: BenchmarkError
    ├── dsbd_ort.cluster.errors: ClusterError
    ├── dsbd_ort.embedding.calls: BuildError
    ├── dsbd_ort.model_pair: BusyError
    ├── dsbd_ort.engine.errors: QueueFullError, ServiceClosedError, InternalError with
    │   EnginesEndedError
    ├── dsbd_ort.openai_server.errors: ServingError
    ├── dsbd_runtime.errors: BundleError, ProviderError, CapacityError, InputError, EngineError
    └── dsbd_export.errors: ExportError

A package of its own, because the algorithm and the runtime know nothing of each other.
"""


class DsbdError(Exception):
    """Base of all errors that a user can fix."""


def install_hint(*extras: str) -> str:
    """Return how to install one of ``extras``: dsbd-ort is on no package index, so from a checkout.

    It ends an error message, as in "...; in a checkout of dsbd-ort run: pip install ...".
    """
    first, *others = [f"'.[{extra}]'" for extra in extras]
    return " or ".join(
        [f"in a checkout of dsbd-ort run: pip install -c constraints.txt -e {first}", *others]
    )
