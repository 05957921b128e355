"""The entries of the laboratory, and the sections of documents that they write."""

import importlib
import re
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

from dsbd_ort.benchmark.bootstrap import Estimate, Spread
from lab.all import MEASUREMENTS, Measurement, run_all
from lab.frame.page import Page, measured_here, ratio_cell, spread_cell
from scripts.document_sections import table, write_section
from tests.lab.lab_run import ROOT, lab_run


@pytest.fixture
def entries(monkeypatch):
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


def test_all_says_what_ran_and_what_was_left_out(tmp_path, entries):
    assert {each.arguments.split()[0] for each in MEASUREMENTS} < set(entries)
    (tmp_path / "here").touch()
    measurements = [
        Measurement("0", 1, ("here",)),
        Measurement("3", 1),
        Measurement("0", 1, ("here", "there")),
        Measurement("0", 9),
    ]
    command = [sys.executable, "-c", "import sys; sys.exit(int(sys.argv[1]))"]
    rows = run_all(measurements, tmp_path, 5, command)
    assert [result.partition(" is not")[0] for _, result, _ in rows] == [
        "ran",
        "failed with exit code 3",
        "left out: there",
        "left out: takes about 9 minutes, 5 are left",
    ]
    assert (tmp_path / "all.md").read_text().count("\n") == 6


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
    assert unknown.stderr.startswith("no measurement 'measure_calls'; expected one of all, calls, ")


def test_a_section_is_replaced_and_nothing_else(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("a\n<!-- x -->\nold\n<!-- end of x -->\nb <!-- end -->\n")
    write_section(document, "x", "new")
    assert document.read_text() == "a\n<!-- x -->\nnew\n<!-- end of x -->\nb <!-- end -->\n"
    with pytest.raises(click.ClickException, match="no section from <!-- y -->"):
        write_section(document, "y", "new")
    page = Page(document, threads=1)
    page.begin("x")
    with pytest.raises(click.ClickException, match="no section from <!-- y -->"):
        page.begin("x", "y")
    assert "new" in document.read_text()


def test_a_page_says_when_and_where_and_how_idle_the_machine_was(tmp_path, capsys):
    document = tmp_path / "page.md"
    document.write_text("<!-- x -->\n<!-- end of x -->\n")
    page = Page(document, threads=2, wait=0.0)
    page.begin("x")
    page.write("x", ["| a |"], "3 rounds")
    text = capsys.readouterr().out
    assert document.read_text() == f"<!-- x -->\n{text}<!-- end of x -->\n"
    setting = r"\d{4}-\d\d-\d\d, .+, 2 threads, 3 rounds, the cores \d+% idle before\."
    assert re.fullmatch(rf"\| a \|\n\n{setting}\n", text)


def test_tables_and_cells_of_measurements():
    rows = [("dsbd", "1.0"), ("sample", "")]
    lines = ["| run | ms |", "|---|---|", "| dsbd | 1.0 |", "| sample |  |"]
    assert table(("run", "ms"), rows) == lines
    assert spread_cell(Spread(12.34, 11.9, 12.8)) == "12.3 (11.9 to 12.8)"
    assert ratio_cell(Estimate(1.234, 1.2, 1.27)) == "**1.23** (1.20 to 1.27)"
    assert ratio_cell(Spread(1.234, 1.2, 1.27)) == "**1.23** (1.20 to 1.27)"


def test_the_setting_names_date_processor_and_threads():
    found = measured_here(2, "5 rounds", "medians")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d, .+, 2 threads, 5 rounds, medians\.", found)
