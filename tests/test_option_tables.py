"""Files that scripts/option_tables.py writes: they follow from the tables."""

from scripts.option_tables import CONFIG, CORE, files


def test_written_files_follow_from_the_tables():
    stale = [file.name for file, text in files().items() if file.read_text() != text]
    assert not stale, f"{', '.join(stale)}: run python -m scripts.option_tables"


def test_every_table_of_the_core_is_written():
    assert {*CORE.glob("*.inc"), CONFIG} == files().keys()
