"""Prompt file for ``--prompts``: the first prompts of dsbd-bench's own list."""

import json
import sys
from pathlib import Path

from dsbd_ort.benchmark.bench_run import PROMPTS


def main(file: Path, num_prompts: int) -> None:
    """Write the first ``num_prompts`` prompts, one JSON object per line."""
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:num_prompts]]
    file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
