"""The Ray Serve application, as ``serve run`` deploys it: two replicas on the tests' cluster."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.request import urlopen

import openai
import pytest
from pydantic import ValidationError

from dsbd_ort import Pipeline
from dsbd_ort.cluster.replica import ClusterError
from dsbd_ort.cluster.serve_app import AppArguments, HttpReplica
from dsbd_ort.commands.options import command
from dsbd_ort.commands.serve_arguments import ServeArguments
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.pipeline import PipelineSettings
from tests.cluster.own_cluster import TOKEN, serve_run

MODEL = "tiny"
BODIES = [
    {"prompt": f"def f_{number}(", "seed": number, "max_tokens": 4 + number % 5}
    for number in range(52)
]
ENDLESS = {"eos_token_id": [], "num_beams": 4}


@pytest.fixture(scope="module")
def client(tiny_bundle, cluster):
    arguments = [f"bundle={tiny_bundle.path}", f"model_name={MODEL}", "replicas=2"]
    patient = "shutdown_timeout=300"  # a busy machine may take long over the streams left
    with (
        serve_run(cluster, ["dsbd_ort.cluster.serve_app:build_app", *arguments, patient]) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
    ):
        yield client


@pytest.fixture(scope="module")
def texts(tiny_bundle):
    """Answers of a single pipeline to BODIES."""
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as pipeline:
        return [
            pipeline.generate(
                body["prompt"],
                strategy="speculative",
                seed=body["seed"],
                max_new_tokens=body["max_tokens"],
            )
            .sequences[0]
            .text
            for body in BODIES
        ]


def text_of(client, body, **options):
    return client.completions.create(model=MODEL, **body, **options).choices[0].text


@pytest.mark.slow
def test_fifty_prompts_at_two_replicas(client, texts, cluster):
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda body: text_of(client, body), BODIES)) == texts
    assert len(cluster.actors("ServeReplica")) == 2


@pytest.mark.slow
def test_streams_come_in_parts(client, texts):
    for body, text in zip(BODIES[:6], texts, strict=False):
        parts = list(client.completions.create(model=MODEL, **body, stream=True))
        assert len(parts) > 1
        assert "".join(part.choices[0].text for part in parts) == text


@pytest.mark.slow
def test_a_request_ends_when_its_client_goes(client):
    streams = [long_stream(client, seed) for seed in range(2)]  # one at each replica
    for stream in streams:
        next(stream)
    assert num_running(client) == 1
    for stream in streams:
        stream.close()
    left = time.monotonic()
    while num_running(client) and time.monotonic() < left + 10:
        time.sleep(0.01)
    assert time.monotonic() - left < 1  # to their ends they would take longer


def num_running(client):
    """Return how many requests one of the replicas is answering."""
    metrics = urlopen(str(client.base_url).removesuffix("v1/") + "metrics").read().decode()
    (line,) = (line for line in metrics.splitlines() if line.startswith("vllm:num_requests_run"))
    return float(line.split()[-1])


@pytest.mark.slow
def test_errors_are_those_of_the_application(client):
    with pytest.raises(openai.BadRequestError, match="num_beams is 0"):
        text_of(client, BODIES[0], extra_body={"num_beams": 0})
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x")


@pytest.mark.slow
def test_a_killed_replica_is_replaced(client, texts, cluster):
    killed = cluster.actors("ServeReplica")[0]
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while len(set(cluster.actors("ServeReplica")) - {killed}) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert killed not in cluster.actors("ServeReplica")
    assert [text_of(client, body) for body in BODIES[:8]] == texts[:8]


_DELETE = """
import ray, sys
from ray import serve
ray.init(sys.argv[1], log_to_driver=False)
serve.status()
print("connected", flush=True)
sys.stdin.readline()
serve.delete("default")
"""


@pytest.mark.slow
def test_deleting_the_application_waits_for_streams(client, cluster):
    command = [sys.executable, "-c", _DELETE, cluster.address]
    with subprocess.Popen(
        command,
        env={**os.environ, **TOKEN},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as deleting:
        assert deleting.stdout.readline() == "connected\n"
        streams = [long_stream(client, seed, num_tokens=600) for seed in range(2)]
        for stream in streams:
            next(stream)
        deleting.stdin.write("now\n")
        deleting.stdin.flush()
        time.sleep(0.2)
        assert deleting.poll() is None  # it waits for those that are being answered
        assert [list(stream)[-1] for stream in streams] == ["length"] * 2
        assert deleting.wait(120) == 0
    assert cluster.actors("ServeReplica") == []
    with pytest.raises(openai.NotFoundError):
        client.models.list()


def long_stream(client, seed, *, num_tokens=1900):
    """Yield the finish reason of every part of an answer that takes seconds."""
    body = {"prompt": "x", "seed": seed, "max_tokens": num_tokens}
    with client.completions.create(model=MODEL, **body, stream=True, extra_body=ENDLESS) as stream:
        for part in stream:
            yield part.choices[0].finish_reason


@pytest.mark.parametrize(
    ("given", "name"),
    [({"bundel": "x"}, "bundel"), ({"replicas": "0"}, "replicas"), ({"max_beams": "x"}, "max_be")]
    + [({name: "x"}, name) for name in ("threads", "chat_defaults", "keys", "server")],
)
def test_arguments_that_make_no_sense_are_named(given, name):
    with pytest.raises(ValidationError, match=name):
        AppArguments.model_validate({"bundle": "bundle", **given})


def test_a_replica_is_unhealthy_once_its_engines_have_ended(tiny_bundle):
    arguments = AppArguments(bundle=tiny_bundle.path)
    replica = HttpReplica(arguments.pipeline, arguments.limits, arguments.settings)
    replica.check_health()
    replica.service.close()
    with pytest.raises(ClusterError, match="engines has ended"):
        replica.check_health()


def test_arguments_come_as_text(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    given = {"bundle": str(tmp_path), "threads": "3", "max_requests": "2", "max_beams": "5"}
    arguments = AppArguments.model_validate({**given, "api_key_file": str(keys)})
    assert arguments.limits.max_requests == 2
    assert arguments.pipeline == PipelineSettings(bundle=tmp_path, num_threads=3, ngram_pool=0)
    settings = arguments.settings
    assert settings.model_name == tmp_path.name and settings.max_beams == 5
    assert settings.keys is not None


def test_defaults_are_those_of_dsbd_serve(tmp_path):
    arguments = AppArguments.model_validate({"bundle": tmp_path})
    given = []
    with pytest.raises(SystemExit):
        command(ServeArguments)(given.append).main([str(tmp_path)])
    (served,) = given
    assert arguments.pipeline == replace(served.pipeline, num_threads=1)
    assert arguments.limits == served.limits
    name = {"model_name": tmp_path.name}
    assert arguments.settings == ServingSettings(**name, **served.settings)
    assert arguments.shutdown_timeout == served.shutdown_timeout_s
