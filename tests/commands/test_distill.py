"""dsbd-distill as a person meets it, and its draft in dsbd-export and dsbd-inspect."""

import json
import shutil

import pytest

from dsbd_ort import cli
from dsbd_runtime.bundle_files.draft_record import RECORD_FILE, read_record
from scripts.family_checkpoints import write_family_checkpoint
from tests.commands.calls import assert_one_error, called
from tests.distill.conftest import target, texts

__all__ = ["target", "texts"]  # fixtures


def run(name, *arguments):
    return called(getattr(cli, name), *arguments)


def dsbd_distill(target, texts, output, *more):
    small = ["--steps", "2", "--no-speed", "--params", "32K"]
    return run("distill", "--target", target, "--data", texts, "-o", output, *small, *more)


@pytest.mark.slow
def test_from_a_target_and_texts_to_a_bundle_that_tells_its_acceptance(target, texts, tmp_path):
    draft, bundle = tmp_path / "draft", tmp_path / "bundle"
    done = run("distill", "--target", target, "--data", texts, "-o", draft, "--steps", 30)
    assert done.exit_code == 0, done.stderr
    record = read_record(draft / RECORD_FILE)
    assert f"{record.acceptance:.3f} (standard error" in done.stdout
    assert f"export it with: dsbd-export --target {target} --draft {draft} -o BUNDLE" in done.stderr
    assert [speed.num_beams for speed in record.speeds] == [1, 2, 4]
    assert record.measured_on == "fp32, cpu" and "fp32, cpu" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"draft"}

    done = run("export", "--target", target, "--draft", draft, "-o", bundle)
    assert done.exit_code == 0, done.stderr
    text = " ".join(run("inspect", bundle).stdout.split())
    assert (
        f"the draft was distilled from TARGET: held-out acceptance {record.acceptance:.3f}" in text
    )
    for speed in record.speeds:
        assert f"{speed.num_beams} beams: {speed.tokens_per_iteration:.2f} tokens" in text
    shown = json.loads(run("inspect", bundle, "--json").stdout)["draft_record"]
    assert shown == json.loads((draft / RECORD_FILE).read_text())


def test_a_bundle_of_another_draft_has_no_record(tiny_bundle):
    assert json.loads(run("inspect", tiny_bundle.path, "--json").stdout)["draft_record"] is None
    assert "distilled" not in run("inspect", tiny_bundle.path).stdout


def test_a_damaged_record_is_named(distilled_bundle):
    (distilled_bundle / "draft" / RECORD_FILE).write_text("{}")
    assert_one_error(run("inspect", distilled_bundle), RECORD_FILE)


@pytest.fixture
def distilled_bundle(tiny_bundle, tmp_path):
    """A bundle whose manifest lists a record."""
    folder = shutil.copytree(tiny_bundle.path, tmp_path / "bundle")
    manifest = json.loads((folder / "dsbd.json").read_text())
    manifest["files"][f"draft/{RECORD_FILE}"] = {"size": 2, "sha256": "0" * 64}
    (folder / "dsbd.json").write_text(json.dumps(manifest))
    return folder


USER_ERRORS = [  # (arguments besides the working ones, words of the message)
    (["--data", "/no/such"], "data='/no/such' matches no file"),
    (["--target", "/no/such"], "no checkpoint at /no/such"),
    (["--params", "many"], "params='many' is not a number of parameters"),
    (["--params", "10"], "params=10 is too few for a vocabulary of 300 tokens"),
    (["--target-layers", "1"], "both choose the draft's shape"),
    (["--minutes", "0"], "--minutes"),
    (["--minutes", "nan"], "--minutes"),
    (["--steps", "0"], "--steps"),
    (["--exclude", "*"], "exclude=* leaves no file"),
    (["--revision", "main"], "revision='main' has no meaning"),
]


@pytest.mark.parametrize(("arguments", "words"), USER_ERRORS)
def test_user_errors_end_in_one_line_and_leave_nothing(target, texts, tmp_path, arguments, words):
    assert_one_error(dsbd_distill(target, texts, tmp_path / "draft", *arguments), words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["--target", "--data", "-o"])
def test_what_must_be_given(target, texts, tmp_path, missing):
    given = {"--target": target, "--data": texts, "-o": tmp_path / "draft"}
    arguments = [word for name, value in given.items() if name != missing for word in (name, value)]
    assert_one_error(run("distill", *arguments), "Missing option")


def test_texts_that_are_not_utf8(target, tmp_path):
    (tmp_path / "text").write_bytes(b"\xff" * 5000)
    done = dsbd_distill(target, tmp_path / "text", tmp_path / "draft")
    assert_one_error(done, "1 of 1 files of data are not UTF-8")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_params_of_a_draft_for_an_encoder_decoder(texts, tmp_path):
    target = write_family_checkpoint("t5", tmp_path / "t5")
    done = dsbd_distill(target, texts, tmp_path / "draft")
    assert_one_error(done, "params='32K' is not supported for the target (family t5), an encoder")
    assert [path.name for path in tmp_path.iterdir()] == ["t5"]


def test_an_output_that_exists(target, texts, tmp_path):
    (tmp_path / "draft").mkdir()
    done = dsbd_distill(target, texts, tmp_path / "draft")
    assert_one_error(done, "draft exists; remove it or choose another output")
    assert not list((tmp_path / "draft").iterdir())


def test_an_output_that_cannot_be_written(target, texts, tmp_path):
    (tmp_path / "file").write_text("")
    done = dsbd_distill(target, texts, tmp_path / "file" / "draft")
    assert_one_error(done, f"cannot write {tmp_path / 'file' / 'draft.work'}")
