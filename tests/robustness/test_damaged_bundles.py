"""A damaged bundle is refused by a DsbdError or works: no crash, hang, or read outside of it.

The damage is done and tried in a process of its own. ``pytest -m long tests/robustness`` tries
2,000 bundles instead of the few hundred of every run.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from dsbd_ort import Pipeline
from dsbd_runtime.errors import BundleError
from tests.robustness.mutations import (
    ALWAYS_REFUSED,
    LOCATIONS,
    MUTATIONS,
    data_located,
    edit_onnx,
)
from tests.robustness.preempting import TALLY

ROOT = Path(__file__).parents[2]
NUM_EVERY_RUN = 20 * len(MUTATIONS)


def outcomes(bundle, work, first, count):
    """Return seed, mutation and what came of it; "ended the process" where it does not say."""
    command = [sys.executable, "-m", "tests.robustness.try_bundles"]
    arguments = [str(bundle), str(work), str(first), str(count)]
    paths = ":".join(str(ROOT / part) for part in ("", "export", "runtime"))
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60 + count,
    )
    found = {}
    for line in done.stdout.splitlines():
        kind, seed, text = json.loads(line)
        if kind == "preempted":
            TALLY.add(seed, text)
            continue
        name = text if kind == "begun" else found[seed][1]
        found[seed] = (seed, name, f"ended the process ({done.returncode})" * (kind == "begun"))
        if kind == "ended":
            found[seed] = (seed, name, text)
    assert len(found) == count, done.stderr[-2000:]
    return list(found.values())


def assert_harmless(tried):
    for seed, name, outcome in tried:
        is_refused = outcome.startswith("refused: ")
        assert is_refused or outcome == "works", (seed, name, outcome)
        assert is_refused or name not in ALWAYS_REFUSED, (seed, name, outcome)
    names = {name for _, name, outcome in tried if outcome.startswith("refused: ")}
    assert len(names) >= len(MUTATIONS) - 1  # all but a swapped pair, which is a pair as well


def test_damaged_bundles(small_bundle, tmp_path):
    assert_harmless(outcomes(small_bundle, tmp_path, 0, NUM_EVERY_RUN))


@pytest.mark.slow
@pytest.mark.long
def test_two_thousand_damaged_bundles(small_bundle, tmp_path):
    assert_harmless(outcomes(small_bundle, tmp_path, NUM_EVERY_RUN, 2000))


@pytest.fixture
def copy(small_bundle, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(2**20))
    return Path(shutil.copytree(small_bundle, tmp_path / "bundle"))


@pytest.mark.parametrize("location", [place for place in LOCATIONS if place != "link"])
def test_external_data_outside_of_the_models_folder_is_refused(copy, location):
    edit_onnx(copy, lambda model: data_located(model.graph.initializer[0], location))
    with pytest.raises(BundleError, match=r"cannot load .*model\.onnx .*[Ee]xternal data"):
        Pipeline.from_bundle(copy)


@pytest.mark.parametrize("place", ["target/link", "draft/model.onnx.data", "tokenizer_config.json"])
def test_a_link_out_of_the_bundle_is_refused_wherever_it_is(copy, place):
    (copy / place).unlink(missing_ok=True)
    (copy / place).symlink_to(copy.parent / "secret")
    edit_onnx(copy, lambda model: data_located(model.graph.initializer[0], "link"))
    with pytest.raises(BundleError, match="is a link out of the bundle"):
        Pipeline.from_bundle(copy)


NOT_LISTED = [
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
]


@pytest.mark.parametrize("name", NOT_LISTED)
def test_a_file_that_the_manifest_does_not_list_is_not_read(copy, name):
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("{}")
    with pytest.raises(BundleError, match=f"{name} is there, but the manifest does not list it"):
        Pipeline.from_bundle(copy)


def test_an_operator_of_a_custom_library_is_refused(copy):
    def edit(model):
        model.graph.node[0].domain = "evil.ops"
        model.opset_import.append(onnx.helper.make_opsetid("evil.ops", 1))

    edit_onnx(copy, edit)
    with pytest.raises(BundleError, match=r"evil\.ops:Gather\(-1\) is not a registered function"):
        Pipeline.from_bundle(copy)


def test_a_manifest_without_end_is_refused(copy):
    with (copy / "dsbd.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(BundleError, match="has 1099511627776 bytes, expected at most"):
        Pipeline.from_bundle(copy)


def test_a_name_that_is_no_text_is_refused_and_nothing_printed(copy, capfd):
    file = copy / "target" / "model.onnx"
    file.write_bytes(file.read_bytes().replace(b"MatMul", b"MatM\xe9l"))
    with pytest.raises(BundleError, match=r"cannot load .*model\.onnx \('utf-8' codec"):
        Pipeline.from_bundle(copy)
    assert capfd.readouterr().out == ""
