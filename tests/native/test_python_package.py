"""dsbd-ort-native, the distribution of the loop in C++: its version and its source distribution."""

import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from dsbd_ort.version import __version__

PROJECT = Path(__file__).parents[2] / "native" / "python"


def test_it_has_the_version_of_dsbd_ort() -> None:
    """Another one would not be used."""
    metadata = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    assert metadata["project"]["version"] == __version__


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    program = f"import scikit_build_core.build as b; b.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=PROJECT, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / f"dsbd_ort_native-{__version__}"


def test_the_source_distribution_holds_the_core(source: Path) -> None:
    core = PROJECT.parent / "core"
    files = {file.relative_to(core) for file in core.rglob("*") if file.is_file()}
    assert {file.relative_to(source / "core") for file in (source / "core").rglob("*.*")} == files


@pytest.mark.slow
def test_it_is_built_from_its_source_distribution(source: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, "--target", str(tmp_path), str(source)], check=True, capture_output=True)
    program = "import dsbd_ort_native as n; print(n.__version__, n.__file__)"
    command = [sys.executable, "-c", program]
    printed = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, check=True, capture_output=True, text=True
    ).stdout
    assert printed.split()[0] == __version__
    assert printed.split()[1].startswith(str(tmp_path))
