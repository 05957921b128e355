"""Process with the CUDA provider over the stand-in: a scenario a line in, its result a line out."""

import json
import os
import subprocess
import sys
import traceback
from typing import Any

from tests.cuda_binary import stand_in


class Worker:
    """The process, seen from the tests."""

    def __init__(self) -> None:
        """Start it; raise ``stand_in.Unavailable`` where it cannot be."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda_binary.worker"],
            env=stand_in.environment(),
            cwd=stand_in.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, scenario: str, **arguments: Any) -> Any:
        """Return the result of a function of ``scenarios``; what it raises fails the test."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([scenario, arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the process ended in {scenario} with {self._process.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def main() -> None:
    """Answer until the input ends; the destructors of the libraries do not run."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    from tests.cuda_binary import cuda_runtime, scenarios

    standin = cuda_runtime.StandIn()
    cuda_runtime.put_in_place(standin)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": getattr(scenarios, name)(standin, **arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
