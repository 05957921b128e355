"""Settings of a check on a GPU: folders, bundles under test, runs of the benchmark."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WEBGPU = "webgpu"  # name of the provider, of its extra and of its graph form
EXTRA_BY_PROVIDER = {"cuda": "gpu", WEBGPU: WEBGPU, "cpu": "cpu"}  # extras of pyproject.toml

RUNS = (
    "speculative draft_length=4",
    "speculative draft_policy=throughput",
    "dsbd num_beams=2 width_policy=fixed draft_length=4 draft_beams=4",
    "dsbd num_beams=2 width_policy=fixed draft_policy=throughput",
    "dsbd num_beams=4 width_policy=fixed draft_length=4 draft_beams=8",
    "dsbd num_beams=4 width_policy=fixed draft_policy=throughput",
)
"""Values of dsbd-bench's ``--run``: one, two and four beams; it adds the undrafted forms."""
TOP_K = 20
FAMILY_LIMITS = {"fp32": 1e-3, "fp16": 0.1, "bf16": 1.0}
"""Largest logit difference that rounding explains, for tiny random models (logits to about 10)."""
TRAINED = "trained"  # instead of a number of parameters: the demo pair itself
DEMO_PAIR = ROOT / "export" / "dsbd_export" / "demo_pair"
FEATURE = "feature"
DRAFT_OPTIONS = {  # of dsbd-distill, by the draft's name
    FEATURE: ("--kind", "feature"),
    "2-layers": ("--target-layers", "2"),
    "4-layers": ("--target-layers", "4"),
}
CONTEXT = 8448  # positions of the twin: the largest of CACHED_ROWS, and room for the forwards
CACHED_ROWS = (1000, 2000, 4000, 8000)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One check.

    Attributes:
        work: folder for the environment, the bundles, the results and the logs.
        provider: provider under test, a key of ``EXTRA_BY_PROVIDER``.
        wheels: folder with wheels; None uses the Python that runs the script.
        site_packages: folder of installed packages that need no wheel, or None.
        bundles: bundles exported elsewhere; empty: export the demo pair and a twin here.
        params: size of the twin, such as "1B", or ``TRAINED``.
        dtype: dtype of the twin and of one of the two demo bundles.
        python_of_wheels: Python of the version on the GPU machine, for preparing.
        draft_minutes: minutes for which each draft of ``DRAFT_OPTIONS`` is trained when preparing.
        max_new_tokens, repetitions, num_prompts: options of every benchmark.
        limit_s: time limit for all pieces of one call of the script, seconds.
        document: page that gets the tables if a GPU was measured.
    """

    work: Path
    provider: str = "cuda"
    wheels: Path | None = None
    site_packages: Path | None = None
    bundles: tuple[Path, ...] = ()
    params: str = "1B"
    dtype: str = "fp16"
    python_of_wheels: Path = Path("python3.12")
    draft_minutes: float = 20.0
    max_new_tokens: int = 64
    repetitions: int = 2
    num_prompts: int = 6
    limit_s: float = 540.0
    document: Path = ROOT / "lab" / "results" / "gpu.md"

    @property
    def python(self) -> Path | None:
        """The Python of the created environment; None if the running Python is used."""
        return None if self.wheels is None else self.work / "venv" / "bin" / "python"


@dataclass(frozen=True)
class Subject:
    """A bundle under test.

    Attributes:
        pair: folder with the checkpoints ``target`` and ``draft``; None for a given bundle.
        options: options of dsbd-export.
        has_drafts: whether the drafts of ``DRAFT_OPTIONS`` are measured with its target.
    """

    name: str
    bundle: Path
    pair: Path | None = None
    options: tuple[str, ...] = ()
    has_drafts: bool = False


def subjects(settings: Settings) -> list[Subject]:
    """Return the bundles under test: those given, or those of the demo pair and of a twin.

    On WebGPU (the GPU of a laptop) the demo pair alone, also with ``TRAINED``.
    """
    if settings.bundles:
        return [Subject(bundle.name, bundle) for bundle in settings.bundles]
    dtypes = dict.fromkeys([settings.dtype, "fp32"])
    has_twin = settings.provider != WEBGPU and settings.params != TRAINED
    dtype_of_drafts = "fp32" if settings.provider == WEBGPU else settings.dtype
    demos = [
        _demo(settings, dtype, has_drafts=dtype == dtype_of_drafts and not has_twin)
        for dtype in dtypes
    ]
    if not has_twin:
        return demos
    name, pair = f"twin-{settings.params}-{settings.dtype}", twin_of(settings)
    options = ("--dtype", settings.dtype, "--logits", "topk:64")
    bundle = settings.work / "bundles" / name
    return [*demos, Subject(name, bundle, pair, options, has_drafts=True)]


def twin_of(settings: Settings) -> Path:
    """Return the folder of the twin's checkpoints."""
    return settings.work / f"twin-{settings.params}"


def _demo(settings: Settings, dtype: str, *, has_drafts: bool) -> Subject:
    head = () if dtype == "fp32" else ("--logits", "topk:64")
    form = ("--form", WEBGPU) if settings.provider == WEBGPU else ()
    bundle = settings.work / "bundles" / f"demo-{dtype}"
    options = ("--dtype", dtype, *head, *form)
    return Subject(bundle.name, bundle, DEMO_PAIR, options, has_drafts=has_drafts)
