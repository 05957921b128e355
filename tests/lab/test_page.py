"""Sections that measurements write: the place in a document, tables and cells."""

from __future__ import annotations

import re

import click
import pytest

from dsbd_ort.benchmark.bootstrap import Estimate, Spread
from lab.frame.page import Page, measured_here, ratio_cell, spread_cell
from scripts.document_sections import table, write_section


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


def test_a_table_has_a_line_a_row():
    rows = [("dsbd", "1.0"), ("sample", "")]
    assert table(("run", "ms"), rows) == [
        "| run | ms |",
        "|---|---|",
        "| dsbd | 1.0 |",
        "| sample |  |",
    ]


def test_cells_of_measurements():
    assert spread_cell(Spread(12.34, 11.9, 12.8)) == "12.3 (11.9 to 12.8)"
    assert ratio_cell(Estimate(1.234, 1.2, 1.27)) == "**1.23** (1.20 to 1.27)"
    assert ratio_cell(Spread(1.234, 1.2, 1.27)) == "**1.23** (1.20 to 1.27)"


def test_the_setting_names_date_processor_and_threads():
    found = measured_here(2, "5 rounds", "medians")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d, .+, 2 threads, 5 rounds, medians\.", found)
