"""A bundle so small that it can be copied and opened thousands of times, and forced preemption.

All requests of these tests lose their rows again and again (``preempting``), except those that
they are compared with. The summary of a run says how often.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsbd_ort import Pipeline
from tests.robustness.preempting import ONE_IN, TALLY, PreemptedPipeline
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

CONTEXT_LENGTH = 64


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("robustness") / "small"
    target, draft = (
        TinyModel(seed=seed, num_layers=1, context_length=CONTEXT_LENGTH) for seed in (0, 1)
    )
    return write_tiny_bundle(path, target=target, draft=draft)


@pytest.fixture(scope="module")
def small_pipe(small_bundle: Path) -> Iterator[Pipeline]:
    with PreemptedPipeline.from_bundle(small_bundle, num_threads=1) as pipe:
        yield pipe


@pytest.fixture(autouse=True)
def preemptions(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Record how often requests were preempted; a test of whole requests has seen it.

    Of two requests that are closed after a call or two neither need have been.
    """
    num_calls, num_preempted = TALLY.num_calls, TALLY.num_preempted
    yield
    num_calls, num_preempted = TALLY.num_calls - num_calls, TALLY.num_preempted - num_preempted
    record_property("preempted", (num_preempted, num_calls))
    assert num_preempted > 0 or num_calls < 2 * ONE_IN, "no request was preempted"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how often requests were preempted, in all processes of a run."""
    counts = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "teardown"
        for name, value in report.user_properties
        if name == "preempted"
    ]
    if counts:
        number, num_calls = (sum(each) for each in zip(*counts, strict=True))
        terminalreporter.write_line(
            f"tests/robustness: {number:,} of {num_calls:,} engine calls that could find the rows "
            f"of their request gone did"
        )
