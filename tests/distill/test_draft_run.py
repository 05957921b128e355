"""A distillation as a whole: the draft is better than before, resumed after kill -9, or absent."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from dsbd_distill.work_folder import WorkFolder
from dsbd_export.config import DraftConfig, ExportConfig
from dsbd_export.draft_export import export_draft
from dsbd_export.errors import ExportError
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_ort.pipeline import Pipeline
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.bundle_files.draft_record import RECORD_FILE, ExpectedSpeed, read_record
from scripts.family_checkpoints import write_checkpoint, write_family_checkpoint
from tests.distill.conftest import (
    CONTEXT,
    FILES,
    STEPS,
    TARGET,
    assert_same_ids,
    assert_same_weights,
    config_of,
    interrupted,
    opened,
    run,
    write_texts,
)
from tests.export.conftest import swap_tokens
from tests.export.gguf_files import write_gguf

KILLED = """
import json, signal, sys
from pathlib import Path
from dsbd_distill.draft_run import distill
from tests.distill.conftest import config_of

target, texts, output, last, options = sys.argv[1:]
names = []

def kill(name, arguments):
    if name == "os.rename" and str(arguments[1]).endswith("checkpoint.pt"):
        names.append(name)
        if len(names) > int(last):
            signal.raise_signal(signal.SIGKILL)

sys.addaudithook(kill)
config = config_of(Path(target), Path(texts), Path(output), **json.loads(options))
distill(config, report=print, measure_speed=None, save_every=0.0)
"""


def test_the_draft_is_better_than_before(distilled):
    record = distilled.record
    first, last = record.curve[0], record.curve[-1]
    assert (first.step, first.loss, last.step) == (0, None, STEPS)
    assert record.acceptance > first.acceptance + 0.1
    assert record.acceptance > first.acceptance + 10 * record.acceptance_error
    assert (record.temperature, record.top_k, record.steps) == (1.0, 20, STEPS)
    [last] = [line for line in distilled.report if line.startswith(f"step {STEPS}, 100%")]
    assert "loss" in last
    assert f"held-out acceptance {record.acceptance:.3f}" in distilled.report[-1]
    assert (record.speeds, record.measured_on) == ([], None)


def test_what_is_left(distilled):
    output = distilled.config.output
    assert {path.name for path in output.iterdir()} == FILES
    assert len({path.stat().st_mode for path in output.iterdir()}) == 1  # whoever reads one, all
    assert read_record(output / RECORD_FILE) == distilled.record
    assert [path.name for path in output.parent.iterdir()] == ["draft"]  # no work folder


@pytest.mark.slow
def test_the_draft_exports_with_its_target_and_into_a_bundle(distilled, target, tmp_path):
    draft = str(distilled.config.output)
    pair = ExportConfig(target=str(target), draft=draft, output=tmp_path / "pair")
    alone = ExportConfig(target=str(target), output=tmp_path / "alone")
    for config in (pair, alone):
        export_bundle(config, report=silent)
    export_draft(DraftConfig(bundle=tmp_path / "alone", draft=draft), report=silent)
    for folder in (tmp_path / "pair", tmp_path / "alone"):
        bundle = open_bundle(folder, verify=True)
        assert bundle.roles == ("target", "draft") and bundle.context_length == CONTEXT
        assert f"draft/{RECORD_FILE}" in bundle.manifest.files
        assert read_record(folder / "draft" / RECORD_FILE) == distilled.record
        with Pipeline.from_bundle(bundle.path) as pipe:
            assert_same_ids(pipe, "speculative", "sample", "def f1(", max_new_tokens=12, seed=1)


@pytest.mark.slow
def test_a_record_of_something_else_is_refused_by_the_export(distilled, target, tmp_path):
    draft = shutil.copytree(distilled.config.output, tmp_path / "draft")
    (draft / RECORD_FILE).write_text('{"acceptance": "high"}')
    config = ExportConfig(target=str(target), draft=str(draft), output=tmp_path / "bundle")
    with pytest.raises(Exception, match=RECORD_FILE):
        export_bundle(config, report=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "feature"])
def test_killed_with_sigkill_it_ends_as_one_that_was_not(kind, request, target, texts, tmp_path):
    """Killed at its first checkpoint, and at its twentieth: bit for bit the same weights."""
    distilled = request.getfixturevalue({"model": "distilled"}.get(kind, "distilled_feature"))
    options = {} if kind == "model" else {"kind": kind, "params": distilled.config.params}
    output = tmp_path / "draft"
    arguments = [sys.executable, "-c", KILLED, str(target), str(texts), str(output)]
    for num_checkpoints in ("0", "20"):
        command = [*arguments, num_checkpoints, json.dumps(options)]
        done = subprocess.run(command, timeout=200, capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        assert not output.exists() and (tmp_path / "draft.work").exists()
    record, report = run(config_of(target, texts, output, **options))
    assert "going on from step 20" in report
    assert_same_weights(output, distilled.config.output)
    assert record.acceptance == distilled.record.acceptance
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_interrupted_before_its_first_step_it_keeps_its_samples(target, texts, tmp_path):
    config = config_of(target, texts, tmp_path / "draft", steps=2)
    interrupted(config, "step 0")
    samples = tmp_path / "draft.work" / "held_out"
    [first] = samples.iterdir()  # 64 of 256 before the first step, the others at the end
    before = first.stat().st_mtime_ns
    ages = []

    def look(line):
        ages.extend(file.stat().st_mtime_ns for file in samples.glob(first.name))

    record, _ = run(config, report=look)
    assert record.steps == 2 and set(ages) == {before}


def test_another_seed_gives_another_draft(distilled, target, texts, tmp_path):
    config = config_of(target, texts, tmp_path / "draft", seed=1)
    record, _ = run(config)
    assert record.seed == 1 and record.acceptance != distilled.record.acceptance
    assert record.acceptance > record.curve[0].acceptance + 0.1


def test_a_draft_of_the_targets_layers(target, texts, tmp_path):
    config = config_of(target, texts, tmp_path / "draft", params=None, target_layers=1, steps=30)
    record, _ = run(config)
    assert record.acceptance > record.curve[0].acceptance
    content = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (content["num_hidden_layers"], content["hidden_size"]) == (1, 32)


def test_a_draft_of_the_layers_of_a_sibling(target, texts, tmp_path):
    """Which has another width, more rows of its embedding, and more layers than the draft."""
    config = LlamaConfig(**{**TARGET.to_dict(), "hidden_size": 48, "num_hidden_layers": 3})
    config.vocab_size += 4
    sibling = write_checkpoint(tmp_path / "sibling", config)
    own = load_file(sibling / "model.safetensors")
    options = {"params": None, "target_layers": 2, "layers_of": str(sibling)}
    first, _ = run(config_of(target, texts, tmp_path / "first", steps=1, **options))
    content = json.loads((tmp_path / "first" / "config.json").read_text())
    shape = content["num_hidden_layers"], content["hidden_size"], content["vocab_size"]
    assert shape == (2, 48, TARGET.vocab_size)
    found = load_file(tmp_path / "first" / "model.safetensors")
    for layer, kept in enumerate((0, 2)):
        name = "model.layers.{}.mlp.up_proj.weight"
        difference = found[name.format(layer)] - own[name.format(kept)]
        assert difference.abs().max() < 0.02  # of one step
    record, _ = run(config_of(target, texts, tmp_path / "draft", steps=30, **options))
    assert record.acceptance > record.curve[0].acceptance == first.curve[0].acceptance


def test_a_sibling_with_other_tokens_or_too_few_layers_is_refused(target, texts, tmp_path):
    sibling = write_checkpoint(tmp_path / "sibling", TARGET)
    options = {"params": None, "target_layers": 2, "layers_of": str(sibling)}
    with pytest.raises(ExportError, match="target_layers=2 makes no draft: the draft has 2 layers"):
        run(config_of(target, texts, tmp_path / "draft", **options))
    swap_tokens(sibling, "def", "path")
    with pytest.raises(ExportError, match="vocabularies differ"):
        run(config_of(target, texts, tmp_path / "draft", **options | {"target_layers": 1}))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"kind": "feature", "params": "200K"}])
def test_a_draft_for_the_text_part_of_a_target_that_reads_pictures(texts, tmp_path, options):
    target = write_family_checkpoint("qwen2_5_vl", tmp_path / "target")
    record, _ = run(config_of(target, texts, tmp_path / "draft", steps=30, **options))
    assert record.acceptance > record.curve[0].acceptance


def test_minutes_are_kept(target, texts, tmp_path):
    config = config_of(target, texts, tmp_path / "draft", steps=None, minutes=1 / 30)
    record, _ = run(config)
    assert 1 / 30 <= record.minutes < 1.0 and record.steps >= 1
    assert record.curve[-1].seconds == pytest.approx(60 * record.minutes)


def test_speeds_join_the_record(target, texts, tmp_path):
    speeds = [ExpectedSpeed(num_beams=1, tokens_per_iteration=2.0, speedup=1.5)]
    seen = []

    def measure(trained):
        seen.append(trained)
        assert (trained.folder / "model.safetensors").exists() and not trained.bundle.exists()
        return speeds, "fp32, cpu"

    config = config_of(target, texts, tmp_path / "draft", steps=2)
    record, _ = run(config, measure_speed=measure)
    assert record.speeds == speeds == read_record(config.output / RECORD_FILE).speeds
    assert [(source, len(ids)) for source, ids in seen[0].requests] == [(None, CONTEXT // 2)] * 64
    assert seen[0].target == target
    assert not seen[0].are_chats


def test_where_speeds_cannot_be_measured_the_training_is_not_lost(target, texts, tmp_path):
    def measure(trained):
        raise ExportError("no engine")

    config = config_of(target, texts, tmp_path / "draft", steps=2)
    with pytest.raises(ExportError, match="no engine"):
        run(config, measure_speed=measure)
    assert not config.output.exists()
    record, report = run(config)
    assert "going on from step 2" in report and record.steps == 2


def test_a_work_folder_of_other_options_is_refused(target, texts, tmp_path):
    config = config_of(target, texts, tmp_path / "draft", steps=2)
    with pytest.raises(ZeroDivisionError):
        run(config, measure_speed=lambda _: 1 / 0)
    for changed, words in (
        ({"steps": 3}, "steps was 2, is 3"),
        ({"seed": 5, "params": "40K"}, "params was 32K, is 40K; seed was 0, is 5"),
    ):
        with pytest.raises(ExportError, match=words):
            run(dataclasses.replace(config, **changed))
    assert run(config)[0].steps == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 99999])
def test_damaged_settings_are_named(tmp_path, content):
    work, config = WorkFolder(tmp_path / "draft.work"), config_of("t", "x", tmp_path / "draft")
    work.path.mkdir()
    (work.path / "settings.json").write_bytes(content)
    work.checkpoint.touch()  # or the folder would be removed
    with pytest.raises(ExportError, match=r"settings\.json is damaged; remove .*draft\.work and"):
        with work.opened(config):
            pass
    assert (work.path / "settings.json").read_bytes() == content


def test_two_at_a_time_are_refused(target, texts, tmp_path):
    config = config_of(target, texts, tmp_path / "draft", steps=2)

    def measure(trained):
        with pytest.raises(ExportError, match=r"another dsbd-distill is at work in .*draft\.work"):
            run(config)
        return [], None

    run(config, measure_speed=measure)
    assert config.output.exists()


def test_an_output_that_exists_or_appears_meanwhile_is_left_alone(target, texts, tmp_path):
    (tmp_path / "old").mkdir()
    unread = config_of(tmp_path / "nowhere", tmp_path / "nothing", tmp_path / "old")
    with pytest.raises(ExportError, match=r"old exists; remove it or choose another output"):
        run(unread)
    config = config_of(target, texts, tmp_path / "draft", steps=2)

    def measure(trained):
        config.output.mkdir()
        return [], None

    with pytest.raises(ExportError, match="draft exists; remove it"):
        run(config, measure_speed=measure)
    config.output.rmdir()
    assert run(config)[0].steps == 2


def test_a_full_disk_is_one_line_and_leaves_nothing(target, texts, tmp_path):
    """A limit on the size of files stands for the disk: EFBIG for ENOSPC."""
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from dsbd_distill.draft_run import distill\n"
        "from tests.distill.conftest import config_of\n"
        "try: distill(config_of(*map(Path, sys.argv[1:])), report=print, measure_speed=None)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    arguments = [str(target), str(texts), str(tmp_path / "draft")]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    last = done.stdout.splitlines()[-1]
    assert last.startswith("ExportError cannot write") and "free some space" in last, done.stdout
    assert not list(tmp_path.iterdir())


def test_texts_that_are_too_few_leave_nothing(target, tmp_path):
    config = config_of(target, write_texts(tmp_path / "few", 1), tmp_path / "draft")
    with pytest.raises(ExportError, match=r"data has \d+ tokens, at least 2200 are needed"):
        run(config)
    assert [path.name for path in tmp_path.iterdir()] == ["few"]


def test_a_tokenizer_that_does_not_fit_is_refused(target, texts, tmp_path):
    folder = shutil.copytree(target, tmp_path / "target")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first, ids = tokenizer["added_tokens"][0], range(273, 313)  # after those of the vocabulary
    tokenizer["added_tokens"] += [{**first, "id": id_, "content": f"<{id_}>"} for id_ in ids]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ExportError, match=r"ids up to 312, but the target has vocab_size 300"):
        run(config_of(folder, texts, tmp_path / "draft"))
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_target_that_sees_later_tokens_is_refused(texts, tmp_path):
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 300, "intermediate_size": 16, "max_position_embeddings": 64}
    config = BertConfig(**sizes, initializer_range=1.0)
    folder = tmp_path / "bert"
    BertLMHeadModel(config).save_pretrained(folder)
    shutil.copy(Path(__file__).parents[0] / "conftest.py", folder)  # any file besides
    from scripts.family_checkpoints import tiny_tokenizer

    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    by_file = {"tokenizer_class": "PreTrainedTokenizerFast"}  # not BertTokenizer
    (folder / "tokenizer_config.json").write_text(json.dumps(by_file))
    with pytest.raises(ExportError, match=r"is an encoder \(BertConfig with is_decoder false\)"):
        run(config_of(folder, texts, tmp_path / "draft"))
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


def test_a_target_whose_weights_are_not_finite_is_refused(target, texts, tmp_path):
    from safetensors.torch import save_file

    folder = shutil.copytree(target, tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match="logits that are not finite; check its weights"):
        run(config_of(folder, texts, tmp_path / "draft"))


def test_what_is_measured_of_a_gguf_file_is_that_file(target, tmp_path):
    """The export that measures speed opens ``source``: a folder has no config.json there."""
    file = write_gguf(target, tmp_path / "target.gguf", "F32")
    assert opened(file).source == file
    assert opened(target).source == target
