"""Measurements of servers and of wide requests run: seconds on a tiny bundle."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from dsbd_ort import TokenTrie
from lab.frame.own_process import in_own_process
from lab.frame.page import RESULTS
from lab.frame.server_process import MemorySamples, sampled_memory
from lab.peers.ids import Ids
from lab.retrieval.wide_requests import Computed, cells_of, computed, settings_of
from lab.soak.mixed_load import Outcomes
from tests.lab.lab_run import lab_run


def test_outcomes_are_counted_and_the_unwanted_named():
    outcomes = Outcomes()
    for status, seconds in (("200", 0.1), ("200", 0.3), ("500", 0.2)):
        outcomes.add("plain", status, seconds)
    assert list(outcomes.table())[2:] == [
        "| plain | 200 | 2 | 200.0 | 298.0 | 300.0 |",
        "| plain | 500 | 1 | 200.0 | 200.0 | 200.0 |",
    ]
    assert outcomes.unwanted({"plain": {"200"}}) == ["1 x plain: 500"]
    assert outcomes.unwanted({"plain": {"200", "500"}}) == []


def test_the_line_through_the_memory_leaves_the_warm_up_out():
    seconds = [float(second) for second in range(101)]
    megabytes = [100.0 + 5 * second if second < 20 else 200 + second / 60 for second in seconds]
    assert MemorySamples(seconds, megabytes).slope_after(0.2) == pytest.approx(1.0)


def test_memory_that_is_taken_is_seen():
    code = "import time; time.sleep(0.5); held = bytes([1]) * 50_000_000; time.sleep(5)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        with sampled_memory(process.pid, 0.05) as samples:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.0)
        process.kill()
    assert 45 < samples.megabytes[-1] - samples.megabytes[0] < 60


MEASUREMENTS = [  # (name, document, section, options)
    ("soak", "serving.md", "soak", "--minutes 0.03 --clients 2"),
    ("serving", "serving.md", "serving", "--rounds 1 --requests 2 --max-new-tokens 4 --wait 0"),
    (
        *("retrieval", "retrieval.md", "retrieval memory"),
        "--num-ids 2000 --width 4 --num-prompts 2",
    ),
]


@pytest.mark.parametrize(("name", "document", "section", "options"), MEASUREMENTS)
def test_a_measurement_writes_its_section(tmp_path, tiny_bundle, name, document, section, options):
    assert f"<!-- {section} -->" in (RESULTS / document).read_text()
    copy = tmp_path / "page.md"
    copy.write_text(f"before\n<!-- {section} -->\nold\n<!-- end of {section} -->\nafter\n")
    done = lab_run(name, tiny_bundle.path, "--document", copy, "--threads", 1, *options.split())
    assert done.returncode == 0, done.stdout + done.stderr
    head, text, tail = copy.read_text().partition(done.stdout.strip())
    assert head == f"before\n<!-- {section} -->\n"
    assert tail == f"\n<!-- end of {section} -->\nafter\n"
    assert text.count("|") > 20


WIDTH = 6


def test_the_first_of_the_settings_is_plain():
    found = settings_of(("beam-search", "speculative-beam-search"), WIDTH)
    assert [(each.strategy, each.are_together) for each in found] == [
        ("beam-search", False),
        ("speculative-beam-search", False),
        ("beam-search", True),
        ("speculative-beam-search", True),
    ]
    assert {each.num_beams for each in found} == {WIDTH}


def test_all_beams_of_every_request_are_computed_alike_in_every_setting(tmp_path, tiny_bundle):
    ids = Ids.written(tmp_path, 500, 258)
    trie_file = tmp_path / "ids.trie"
    TokenTrie.from_array(np.load(ids.file)).save(trie_file)
    known = {tuple(row) for row in np.load(ids.file).tolist()}
    prompts = [[3, 4, 5], [8, 9]]
    plain, together = (
        in_own_process(computed, tiny_bundle.path, trie_file, prompts, setting, 1)
        for setting in settings_of(("beam-search", "dsbd"), WIDTH)[::2]
    )
    assert len(plain.outputs) == 2
    for output in plain.outputs:
        assert len(output) == WIDTH
        assert {tuple(tokens) for tokens, _ in output} <= known
    assert plain.outputs[0] != plain.outputs[1]
    cells, is_right = cells_of([plain, together], ids)
    assert is_right and cells[2:] == ["2/2"]
    assert 10**7 < plain.resident_bytes < 10**9
    assert 0 < plain.kv_bytes < plain.resident_bytes


@pytest.fixture
def ids(tmp_path):
    file = tmp_path / "ids.npy"
    np.save(file, np.array([[1], [2], [3], [5]]))
    return Ids(file)


def found_of(*tokens: int) -> Computed:
    outputs = [[([token], [-1.0])] for token in tokens]
    return Computed(outputs=outputs, resident_bytes=212_000_000, kv_bytes=4_350_000)


def test_cells_count_the_requests_that_are_the_same(ids):
    cells, is_right = cells_of([found_of(1, 2, 3), found_of(1, 2, 3), found_of(1, 5, 3)], ids)
    assert cells == ["212, 4.3"] * 3 + ["3/3", "2/3"]
    assert not is_right
    assert cells_of([found_of(1)] * 2, ids)[1]
    assert not cells_of([found_of(4)] * 2, ids)[1]  # no id
    twice = replace(found_of(1), outputs=[[([1], [-1.0]), ([1], [-1.0])]])
    assert not cells_of([twice, twice], ids)[1]
    fewer = replace(found_of(1, 2), outputs=found_of(1).outputs)
    with pytest.raises(ValueError):
        cells_of([found_of(1, 2), fewer], ids)
