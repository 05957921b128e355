"""Settings of engines that do not belong to a bundle."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsbd_runtime.engine.providers import Provider
from dsbd_runtime.errors import InputError

_CPU_SETTINGS = ("num_threads", "spin_us", "engine_cache")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of engines in addition to the provider, for target and draft alike.

    Attributes:
        num_threads: on the CPU, threads of one call; None lets ONNX Runtime choose. A small draft
            that is opened with its target has one thread, see ``load_pair``.
        spin_us: on the CPU, microseconds for which an idle engine thread waits busily before it
            sleeps; None is 20.
        engine_cache: on the CPU, a folder of prepared engines, so that later openings only map them
            (see ``prepared_engine``); None: every opening optimizes and packs the engines.
        cuda_graphs: on a GPU, capture calls of a size that occurs again, and replay them. None: yes
            on "cuda" and "webgpu", no on TensorRT.
    """

    num_threads: int | None = None
    spin_us: int | None = None
    engine_cache: str | None = None
    cuda_graphs: bool | None = None

    def check_used(self, providers: Sequence[Provider]) -> None:
        """Raise InputError for a setting that no provider supports."""
        names = " and ".join(dict.fromkeys(repr(row.name) for row in providers))
        for name in _CPU_SETTINGS:
            value = getattr(self, name)
            if value is not None and all(row.has_device_caches for row in providers):
                raise InputError(
                    f"{name} is {value}, but provider {names} runs on a GPU; leave it out"
                )
        if self.cuda_graphs and not any(row.has_device_caches for row in providers):
            raise InputError(
                f"cuda_graphs is set, but provider {names} has none; use a GPU's, such as 'cuda', "
                "or leave it out"
            )
