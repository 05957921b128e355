"""A replica without a cluster: it answers as a lone pipeline, or says what its node lacks."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from dsbd_ort.batch.prompt_line import RawLine
from dsbd_ort.batch.settings import BatchSettings
from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.cluster.replica import Replica
from dsbd_ort.pipeline_settings import PipelineSettings

OPTIONS = {"max_new_tokens": 6, "num_beams": 2}


@pytest.fixture
def settings(tiny_bundle):
    pipeline = PipelineSettings(bundle=tiny_bundle.path, num_threads=1)
    return BatchSettings(pipeline=pipeline, options=OPTIONS)


def test_it_answers_as_a_lone_pipeline(settings):
    replica = Replica(settings, settings.fingerprint())
    replica.check()
    found = replica.answer(RawLine(1, b'{"prompt": "abc", "seed": 5}')).fields
    with settings.pipeline.open() as pipeline:
        alone = pipeline.generate("abc", seed=5, **OPTIONS)
    assert found["sequences"][0]["token_ids"] == alone.sequences[0].token_ids
    assert replica.answer(RawLine(2, b"[]")).fields["error"].startswith("the line is a JSON list")


def test_a_missing_bundle_is_named_with_its_node(settings, tmp_path):
    elsewhere = replace(settings, pipeline=PipelineSettings(bundle=tmp_path / "gone"))
    replica = Replica(elsewhere, settings.fingerprint())
    for ask in (replica.check, lambda: replica.answer(RawLine(1, b"{}"))):
        with pytest.raises(ClusterError) as raised:
            ask()
        assert f"node {socket.gethostname()}: there is no bundle at {tmp_path / 'gone'};" in str(
            raised.value
        )


def test_another_bundle_at_the_same_path_is_refused(settings):
    fingerprint = replace(settings, system="x").fingerprint()
    with pytest.raises(ClusterError, match="is another one than where the command runs"):
        Replica(settings, fingerprint).check()
