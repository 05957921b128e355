"""A bundle without a draft: strategies that need none run as with one, the others are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dsbd_ort import Pipeline, Service
from dsbd_ort.cli import bench, run
from dsbd_runtime.bundle import Bundle
from dsbd_runtime.errors import InputError
from tests.runtime.bundle_edits import without_draft
from tests.runtime.tiny_graph import TinyModel

STRATEGIES: dict[str, dict[str, Any]] = {
    "sample": {"top_k": 20},
    "beam-sample": {"num_beams": 3},
    "greedy": {},
    "beam-search": {"num_beams": 2},
    "mjgd": {},
}
NO_DRAFT = "has no draft; use a strategy without one, as sample, .* or export with --draft"


@pytest.fixture(scope="module")
def draftless(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draftless") / "bundle"
    return without_draft(Path(shutil.copytree(tiny_bundle.path, folder)), TinyModel()).path


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_without_a_draft_give_the_tokens_of_the_pair(
    tiny_bundle: Bundle, draftless: Path, strategy: str
) -> None:
    options = {"strategy": strategy, "max_new_tokens": 8, "seed": 5, **STRATEGIES[strategy]}
    with Pipeline.from_bundle(tiny_bundle.path) as pair, Pipeline.from_bundle(draftless) as alone:
        for prompt in ("ab", "abc"):  # the second begins with rows of the first
            wanted, found = (each.generate(prompt, **options) for each in (pair, alone))
            assert found.sequences == wanted.sequences
            assert (found.stats.target_calls, found.stats.draft_calls) == (
                wanted.stats.target_calls,
                0,
            )
            assert 0 < found.stats.kv_bytes_peak < wanted.stats.kv_bytes_peak
        pieces = list(alone.stream("ab", **options))
    assert pieces


def test_a_request_that_drafts_is_refused(draftless: Path) -> None:
    with Pipeline.from_bundle(draftless) as pipeline:
        for strategy in ("dsbd", "speculative", "mjsd"):
            with pytest.raises(InputError, match=NO_DRAFT):
                pipeline.generate("ab", strategy=strategy)
        pipeline.generate("ab", strategy="greedy", max_new_tokens=1)


def test_a_service_is_refused(draftless: Path) -> None:
    with Pipeline.from_bundle(draftless) as pipeline:
        with pytest.raises(InputError, match=NO_DRAFT):
            Service(pipeline)
        pipeline.generate("ab", strategy="greedy", max_new_tokens=1)


def test_a_provider_for_the_draft_is_refused(draftless: Path) -> None:
    with pytest.raises(InputError, match=r"draft_provider is 'cpu', but the bundle .* no draft"):
        Pipeline.from_bundle(draftless, draft_provider="cpu")


@pytest.mark.parametrize(("command", "arguments"), [(run, ["--prompt", "ab"]), (bench, [])])
def test_a_command_says_so_in_one_line(draftless: Path, command: Any, arguments: list[str]) -> None:
    done = CliRunner().invoke(command, [str(draftless), *arguments])
    assert done.exit_code == 2
    assert "has no draft; use a strategy without one" in done.stderr.replace("\n", " ")


def test_dsbd_run_samples(draftless: Path) -> None:
    arguments = ["--prompt", "ab", "--strategy", "sample", "--max-new-tokens", "4"]
    done = CliRunner().invoke(run, [str(draftless), *arguments])
    assert done.exit_code == 0, done.stderr
