"""A batch on the tiny bundle: order, errors, resuming, workers, signals, full disks, kills."""

import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from rich.console import Console

from dsbd_ort.batch.answer_sources import SharedCalls, Workers, one_after_another
from dsbd_ort.batch.job import Batch, run_batch
from dsbd_ort.batch.prompt_lines import BatchError, BatchSettings
from dsbd_ort.decoding import ConfigError
from dsbd_ort.pipeline import Pipeline, PipelineSettings
from dsbd_runtime.errors import DsbdError

OPTIONS = {"max_new_tokens": 6, "num_beams": 2, "seed": 3}
LINES = [
    {"prompt": "abc", "id": "first"},
    {"prompt": "abc", "seed": 11, "strategy": "beam-sample"},
    {"prompt": ""},
    {"prompt": "abc", "num_beams": 0, "id": [1]},
    {"messages": [{"role": "user", "content": "x"}]},
    {"prompt": "\ud800", "id": "\ud800"},
    {"prompt": "abc", "temperature": 0.5},
]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def batch_of(tmp_path, bundle, *, name="out.jsonl", source=None, options=OPTIONS, **settings):
    pipeline = PipelineSettings(bundle=bundle.path, num_threads=1)
    return Batch(
        input=tmp_path / "in.jsonl",
        output=tmp_path / name,
        settings=BatchSettings(pipeline=pipeline, options=options, **settings),
        source=source or one_after_another,
    )


def console():
    return Console(file=io.StringIO(), width=300)


def done(batch):
    shown = console()
    assert run_batch(batch, shown) == 0
    return shown.file.getvalue().splitlines()[-1]


def answers(path):
    with path.open() as lines:  # splitlines would cut at separators within a text too
        return [json.loads(line) for line in lines]


def without_times(path):
    """Fields that must not depend on workers or resuming; log-probabilities are rounded."""
    found = []
    for answer in answers(path):
        sequences = [
            (s["token_ids"], s["text"], s["finish_reason"], round(s["logprob"], 3))
            for s in answer["sequences"]
        ]
        kept = {name: answer[name] for name in ("version", "line", "request", "seed")}
        found.append({**kept, "sequences": sequences})
    return found


@pytest.mark.parametrize("source", [one_after_another, SharedCalls(3)])
def test_every_line_has_its_answer_or_its_error(tiny_bundle, tmp_path, source):
    write_lines(tmp_path / "in.jsonl", LINES)
    batch = batch_of(tmp_path, tiny_bundle, source=source)
    said = "7 of 7 lines are done; 4 could not be answered, see their error; 18 tokens"
    assert said in done(batch)
    found = answers(batch.output)
    assert [answer["line"] for answer in found] == list(range(1, 8))
    assert [answer.get("id") for answer in found] == [
        "first", None, None, [1], None, "\ud800", None,
    ]  # fmt: skip
    errors = [answer.get("error") for answer in found]
    assert "prompt has no token" in errors[2] and "num_beams is 0" in errors[3]
    assert "has no chat template" in errors[4] and "lone surrogate U+D800" in errors[5]
    assert [index for index, error in enumerate(errors) if error is None] == [0, 1, 6]
    assert found[1]["seed"] == 11 and found[0]["seed"] != found[6]["seed"]
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as pipeline:
        alone = pipeline.generate("abc", **{**OPTIONS, "seed": found[0]["seed"]})
    assert found[0]["sequences"][0]["token_ids"] == alone.sequences[0].token_ids
    assert found[0]["sequences"][0]["text"] == alone.sequences[0].text


def test_nothing_is_done_twice_and_nothing_depends_on_sources_or_resuming(tiny_bundle, tmp_path):
    lines = [{"prompt": f"line {number} " + "x" * (number % 3)} for number in range(30)]
    write_lines(tmp_path / "in.jsonl", lines)
    at_once = batch_of(tmp_path, tiny_bundle)
    done(at_once)
    for source in (Workers(2), SharedCalls(8)):
        other = batch_of(tmp_path, tiny_bundle, name=f"{source}.jsonl", source=source)
        done(other)
        assert without_times(other.output) == without_times(at_once.output)

    in_parts = batch_of(tmp_path, tiny_bundle, name="parts.jsonl")
    write_lines(tmp_path / "in.jsonl", lines[:5])
    done(in_parts)
    first = in_parts.output.read_bytes()
    write_lines(tmp_path / "in.jsonl", lines)
    assert "30 of 30 lines are done, 5 of them before" in done(in_parts)
    assert in_parts.output.read_bytes().startswith(first)
    assert without_times(in_parts.output) == without_times(at_once.output)
    assert "30 of 30 lines are done, 30 of them before" in done(in_parts)


def test_other_settings_do_not_go_on_with_an_output(tiny_bundle, tmp_path):
    write_lines(tmp_path / "in.jsonl", LINES[:1])
    done(batch_of(tmp_path, tiny_bundle))
    before = (tmp_path / "out.jsonl").read_bytes()
    for change in ({"options": {**OPTIONS, "seed": 4}}, {"is_chat": True}, {"system": "x"}):
        with pytest.raises(BatchError, match="line 1 is of another input or other options"):
            run_batch(batch_of(tmp_path, tiny_bundle, **change), console())
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_what_no_line_could_take_is_refused_before_anything_is_written(tiny_bundle, tmp_path):
    write_lines(tmp_path / "in.jsonl", LINES[:1])
    with pytest.raises(ConfigError, match="num_beams is 0"):
        run_batch(batch_of(tmp_path, tiny_bundle, options={"num_beams": 0}), console())
    with pytest.raises(BatchError, match="are both"):
        run_batch(batch_of(tmp_path, tiny_bundle, name="in.jsonl"), console())
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("source", [one_after_another, Workers(2)])
def test_a_provider_that_is_not_here_is_named(tiny_bundle, tmp_path, source):
    write_lines(tmp_path / "in.jsonl", LINES)
    pipeline = PipelineSettings(bundle=tiny_bundle.path, provider="abacus")
    batch = replace(
        batch_of(tmp_path, tiny_bundle, source=source), settings=BatchSettings(pipeline=pipeline)
    )
    with pytest.raises(DsbdError, match="abacus"):
        run_batch(batch, console())


def started(tmp_path, bundle, *more, **options):
    code = "from dsbd_ort.cli import run; run()"
    arguments = [bundle.path, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
    arguments += ["--threads", 1, "--max-new-tokens", 6, "--seed", 0, *more]
    options |= {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **options)


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def expected_answers(tmp_path, bundle):
    """The output of an undisturbed run."""
    options = {"max_new_tokens": 6, "seed": 0}
    batch = batch_of(tmp_path, bundle, name="expected.jsonl", options=options)
    done(batch)
    return without_times(batch.output)


def finish(tmp_path, bundle, *more):
    process = started(tmp_path, bundle, *more)
    _, messages = process.communicate(timeout=120)
    assert process.returncode == 0, messages


@pytest.mark.parametrize(
    ("num_kills", "workers"), [(2, 1), pytest.param(20, 2, marks=pytest.mark.slow)]
)
def test_kill_9_loses_nothing_and_does_nothing_twice(tiny_bundle, tmp_path, num_kills, workers):
    rng = random.Random(num_kills)
    write_lines(tmp_path / "in.jsonl", [{"prompt": f"{i}"} for i in range(40 * num_kills)])
    output = tmp_path / "out.jsonl"
    for _ in range(num_kills):
        process = started(tmp_path, tiny_bundle, "--workers", workers)
        target = num_lines(output) + rng.randrange(20)
        while num_lines(output) < target and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        process.kill()
        process.communicate()
        kept = output.read_bytes() if output.exists() else b""
        assert all(json.loads(line)["version"] == 1 for line in kept.split(b"\n")[:-1])
    finish(tmp_path, tiny_bundle, "--workers", workers)
    assert without_times(output) == expected_answers(tmp_path, tiny_bundle)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_signals_end_it_with_whole_lines(tiny_bundle, tmp_path, number, workers):
    write_lines(tmp_path / "in.jsonl", [{"prompt": f"{i}"} for i in range(2000)])
    output = tmp_path / "out.jsonl"
    process = started(tmp_path, tiny_bundle, "--workers", workers, process_group=0)
    while num_lines(output) < 3 and process.poll() is None:
        time.sleep(0.005)
    os.killpg(process.pid, number)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 128 + number, messages
    assert "run the same command again to go on" in messages and "Traceback" not in messages
    assert output.read_bytes().endswith(b"\n")
    assert [answer["line"] for answer in answers(output)] == list(range(1, num_lines(output) + 1))


def test_a_full_disk_is_said_and_nothing_is_lost(tiny_bundle, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"prompt": f"{i}"} for i in range(12)])

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    process = started(tmp_path, tiny_bundle, preexec_fn=little_room)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "out.jsonl cannot be written: File too large; complete lines in it are kept" in messages
    assert "Traceback" not in messages
    output = tmp_path / "out.jsonl"
    assert 0 < num_lines(output) < 12 and output.read_bytes().endswith(b"\n")
    finish(tmp_path, tiny_bundle)
    assert without_times(output) == expected_answers(tmp_path, tiny_bundle)


def test_a_worker_that_is_killed_is_said(tiny_bundle, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"prompt": f"{i}"} for i in range(3000)])
    process = started(tmp_path, tiny_bundle, "--workers", 2)
    while num_lines(tmp_path / "out.jsonl") < 3 and process.poll() is None:
        time.sleep(0.005)
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    os.kill(children[-1], signal.SIGKILL)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "ended with exit code -9; run the same command again" in " ".join(messages.split())
