"""Root of all errors of this distribution, below the packages that raise them.

    DsbdError              every error that a user can fix; ``dsbd_ort.DsbdError``
    ├── dsbd_ort.decoding.errors: DecodingError, with ConfigError and ConstraintError
    ├── dsbd_forward.errors: ModelError
    ├── dsbd_ort.batch.prompt_lines: BatchError
    ├── dsbd_ort.benchmark.bench_run: BenchmarkError
    ├── dsbd_ort.cluster.replica: ClusterError
    ├── dsbd_ort.embedding.calls: BuildError
    ├── dsbd_ort.model_pair: BusyError
    ├── dsbd_ort.engine.errors: QueueFullError, ServiceClosedError, InternalError with
    │   EnginesEndedError
    ├── dsbd_ort.openai_server.errors: ServingError
    ├── dsbd_runtime.errors: BundleError, ProviderError, CapacityError, InputError, EngineError
    └── dsbd_export.errors: ExportError

It is a separate package, because the algorithm and the runtime do not import each other.
"""


class DsbdError(Exception):
    """Base of all errors that a user can fix."""


def install_hint(*extras: str) -> str:
    """Return the command that installs one of ``extras``, as the end of an error message.

    It needs a checkout, because dsbd-ort is on no package index: "...; in a checkout of dsbd-ort
    run: pip install ...".
    """
    first, *others = [f"'.[{extra}]'" for extra in extras]
    return " or ".join(
        [f"in a checkout of dsbd-ort run: pip install -c constraints.txt -e {first}", *others]
    )
