"""Whole requests on tables, drawn at random, by the loop in C++ and by that in numpy.

    python -m tests.native.both_loops NUMBER SEED

prints how many were decoded, and the first case in which they differ in any bit or engine call.
"""

import json
import sys
from typing import Any

import numpy as np

from dsbd_errors import DsbdError
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.native_decoder import NativeDecoder
from tests.native.law_cases import check_portable
from tests.native.table_requests import WholeRequest, cases_of, config_of, drawn_requests


def is_valid(request: WholeRequest) -> bool:
    try:
        config_of(request)
    except DsbdError:
        return False
    return True


def without_texts(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return an outcome without the texts of its errors, which name options as each loop does."""
    each = [{**one, "error": "error" in one} for one in outcome["outcomes"]]
    return {**outcome, "outcomes": each}


def main(number: int, seed: int) -> None:
    check_portable()
    valid = [request for request in drawn_requests(number, seed) if is_valid(request)]
    num_decoded = 0
    for case in cases_of(valid, np.random.default_rng(seed)):
        expected, found = (
            without_texts(case.outcome(kind)) for kind in (BatchedDecoder, NativeDecoder)
        )
        num_decoded += sum(not each["error"] for each in expected["outcomes"])
        if found != expected:
            requests = [vars(request) for request in case.requests]
            print(json.dumps({"case": case.number, "expected": expected, "found": found}))
            sys.exit(f"case {case.number} differs: {requests}")
    print(json.dumps({"num_decoded": num_decoded}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
