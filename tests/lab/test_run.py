"""The entries of the laboratory: what is listed can be run."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

from tests.lab.lab_run import ROOT, lab_run


@pytest.fixture
def entries(monkeypatch):
    """Name of the module by name of the entry."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # which the script changes
    loader = SourceFileLoader("lab_run", str(ROOT / "lab" / "run"))
    script = ModuleType(loader.name)
    script.__file__ = loader.path
    loader.exec_module(script)
    return {
        name: ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for name, file in script.entries().items()
    }


def test_every_entry_is_listed_with_a_line(entries):
    done = lab_run()
    assert done.returncode == 0, done.stderr
    _, _, *lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(entries)
    assert len(entries) > 12 and all(line.endswith(".") for line in lines)


def test_every_entry_says_what_it_takes(entries):
    for name, module in entries.items():
        main = importlib.import_module(module).main
        if isinstance(main, click.Command):
            done = CliRunner().invoke(main, ["--help"], prog_name=f"lab/run {name}")
            assert done.exit_code == 0 and done.output.startswith(f"Usage: lab/run {name} ")
        else:
            with pytest.raises(SystemExit, match="0"):
                main(["--help"])


def test_help_and_names_that_do_not_exist():
    done = lab_run("long-context", "--help")
    assert done.returncode == 0 and "Usage: lab/run long-context" in done.stdout
    unknown = lab_run("measure_calls")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("no measurement 'measure_calls'; expected one of calls, ")
