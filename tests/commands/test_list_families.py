"""dsbd-export --list-families."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dsbd_export.families import FAMILIES
from dsbd_ort.cli import export


@pytest.fixture(scope="module")
def rows():
    """The table as printed: family -> its first line."""
    done = CliRunner().invoke(export, ["--list-families"])  # no --target, no --output
    assert done.exit_code == 0 and done.stderr == ""
    lines = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    return {cells[1].strip(): cells for cells in lines if cells[1].strip()}


def test_every_family_is_a_row(rows):
    assert list(rows) == list(FAMILIES)


ROWS = [  # (family, status, attention)
    ("llama", "supported", "Attention node"),
    ("gemma2", "supported", "decomposed"),
    ("gptj", "supported", "the model's own"),
    ("bloom", "refused", ""),
]


@pytest.mark.parametrize(("family", "status", "attention"), ROWS)
def test_status_and_attention(rows, family, status, attention):
    assert [cell.strip() for cell in rows[family][2:4]] == [status, attention]
