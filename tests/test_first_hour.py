"""The page of a newcomer's first hour, and the script that runs it on a clean clone."""

import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first_hour.md"


def script():
    loader = importlib.machinery.SourceFileLoader("first_hour", str(ROOT / "scripts/first_hour"))
    spec = importlib.util.spec_from_loader("first_hour", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_shell_block_is_a_step_under_its_heading():
    steps = script().blocks(PAGE.read_text())
    assert len(steps) == PAGE.read_text().count("```sh") >= 8
    headings = [heading for heading, _ in steps]
    assert headings[0] == "Install and see it work" and headings[-1] == "Your own checkpoints"
    assert all(re.search(r"^(dsbd-|python )", block, re.M) for _, block in steps)


def test_an_installed_run_installs_nothing():
    first, *_ = [block for _, block in script().blocks(PAGE.read_text())]
    demo, export, end = script().without_install(first).split("\n")
    assert demo.startswith("demo=export/dsbd_export/demo_pair") and end == ""
    assert export.startswith("dsbd-export --target $demo/target --draft $demo/draft -o build/demo")


@pytest.mark.parametrize(("block", "code"), [("true\nfalse\ntrue\n", 1), ("echo a | cat\n", 0)])
def test_a_block_ends_with_its_first_failure(tmp_path, block, code):
    assert script().run(block, tmp_path, dict(os.environ)) == code


@pytest.mark.long
def test_a_newcomer_succeeds():
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, str(ROOT / "scripts" / "first_hour"), "--installed"]
    done = subprocess.run(command, env={**os.environ, "PATH": scripts}, timeout=1800)
    assert done.returncode == 0
