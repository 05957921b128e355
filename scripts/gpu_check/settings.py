"""What a check is asked to do, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRA_BY_PROVIDER = {"cuda": "gpu", "cpu": "cpu"}  # extras of pyproject.toml


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One check.

    Attributes:
        work: folder for the environment, the bundles, the results and the logs.
        provider: what is compared with the CPU and measured, a key of ``EXTRA_BY_PROVIDER``.
        wheels: folder with wheels, whole or in parts; None uses the Python that runs the script.
        site_packages: packages that are there already and need no wheel; None for none.
        bundles: exported elsewhere; empty: export the demo pair and a twin here.
        params: of the twin, such as "1B".
        dtype: of the twin and of one of the two demo bundles.
        max_new_tokens, repetitions, num_prompts: of every benchmark.
        limit_s: seconds for all pieces of one call of the script.
        document: where the table goes once something was measured on a GPU.
    """

    work: Path
    provider: str = "cuda"
    wheels: Path | None = None
    site_packages: Path | None = None
    bundles: tuple[Path, ...] = ()
    params: str = "1B"
    dtype: str = "fp16"
    max_new_tokens: int = 64
    repetitions: int = 3
    num_prompts: int = 8
    limit_s: float = 480.0
    document: Path = ROOT / "docs" / "gpu.md"

    @property
    def python(self) -> Path | None:
        """The Python of the environment that is made; None where the running one is used."""
        return None if self.wheels is None else self.work / "venv" / "bin" / "python"


@dataclass(frozen=True)
class Subject:
    """A bundle under test; ``export`` is what makes it, empty where it was brought along."""

    name: str
    bundle: Path
    export: tuple[tuple[str, ...], ...] = ()


def subjects(settings: Settings) -> list[Subject]:
    """Return the bundles that are tested: those given, or the demo pair's and a twin's."""
    if settings.bundles:
        return [Subject(bundle.name, bundle) for bundle in settings.bundles]
    folder = settings.work / "bundles"
    exports: dict[str, tuple[tuple[str, ...], ...]] = {}
    for dtype in dict.fromkeys(["fp32", settings.dtype]):
        name = f"demo-{dtype}"
        head = () if dtype == "fp32" else ("--logits", "topk:64")
        exports[name] = (("dsbd-export", "--demo", *_output(folder / name, dtype), *head),)
    twin = settings.work / f"twin-{settings.params}"
    name = f"twin-{settings.params}-{settings.dtype}"
    pair = ("--target", str(twin / "target"), "--draft", str(twin / "draft"))
    output = _output(folder / name, settings.dtype)
    exports[name] = (
        ("make_twin", "--params", settings.params, "-o", str(twin)),
        ("dsbd-export", *pair, *output, "--logits", "topk:64"),
    )
    return [Subject(name, folder / name, commands) for name, commands in exports.items()]


def _output(bundle: Path, dtype: str) -> tuple[str, ...]:
    return ("-o", str(bundle), "--dtype", dtype)
