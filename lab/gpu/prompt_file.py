"""Prompt file for ``--prompts``: the first of dsbd-bench's own prompts."""

import json
import sys
from pathlib import Path

from dsbd_ort.benchmark.bench_run import PROMPTS


def main(file: Path, num_prompts: int) -> None:
    """Write one JSON object per line."""
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:num_prompts]]
    file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
