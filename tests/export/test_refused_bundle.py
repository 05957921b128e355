"""Bundles that the parity gate refuses are kept; a person may accept rounding errors only."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from dsbd_export.config import DraftConfig, ExportConfig
from dsbd_export.draft_export import export_draft
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import ParityLimit, measured_parity, refusal
from dsbd_export.gate.refused_bundle import REFUSED_MANIFEST_NAME, keep_refused
from dsbd_export.parity_cases import TEXT, Reference
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_ort.cli import export, inspect
from dsbd_runtime.bundle_files.bundle import MANIFEST_NAME, open_bundle
from dsbd_runtime.bundle_files.manifest import manifest_from_file
from dsbd_runtime.errors import BundleError
from tests.export.gate import bundle_of

Change = Callable[[Reference], Reference]
NOTHING_PASSES = 1e-12  # below the rounding of any model
COMMAND = re.compile(r"finish it with: dsbd-export (.*?); else remove")


def run(command: object, *arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])  # type: ignore[arg-type]
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def refused(tmp_path_factory, small_llama_folder):
    """The output of a refused export, and the error that it ended in."""
    output = tmp_path_factory.mktemp("refused") / "bundle"
    lines: list[str] = []
    config = ExportConfig(target=str(small_llama_folder), output=output, atol=NOTHING_PASSES)
    with pytest.raises(ExportError, match="parity failed: the target") as error:
        export_bundle(config, report=lines.append)
    assert [line for line in lines if "the export continues, and its result is kept apart" in line]
    return output, str(error.value)


@pytest.fixture
def kept(refused, tmp_path):
    """A refused bundle, to be changed; tests that need it run before it is accepted."""
    kept = refused[0].with_name("bundle.refused")
    return Path(shutil.copytree(kept, tmp_path / "bundle.refused"))


def test_a_refused_bundle_opens_nowhere(refused):
    output, message = refused
    kept = output.with_name("bundle.refused")
    assert [path.name for path in output.parent.iterdir()] == ["bundle.refused"]
    assert str(kept) in message and "the limit is 1e-12" in message
    with pytest.raises(BundleError, match=r"has no dsbd\.json"):
        open_bundle(kept)


def test_a_refused_draft_leaves_its_bundle_and_is_kept(alone, small_llama_folder, tmp_path):
    bundle = tmp_path / "bundle"
    bundle.symlink_to(alone)
    before = open_bundle(bundle, verify=True).manifest
    kept = alone.with_name(f"{alone.name}.refused")
    config = DraftConfig(bundle=bundle, draft=str(small_llama_folder), atol=NOTHING_PASSES)
    with pytest.raises(ExportError, match=r"parity failed: the draft.*kept apart"):
        export_draft(config, report=silent)
    assert open_bundle(bundle, verify=True).manifest == before
    output = tmp_path / "accepted"
    code, printed = run(export, "--bundle", kept, "--accept-parity", "1e-4", "-o", output)
    assert code == 0, printed
    manifest = open_bundle(output, verify=True).manifest
    assert manifest.draft is not None and manifest.draft.parity.accepted == 1e-4
    assert manifest.target == before.target and not kept.exists()


def test_files_that_are_not_those_that_were_measured(kept, tmp_path):
    file = kept / "target" / "prune.onnx"
    file.write_bytes(file.read_bytes() + b"x")
    output = tmp_path / "bundle"
    code, printed = run(export, "--bundle", kept, "--accept-parity", "1", "-o", output)
    assert code == 2 and "is not the file that was measured" in " ".join(printed.split())
    assert kept.is_dir() and not output.exists()


def test_a_refused_bundle_replaces_another_and_nothing_else(kept, tmp_path):
    manifest = manifest_from_file(kept / REFUSED_MANIFEST_NAME)
    output, later = tmp_path / "bundle", tmp_path / "partial"
    later.mkdir()
    (later / MANIFEST_NAME).write_text("{}")
    assert "finish it with" in str(keep_refused(later, output, manifest, "reason"))
    assert [path.name for path in kept.iterdir()] == [REFUSED_MANIFEST_NAME]

    (kept / REFUSED_MANIFEST_NAME).rename(kept / MANIFEST_NAME)  # a folder of somebody else
    later.mkdir()
    error = keep_refused(later, output, manifest, "reason")
    assert re.search(r"nothing was kept, because .*bundle\.refused exists and is no", str(error))
    assert (kept / MANIFEST_NAME).exists() and later.exists()


def test_its_command_finishes_it_and_the_bundle_says_so(refused):
    output, message = refused
    kept = output.with_name("bundle.refused")
    found = COMMAND.search(message)
    assert found is not None
    arguments = shlex.split(found[1])
    limit = float(arguments[arguments.index("--accept-parity") + 1])

    code, printed = run(export, "--bundle", kept, "--accept-parity", limit / 10, "-o", output)
    assert code == 2 and "does not accept the target" in printed and f"{limit:.3g}" in printed
    assert not output.exists()

    code, printed = run(export, *arguments)
    assert code == 0, printed
    assert [path.name for path in output.parent.iterdir()] == ["bundle"]
    entry = open_bundle(output, verify=True).entry("target").parity
    assert entry.accepted == limit >= entry.max_abs_error > entry.limit == NOTHING_PASSES

    _, tables = run(inspect, output)
    assert f"REFUSED, accepted to {limit:.1e}" in tables
    _, content = run(inspect, output, "--json")
    assert json.loads(content)["target"]["parity"]["accepted"] == limit


def with_other_tokens(reference: Reference) -> Reference:
    logits = reference.logits.copy()
    best = logits.argmax(-1)[:, None]
    np.put_along_axis(logits, best, logits.min(), axis=-1)
    return replace(reference, logits=logits)


def times(factor: float) -> Change:
    return lambda reference: replace(reference, logits=reference.logits * factor)


EXACT, DIVERGENCE = ParityLimit("max_abs_error", 1e-4), ParityLimit("mean_kl", 1e-9)
OTHERS = [  # (change of the reference, limit)
    (with_other_tokens, EXACT),
    (times(np.nan), EXACT),
    (times(3), EXACT),  # the same tokens, more certain
    (with_other_tokens, DIVERGENCE),
    (times(np.nan), DIVERGENCE),
]


@pytest.fixture(scope="module")
def bundle(exported, checkpoint):
    return bundle_of(exported.config.output / "target", checkpoint)


@pytest.mark.parametrize(("change", "limit"), OTHERS)
def test_another_computation_is_not_for_anyone_to_accept(bundle, checkpoint, wanted, change, limit):
    text = replace(wanted[-1], case=replace(wanted[-1].case, name=TEXT))
    with pytest.raises(ExportError, match="rounding cannot explain that"):
        measured_parity(bundle, checkpoint, [change(text)], limit)


def test_shifted_logits_are_refused_and_may_be_accepted(bundle, checkpoint, wanted):
    shifted = [replace(each, logits=each.logits + np.float32(1e-3)) for each in wanted]
    reason = refusal(checkpoint, measured_parity(bundle, checkpoint, shifted, EXACT))
    assert reason is not None and "differs from the checkpoint by 0.001" in reason


UNUSABLE = [  # (arguments, words)
    (["--accept-parity", "1"], "give --bundle OUTPUT.refused and -o OUTPUT"),
    (["--accept-parity", "1", "--bundle", "x"], "give --bundle OUTPUT.refused and -o OUTPUT"),
    (["--accept-parity", "1", "--bundle", "x", "-o", "y", "--dtype", "fp16"], "leave out --dtype"),
    (["--accept-parity", "1", "--bundle", "x", "-o", "y"], "x is no refused bundle"),
]


def test_wrong_uses():
    for arguments, words in UNUSABLE:
        code, printed = run(export, *arguments)
        assert code == 2 and words in " ".join(printed.split())
