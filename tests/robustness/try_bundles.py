"""A process that opens damaged bundles and says of each what came of it, one JSON list a line.

The last line says how often requests were preempted, and of how many engine calls.

Arguments: a whole bundle, a folder to work in, the first seed, the number of seeds.
"""

import json
import resource
import sys
import warnings
from pathlib import Path

from dsbd_errors import DsbdError
from tests.robustness.mutations import mutated_copy
from tests.robustness.preempting import TALLY, PreemptedPipeline

_MOST_BYTES = 8 * 2**30  # so that an absurd size fails here, not on a small machine


def outcome(bundle: Path) -> str:
    """Return "works", "refused: ..." or the kind of a foreign error."""
    try:
        with PreemptedPipeline.from_bundle(bundle, num_threads=1) as pipe:
            pipe.generate("ab", num_beams=2, draft_length=2, max_new_tokens=3)
    except DsbdError as error:
        return f"refused: {error}"
    except BaseException as error:  # a panic of the tokenizers is no Exception
        return f"{type(error).__name__}: {error}"
    return "works"


def main(bundle: str, work: str, first_seed: str, num_seeds: str) -> None:
    """Try the seeds from ``first_seed`` on."""
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    for seed in range(int(first_seed), int(first_seed) + int(num_seeds)):
        folder = Path(work) / "try" / "bundle"
        name = mutated_copy(Path(bundle), folder, seed)
        print(json.dumps(["begun", seed, name]), flush=True)
        print(json.dumps(["ended", seed, outcome(folder)]), flush=True)
    print(json.dumps(["preempted", TALLY.num_preempted, TALLY.num_calls]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
