"""What a forward and a prune cost the host and the queue of a GPU: a table with limits."""

from __future__ import annotations

import pytest

from tests.cuda_binary.worker import Worker

pytestmark = pytest.mark.cuda_binary


def test_a_bundle_opens_on_the_provider(worker: Worker, fp16_bundle: str) -> None:
    for role in ("target", "draft"):
        assert worker.run("open_model", path=fp16_bundle, role=role) == {"error": "", "text": ""}


def test_launches_copies_and_waits(worker: Worker, fp16_bundle: str) -> None:
    found = worker.run("count_forwards", path=fp16_bundle, role="target", sizes=[1, 8, 32])
    assert [each["copies_in"] for each in found] == [1, 1, 1, 1]
    assert [each["copies_out"] for each in found] == [1, 1, 1, 0]
