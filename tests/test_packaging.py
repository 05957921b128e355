"""The wheel and the source distribution: their files, and dsbd-run from an installation of them."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsbd_ort.version import __version__

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "dsbd_errors",
    "dsbd_forward",
    "dsbd_runtime",
    "dsbd_ort",
    "dsbd_export",
    "dsbd_distill",
)
REQUEST = ("--prompt", "abc", "--num-beams", "2", "--max-new-tokens", "4", "--seed", "1", "--json")


@dataclass(frozen=True)
class Distribution:
    wheel: Path
    source: Path


def built(root, folder):
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    return Distribution(wheel, source)


@pytest.fixture(scope="module")
def distribution(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("dist"))


def names_in(wheel):
    return set(zipfile.ZipFile(wheel).namelist())


def printed(command, folder, **environment):
    """Run outside the checkout, without its packages."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_package_and_its_data(distribution):
    assert distribution.wheel.name == f"dsbd_ort-{__version__}-py3-none-any.whl"
    names = names_in(distribution.wheel)
    folders = {name.partition("/")[0] for name in names}
    assert folders == {*PACKAGES, f"dsbd_ort-{__version__}.dist-info"}
    data = ("dsbd_ort/trace_page/page.html", "dsbd_ort/embedding/dsbd.h")
    assert names >= {*data, *(f"{package}/py.typed" for package in PACKAGES)}
    assert not [name for name in names if name.endswith(".safetensors")]
    assert distribution.wheel.stat().st_size < 2e6


def test_the_source_distribution_builds_the_same_wheel(distribution, tmp_path):
    with tarfile.open(distribution.source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert not {"tests", "lab", "docs"} & {path.name for path in unpacked.iterdir()}
    again = built(unpacked, tmp_path / "dist")
    assert names_in(again.wheel) == names_in(distribution.wheel)


def test_an_unpacked_wheel_answers_as_the_checkout(distribution, tiny_bundle, tmp_path):
    zipfile.ZipFile(distribution.wheel).extractall(tmp_path / "installed")
    run = "import dsbd_ort; print(dsbd_ort.__file__); from dsbd_ort.cli import run; run()"
    command = [sys.executable, "-c", run, str(tiny_bundle.path), *REQUEST]
    place, answer = printed(command, tmp_path, PYTHONPATH=str(tmp_path / "installed")).splitlines()
    assert Path(place).is_relative_to(tmp_path / "installed")
    assert '"token_ids"' in answer


@pytest.mark.slow
def test_a_fresh_environment_runs_a_bundle_without_torch(distribution, tiny_bundle, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    scripts = tmp_path / "venv" / "bin"
    install = [str(scripts / "python"), "-m", "pip", "install", "-q", "--no-warn-script-location"]
    printed([*install, f"{distribution.wheel}[cpu]"], tmp_path)
    answer = printed([str(scripts / "dsbd-run"), str(tiny_bundle.path), *REQUEST], tmp_path)
    assert '"token_ids"' in answer
    installed = printed([str(scripts / "python"), "-m", "pip", "list"], tmp_path)
    assert "dsbd-ort" in installed and "torch" not in installed
