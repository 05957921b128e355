"""Pieces one after another: time limits, failures, and going on where a call ended."""

import itertools
import json
import re
import sys
import time
from pathlib import Path

import pytest

from lab.gpu.pieces import Piece, pieces
from lab.gpu.runner import DONE, FAILED, NOT_RUN, NotRunError, PieceError, ResultFile, Runner
from lab.gpu.schedule import chosen, run_pieces
from lab.gpu.settings import ROOT, Settings


def runner(tmp_path, limit_s=20.0):
    return Runner(sys.executable, ROOT / "scripts", tmp_path / "log", {"WORD": "said"}, limit_s)


def test_a_command_gets_the_variables_and_writes_to_the_log(tmp_path):
    runner(tmp_path).run(sys.executable, "-c", "import os; print(os.environ['WORD'])")
    assert (tmp_path / "log").read_text().splitlines()[-1] == "said"


def test_a_failing_command_gives_its_exit_code_and_last_error(tmp_path):
    code = "import sys; print('Error: no room'); print('bye'); sys.exit(3)"
    with pytest.raises(PieceError, match=r"^exit code 3: Error: no room$"):
        runner(tmp_path).run(sys.executable, "-c", code)


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path):
    child = "import time, pathlib; time.sleep(1); pathlib.Path('alive').touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    with pytest.raises(PieceError, match="took over 0 s"):
        runner(tmp_path, limit_s=0.3).run(
            sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}"
        )
    assert time.monotonic() - began < 1
    time.sleep(1.2)
    assert not (tmp_path / "alive").exists()


class Actions:
    """Pieces that note that they were run; ``failing`` ones fail, ``inapplicable`` ones refuse."""

    def __init__(self):
        self.log = []
        self.failing, self.inapplicable = {"b"}, {"c"}

    def piece(self, name, **options):
        def action(settings, runner):
            self.log.append(name)
            if name in self.failing:
                raise PieceError("broken")
            if name in self.inapplicable:
                raise NotRunError("not here")
            return {"name": name}

        return Piece(name, action, **options)

    def pieces(self):
        return [*map(self.piece, "abc"), self.piece("table", is_repeated=True)]


def test_a_failure_is_recorded_and_the_others_go_on_and_only_it_is_tried_again(tmp_path):
    actions, said = Actions(), []
    settings = Settings(work=tmp_path, provider="cpu")
    assert not run_pieces(actions.pieces(), settings, said.append)
    results = ResultFile(tmp_path / "gpu.json").all()
    states = {result.piece: (result.state, result.reason) for result in results}
    assert states == {
        "a": (DONE, ""), "b": (FAILED, "broken"), "c": (NOT_RUN, "not here"), "table": (DONE, ""),
    }  # fmt: skip
    actions.failing.clear()
    assert run_pieces(actions.pieces(), settings, said.append)
    assert actions.log == ["a", "b", "c", "table", "b", "c", "table"]
    assert "a: done before" in said and any("broken" in line for line in said)


def test_what_has_no_time_left_is_left_for_the_next_call_but_not_the_table(tmp_path):
    actions, said = Actions(), []
    actions.failing.clear()
    clock = itertools.count(0.0, 3.0)  # every look at the clock takes three seconds
    settings = Settings(work=tmp_path, provider="cpu", limit_s=12.0)
    assert not run_pieces(actions.pieces(), settings, said.append, lambda: next(clock))
    assert actions.log == ["a", "table"]
    assert said[1:3] == [f"{name}: left for the next call, the 12 s are over" for name in "bc"]


def test_a_piece_that_takes_too_long_says_so_keeps_its_rows_and_the_next_one_runs(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; "
        'Path(sys.argv[1]).write_text(\'{"rows": [["a"]]}\'); time.sleep(60)'
    )

    def slow(settings, runner):
        file = tmp_path / "rows.json"
        try:
            runner.run(sys.executable, "-c", code, file)
        except PieceError as error:
            error.values = json.loads(file.read_text())
            raise

    said, seen = [], []
    next_piece = Piece("next", lambda settings, runner: {"before": said[:]})
    every = [Piece("slow", slow, 1.0), next_piece]
    assert not run_pieces(every, Settings(work=tmp_path, provider="cpu"), said.append)
    by_piece = {result.piece: result for result in ResultFile(tmp_path / "gpu.json").all()}
    assert by_piece["slow"].values == {"rows": [["a"]]}
    assert by_piece["slow"].reason.startswith("took over 1 s")
    assert by_piece["next"].state == DONE and len(by_piece["next"].values["before"]) == 1
    again = [every[0], next_piece, Piece("new", lambda settings, runner: seen.append(1) or {})]
    run_pieces(again, Settings(work=tmp_path, provider="cpu"), said.append)
    assert [line.split(":")[0] for line in said[2:]] == ["next", "new", "slow"]  # it was tried


ORDER = [
    "install", "machine",
    "export-demo-fp16", "serving-demo-fp16", "families-fp16",
    "make-twin", "export-twin-1B-fp16", "serving-twin-1B-fp16",
    "draft-twin-1B-fp16-feature", "draft-twin-1B-fp16-2-layers", "draft-twin-1B-fp16-4-layers",
    "caches-twin-1B-fp16", "caches-demo-fp16", "native-twin-1B-fp16", "native-demo-fp16",
    "build-demo-fp16-tensorrt", "parity-demo-fp16-tensorrt", "bits-demo-fp16-tensorrt",
    "bench-demo-fp16-tensorrt", "families-fp32", "table",
]  # fmt: skip


def test_what_is_not_known_comes_first_and_what_is_answered_is_left_out(tmp_path):
    every = pieces(Settings(work=tmp_path))
    assert [piece.name for piece in chosen(every, [], is_all=False)] == ORDER
    slow = [piece.name for piece in every if piece.limit_s > 90]
    assert all(name == "make-twin" or name.startswith("export-") for name in slow)
    assert chosen(every, []) == every and len({piece.name for piece in every}) == len(every)
    rest = [piece.name for piece in every if piece.name not in ORDER]
    assert rest[0] == "export-demo-fp32" and rest[-1] == "bench-twin-1B-fp16"


def test_pieces_are_chosen_by_name_or_pattern(tmp_path):
    every = pieces(Settings(work=tmp_path, params="150M"))
    names = [piece.name for piece in chosen(every, ["install", "bench-*"], is_all=False)]
    assert names == [
        "install", "bench-demo-fp16-tensorrt", "bench-demo-fp16", "bench-demo-fp32",
        "bench-twin-150M-fp16",
    ]  # fmt: skip


class RunnerOnHopper:
    """Builds for no GPU that TensorRT for RTX does not know, as dsbd-export says it."""

    python = Path("python")

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def run(self, *command):
        if command[-1] == "import tensorrt":
            raise PieceError("no module")

    def command(self, name, *words):
        raise PieceError(f"exit code 2: Error: {self.reason}")


UNKNOWN_GPU = "engine='tensorrt-rtx' cannot be built for compute capability 9.0; it knows 8.0"


@pytest.mark.parametrize(
    ("reason", "error"),
    [(UNKNOWN_GPU, NotRunError), ("no space left on device", PieceError)],
)
def test_a_gpu_that_tensorrt_does_not_know_is_no_failure(tmp_path, reason, error):
    settings = Settings(work=tmp_path, provider="cuda", bundles=(tmp_path / "demo",))
    (tmp_path / "demo").mkdir()
    by_name = {piece.name: piece for piece in pieces(settings)}
    said = re.escape(reason)
    with pytest.raises(error, match=said):
        by_name["build-demo-tensorrt"].action(settings, RunnerOnHopper(reason))
    with pytest.raises(NotRunError, match=r"no engines in .*: see build-demo-tensorrt"):
        by_name["bench-demo-tensorrt"].action(settings, RunnerOnHopper(reason))
