"""A replica without a cluster: its answers, its errors, and its share of nodes of all kinds."""

import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from dsbd_ort.batch.prompt_lines import BatchSettings, RawLine
from dsbd_ort.cluster.replica import (
    ClusterError,
    Replica,
    cores_of_replica,
    num_gpus,
)
from dsbd_ort.pipeline import PipelineSettings
from tests.runtime.bundle_edits import without_draft
from tests.runtime.tiny_graph import TinyModel

OPTIONS = {"max_new_tokens": 6, "num_beams": 2}


@pytest.fixture
def settings(tiny_bundle):
    pipeline = PipelineSettings(bundle=tiny_bundle.path, num_threads=1)
    return BatchSettings(pipeline=pipeline, options=OPTIONS)


def test_it_answers_as_a_lone_pipeline(settings):
    replica = Replica(settings, settings.fingerprint())
    found = replica.answer(RawLine(1, b'{"prompt": "abc", "seed": 5}')).fields
    with settings.pipeline.open() as pipeline:
        alone = pipeline.generate("abc", seed=5, **OPTIONS)
    assert found["sequences"][0]["token_ids"] == alone.sequences[0].token_ids
    assert replica.answer(RawLine(2, b"[]")).fields["error"].startswith("the line is a JSON list")


def test_a_bundle_without_a_draft_answers_alike(settings, tiny_bundle, tmp_path):
    copy = without_draft(Path(shutil.copytree(tiny_bundle.path, tmp_path / "copy")), TinyModel())
    elsewhere = replace(settings, pipeline=PipelineSettings(bundle=copy.path, num_threads=1))
    line = RawLine(1, b'{"prompt": "abc", "seed": 5}')
    found, wanted = (
        Replica(each, each.fingerprint()).answer(line).fields["sequences"][0]["token_ids"]
        for each in (elsewhere, settings)
    )
    assert found == wanted


def test_a_missing_bundle_is_named_with_its_node(settings, tmp_path):
    elsewhere = replace(settings, pipeline=PipelineSettings(bundle=tmp_path / "gone"))
    replica = Replica(elsewhere, settings.fingerprint())
    with pytest.raises(ClusterError) as raised:
        replica.answer(RawLine(1, b"{}"))
    place = f"node {socket.gethostname()}: no bundle at {tmp_path / 'gone'}:"
    assert place in str(raised.value) and "same bundle at the same path" in str(raised.value)


def test_another_bundle_at_the_same_path_is_refused(settings):
    fingerprint = replace(settings, system="x").fingerprint()
    message = "is another one there; every node needs the same"
    with pytest.raises(ClusterError, match=message):
        Replica(settings, fingerprint).answer(RawLine(1, b"{}"))


CORES = [  # cores of the nodes, replicas, cores of each
    ([2], 1, 2),
    ([2], 2, 1),
    ([2], 8, 0.25),
    ([3], 7, 0.3333),
    ([3, 3], 2, 3),
    ([3, 3], 3, 1),
    ([3, 3], 4, 1),
    ([3, 3], 7, 0.5),
    ([16, 4], 3, 5),
    ([0, 8], 4, 2),
]


@pytest.mark.parametrize(("cores", "num_replicas", "cores_of_each"), CORES)
def test_the_most_cores_that_all_replicas_find(cores, num_replicas, cores_of_each):
    nodes = [{"CPU": number} for number in cores]
    assert cores_of_replica(nodes, num_replicas, 0) == cores_of_each


def test_gpus_bound_the_replicas_of_a_node():
    nodes = [{"CPU": 16, "GPU": 2}, {"CPU": 16}, {"CPU": 8, "GPU": 1}]
    assert cores_of_replica(nodes, 3, 1) == 8
    with pytest.raises(ClusterError, match=r"has 40 cores and 3 GPUs on 3 nodes.*4 replicas of 1"):
        cores_of_replica(nodes, 4, 1)


@pytest.mark.parametrize(
    ("provider", "draft_provider", "gpus"),
    [("cpu", None, 0), ("cuda", None, 1), ("cuda", "cpu", 1), ("cuda:1", "cuda:0", 2)],
)
def test_as_many_gpus_as_the_providers_name(provider, draft_provider, gpus):
    settings = PipelineSettings(
        bundle=Path("bundle"), provider=provider, draft_provider=draft_provider
    )
    assert num_gpus(settings) == gpus
