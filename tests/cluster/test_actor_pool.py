"""dsbd-run --cluster on a Ray cluster of two cores: equal answers, kills, signals, refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.batch.test_job import answers, batch_of, done, num_lines, without_times, write_lines
from tests.cluster.own_cluster import TOKEN

pytestmark = pytest.mark.slow  # the cluster takes five seconds to start, every driver two

MAX_NEW_TOKENS = 6
BAD_LINES = {7: {"prompt": ""}, 20: {"prompt": "x", "num_beams": 0}, 33: {"messages": "no"}}
LINES = [BAD_LINES.get(number, {"prompt": f"line {number}"}) for number in range(60)]
MANY = [{"prompt": f"{number}"} for number in range(400)]


def started(folder, bundle, address, environment=TOKEN, **options):
    code = "from dsbd_ort.cli import run; run()"
    arguments = [bundle, "--input", folder / "in.jsonl", "--output", folder / "out"]
    arguments += [
        "--max-new-tokens",
        MAX_NEW_TOKENS,
        "--seed",
        0,
        "--cluster",
        address,
        "--replicas",
        2,
    ]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        **options,
    )


def finished(process):
    printed, messages = process.communicate(timeout=120)
    assert process.returncode == 0, messages
    assert printed == ""
    return messages


def wait_for_lines(output, number, process):
    while num_lines(output) < number and process.poll() is None:
        time.sleep(0.005)
    assert process.poll() is None, process.communicate()


def local_answers(tmp_path, bundle):
    """Answers of a single process to the same lines."""
    batch = batch_of(
        tmp_path, bundle, name="local.jsonl", options={"max_new_tokens": MAX_NEW_TOKENS, "seed": 0}
    )
    done(batch)
    return batch.output


def comparable(path):
    """The answered lines without their times, and the errors."""
    answered = path.with_name("answered.jsonl")
    found = answers(path)
    write_lines(answered, [answer for answer in found if "error" not in answer])
    return without_times(answered), [answer for answer in found if "error" in answer]


def test_the_lines_are_those_of_a_local_run(tiny_bundle, tmp_path, cluster):
    write_lines(tmp_path / "in.jsonl", LINES)
    messages = finished(started(tmp_path, tiny_bundle.path, cluster.address))
    assert f"the Ray cluster at {cluster.address}\nreplicas: 2, threads of each: 1;" in messages
    assert "60 of 60 lines are done; 3 could not be answered" in messages
    found = comparable(tmp_path / "out" / "answers.jsonl")
    assert found == comparable(local_answers(tmp_path, tiny_bundle))
    assert len(found[0]) == 57 and [answer["line"] for answer in found[1]] == [8, 21, 34]
    assert cluster.actors("Replica") == []


def test_a_killed_replica_loses_nothing_and_does_nothing_twice(tiny_bundle, tmp_path, cluster):
    write_lines(tmp_path / "in.jsonl", MANY)
    output = tmp_path / "out" / "answers.jsonl"
    process = started(tmp_path, tiny_bundle.path, cluster.address)
    wait_for_lines(output, 5, process)
    before = cluster.actors("Replica")
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    wait_for_lines(output, num_lines(output) + 150, process)
    assert before[0] not in cluster.actors("Replica")
    finished(process)
    assert without_times(output) == without_times(local_answers(tmp_path, tiny_bundle))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_with_whole_lines(tiny_bundle, tmp_path, cluster, number):
    write_lines(tmp_path / "in.jsonl", MANY)
    output = tmp_path / "out" / "answers.jsonl"
    process = started(tmp_path, tiny_bundle.path, cluster.address, process_group=0)
    wait_for_lines(output, 3, process)
    os.killpg(process.pid, number)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 128 + number, messages
    assert "run the same command again to go on" in messages and "Traceback" not in messages
    assert output.read_bytes().endswith(b"\n")
    assert [answer["line"] for answer in answers(output)] == list(range(1, num_lines(output) + 1))


def test_auto_starts_a_cluster_where_there_is_none_and_ends_it(tiny_bundle, tmp_path):
    write_lines(tmp_path / "in.jsonl", LINES[:7])
    nowhere = {"RAY_ADDRESS": "local"}
    process = started(tmp_path, tiny_bundle.path, "auto", nowhere, process_group=0)
    messages = finished(process)
    assert "no Ray cluster runs here: started one on this machine for this run" in messages
    assert num_lines(tmp_path / "out" / "answers.jsonl") == 7
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_an_engine_that_no_replica_can_open_is_said_with_its_node(tiny_bundle, tmp_path, cluster):
    damaged = shutil.copytree(tiny_bundle.path, tmp_path / "damaged")
    model = damaged / "target" / "model.onnx"
    model.write_bytes(b"\xff" * model.stat().st_size)
    write_lines(tmp_path / "in.jsonl", LINES)
    process = started(tmp_path, damaged, cluster.address)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"Error: replica on node {os.uname().nodename}: " in messages
    assert "target/model.onnx" in messages and "Traceback" not in messages


def test_a_line_that_ends_every_replica_ends_the_run(tiny_bundle, tmp_path, cluster):
    write_lines(tmp_path / "in.jsonl", [{"prompt": "x", "max_new_tokens": 500}] * 1000)
    process = started(tmp_path, tiny_bundle.path, cluster.address)
    wait_for_lines(tmp_path / "out" / "answers.jsonl", 3, process)
    while process.poll() is None:
        for replica in cluster.actors("Replica"):
            os.kill(replica, signal.SIGKILL)
        time.sleep(0.05)
    _, messages = process.communicate()
    assert process.returncode == 2
    last = " ".join(messages.splitlines()[-1:])
    assert last.startswith("Error: a replica ended at line ") and "Traceback" not in messages
    assert json.loads((tmp_path / "out" / "answers.jsonl").read_text().splitlines()[-1])
