"""Parts of a phase are counted: a line now and then, none in a short phase."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from dsbd_export import progress
from dsbd_export.config import ExportConfig
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import MB, Counter, counted, shown


def lines_of(parts: Sequence[int], seconds_of: float, *counting: Any) -> list[str]:
    """Return the lines of a phase whose parts take ``seconds_of`` times their number."""
    now, lines = 0.0, []
    unit, *size_of = counting
    counter = Counter("target: comparing", unit, lines.append, clock=lambda: now)
    for part in counted(parts, counter, *size_of):
        now += part * seconds_of
    return lines


def test_weights_are_counted_by_their_bytes():
    lines = lines_of([300, 2, 90, 8], 0.1, MB, lambda size: size * 10**6)
    assert lines == ["target: comparing: 300.0 of 400.0 MB, about 10 s left"]


COUNTS = [  # (parts, seconds of each, those after which a line is seen)
    (13, 0.5, []),
    (13, 4.0, [3, 6, 9, 12]),
    (3, 60.0, [1, 2]),
    (1, 60.0, []),
    (0, 60.0, []),
]


@pytest.mark.parametrize(("number", "seconds", "said"), COUNTS)
def test_counts_are_said_now_and_then(number, seconds, said):
    wanted = [
        f"target: comparing: {part} of {number} cases, "
        f"about {shown(seconds * (number - part))} left"
        for part in said
    ]
    assert lines_of([1] * number, seconds, "cases") == wanted


def test_long_phases_of_an_export_move(small_llama_folder, tmp_path, monkeypatch, capsys):
    """Reports are printed while a library prints."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0.0)
    config = ExportConfig(target=str(small_llama_folder), output=tmp_path / "bundle", atol=1e-4)
    export_bundle(config, report=print)
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "[torch.onnx]" in line]
    phase = "target: comparing with the checkpoint"
    said = [line for line in lines if line.startswith(f"{phase}: ")]
    total = len(said) + 1
    assert total > 5
    for number, line in enumerate(said, 1):
        assert re.fullmatch(rf"{phase}: {number} of {total} cases, about [\d.]+ s left", line)
    phase = "target: saving the graph and its weights"
    said = [line.removeprefix(f"{phase}: ") for line in lines if line.startswith(f"{phase}: ")]
    size = (tmp_path / "bundle" / "target" / "model.onnx.data").stat().st_size / 10**6
    assert len(said) > 4
    done = [re.fullmatch(r"([\d.]+) of ([\d.]+) MB, about [\d.]+ s left", line) for line in said]
    amounts = [(float(match[1]), float(match[2])) for match in done if match is not None]
    assert len(amounts) == len(said) and amounts == sorted(amounts)
    assert amounts[-1][0] <= size + 0.05 and all(abs(total - size) < 0.1 for _, total in amounts)
    capture = "target: capturing the graph"
    assert capture in lines
    shares = [line.split(",")[0] for line in lines if line.startswith(f"{capture}: ")]
    assert shares == [f"{capture}: {share}" for share in ("29%", "77%", "83%")]
