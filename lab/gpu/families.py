"""Every family and option on a provider: differences of a path's logits from the CPU's.

The bundles are those of lab.gpu.family_bundles. A path is computed in random ways, which are the
same on both providers, with rows of other paths, and prunes between calls.
"""

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from dsbd_errors import DsbdError
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from lab.gpu.kinds_of_ways import KINDS, NUM_TOKENS, outputs_of
from lab.gpu.runner import write_json

_NUM_WAYS = 4
_MOST_WORKERS = 12


def difference(place: Path, provider: str) -> dict[str, Any]:
    """Return the largest difference of a logit from the CPU's, or the reason for a failure."""
    result: dict[str, Any] = json.loads((place / "case.json").read_text(encoding="utf-8"))
    result["difference"] = None
    if not result["reason"]:
        try:
            result["difference"] = _largest_difference(place / "bundle", provider)
        except DsbdError as error:
            result["reason"] = str(error)
    return result


def _largest_difference(folder: Path, provider: str) -> float:
    bundle = open_bundle(folder)
    outputs = []
    for name in ("cpu", provider):
        with load_causal_lm(bundle, "target", provider=name) as model:
            rng = np.random.default_rng(0)
            token_ids = rng.integers(0, model.spec.vocab_size, NUM_TOKENS)
            ways = [(KINDS[1], number == 0) for number in range(_NUM_WAYS)]
            outputs.append(
                [outputs_of(model, token_ids, kind, rng, is_plain=plain) for kind, plain in ways]
            )
    cpu, other = (np.array(each) for each in outputs)
    return float(np.abs(cpu - other).max())


def main() -> None:
    """Compare the bundles that ``--json`` does not have yet; write it after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--provider", required=True)
    parser.add_argument("--dtype", required=True, help="that of the bundles")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    text = options.json.read_text(encoding="utf-8") if options.json.exists() else '{"cases": []}'
    results = json.loads(text)["cases"]
    done = {each["case"] for each in results}
    of_case = {
        file.parent: json.loads(file.read_text()) for file in options.folder.glob("*/*.json")
    }
    wanted = sorted(
        place
        for place, case in of_case.items()
        if case["case"] not in done and (case["dtype"] == "fp32") == (options.dtype == "fp32")
    )
    workers = max(min(_MOST_WORKERS, (os.cpu_count() or 1) - 2), 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        for each in as_completed(
            [pool.submit(difference, place, options.provider) for place in wanted]
        ):
            results.append(each.result())
            print(*results[-1].values(), flush=True)
            write_json(options.json, {"provider": options.provider, "cases": results})


if __name__ == "__main__":
    main()
