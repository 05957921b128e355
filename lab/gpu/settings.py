"""Settings of a check on a GPU: folders, bundles under test, runs of the benchmark."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WEBGPU = "webgpu"  # name of the provider, of its extra and of its graph form
EXTRA_BY_PROVIDER = {"cuda": "gpu", WEBGPU: WEBGPU, "cpu": "cpu"}  # extras of pyproject.toml

# (num_beams, draft layers, candidates per layer): on a GPU a wide draft costs little
SHAPES = ((2, 4, 2), (2, 4, 4), (2, 4, 8), (2, 4, 16), (2, 6, 16), (2, 4, 32),
          (4, 4, 4), (4, 4, 8), (4, 4, 16), (4, 6, 16), (4, 4, 32))  # fmt: skip
WIDTHS = tuple(dict.fromkeys(width for width, _, _ in SHAPES))
TOP_K = 20
FAMILY_LIMITS = {"fp32": 1e-3, "fp16": 0.1, "bf16": 1.0}
"""Largest logit difference that rounding explains, for tiny random models (logits to about 10)."""
CUDA_FORM_SUFFIX, INT4_SUFFIX = "-cuda", "-int4"  # appended to the plain bundle's name


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One check.

    Attributes:
        work: folder for the environment, the bundles, the results and the logs.
        provider: provider under test, a key of ``EXTRA_BY_PROVIDER``.
        wheels: folder with wheels, whole or split; None uses the Python that runs the script.
        site_packages: folder of installed packages that need no wheel, or None.
        bundles: bundles exported elsewhere; empty: export the demo pair and a twin here.
        variants: bundles of which only the forwards are timed; see ``Subject``.
        params: size of the twin, such as "1B".
        dtype: dtype of the twin and of one of the two demo bundles.
        max_new_tokens, repetitions, num_prompts: options of every benchmark.
        limit_s: time limit for all pieces of one call of the script, seconds.
        document: page that gets the tables if a GPU was measured.
    """

    work: Path
    provider: str = "cuda"
    wheels: Path | None = None
    site_packages: Path | None = None
    bundles: tuple[Path, ...] = ()
    variants: tuple[Path, ...] = ()
    params: str = "1B"
    dtype: str = "fp16"
    max_new_tokens: int = 64
    repetitions: int = 3
    num_prompts: int = 8
    limit_s: float = 480.0
    document: Path = ROOT / "lab" / "results" / "gpu.md"

    @property
    def python(self) -> Path | None:
        """The Python of the created environment; None if the running Python is used."""
        return None if self.wheels is None else self.work / "venv" / "bin" / "python"


@dataclass(frozen=True)
class Subject:
    """A bundle under test.

    Attributes:
        export: commands that export the bundle; empty for a given bundle.
        is_variant: whether it is another subject's model with other export options; only its
            forwards are timed.
    """

    name: str
    bundle: Path
    export: tuple[tuple[str, ...], ...] = ()
    is_variant: bool = False


def subjects(settings: Settings) -> list[Subject]:
    """Return the bundles under test: those given, or those of the demo pair and of a twin.

    On WebGPU (the GPU of a laptop) the demo pair alone.
    """
    if settings.bundles:
        given = [Subject(bundle.name, bundle) for bundle in settings.bundles]
        variants = [Subject(each.name, each, is_variant=True) for each in settings.variants]
        return given + variants
    folder = settings.work / "bundles"
    form = ("--form", WEBGPU) if settings.provider == WEBGPU else ()
    exports: dict[str, tuple[tuple[str, ...], ...]] = {}
    for dtype in dict.fromkeys(["fp32", settings.dtype]):
        name = f"demo-{dtype}"
        head = () if dtype == "fp32" else ("--logits", "topk:64")
        exports[name] = (("dsbd-export", "--demo", *_output(folder / name, dtype), *head, *form),)
    if settings.provider == WEBGPU:
        return [Subject(name, folder / name, commands) for name, commands in exports.items()]
    twin = settings.work / f"twin-{settings.params}"
    name = f"twin-{settings.params}-{settings.dtype}"
    pair = ("--target", str(twin / "target"), "--draft", str(twin / "draft"))
    output = _output(folder / name, settings.dtype)
    exports[name] = (
        ("make_twin", "--params", settings.params, "-o", str(twin)),
        ("dsbd-export", *pair, *output, "--logits", "topk:64"),
    )
    plain = [Subject(name, folder / name, commands) for name, commands in exports.items()]
    if settings.dtype == "fp32":  # --quantize int4 has zero points there
        return plain
    return [*plain, *_variants(plain[-1], twin / "target", settings)]


def _variants(plain: Subject, target: Path, settings: Settings) -> list[Subject]:
    """Return variants of the twin's target: in CUDA's form, and with int4 weights."""
    options = {CUDA_FORM_SUFFIX: ("--form", "cuda"), INT4_SUFFIX: ("--quantize", "int4")}
    variants = []
    for suffix, words in options.items():
        bundle = plain.bundle.with_name(plain.name + suffix)
        head = ("--logits", "topk:64", *_output(bundle, settings.dtype))
        command = ("dsbd-export", "--target", str(target), *head, *words)
        variants.append(Subject(bundle.name, bundle, (command,), is_variant=True))
    return variants


def _output(bundle: Path, dtype: str) -> tuple[str, ...]:
    return ("-o", str(bundle), "--dtype", dtype)


def run_texts() -> list[str]:
    """Return the values of dsbd-bench's ``--run``; dsbd-bench adds beam-sample of every width."""
    fixed = [
        f"dsbd num_beams={width} width_policy=fixed draft_length={layers} draft_beams={beams}"
        for width, layers, beams in SHAPES
    ]
    learned = [
        f"dsbd num_beams={width} width_policy=fixed draft_policy=throughput" for width in WIDTHS
    ]
    return fixed + learned
