"""Bits of one path's logits, computed in many ways on one engine: which variation changes them.

A way is random within its kind: the number of the path's rows in a call, the number of rows of
other paths in the call, and the places of the path's rows in the cache. Kinds differ in what is
fixed. Their counts show what must be fixed for logits that depend only on the path.
"""

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_forward.logits import Logits
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.loading import load_causal_lm
from scripts.path_ways import PathCall, WayCount

NUM_TOKENS, NUM_WAYS = 60, 20
FIXED_ROWS = 32
_MOST_NEIGHBOURS = 12  # maximum rows of other paths in a call
# Maximum kept rows of other paths. With the path and a call of FIXED_ROWS they are below 128 rows,
# so that the capacity does not change.
_MOST_KEPT = 30


@dataclass(frozen=True)
class Kind:
    """A kind of ways, defined by what is the same in all of them.

    Attributes:
        has_fixed_rows: every call has ``FIXED_ROWS`` rows and as many logit rows.
        has_fixed_places: the path's row of position p is row p of the cache; otherwise rows of
            other paths are between the path's rows.
        is_repetition: all ways are the plain way.
    """

    name: str
    has_fixed_rows: bool = False
    has_fixed_places: bool = False
    is_repetition: bool = False


KINDS = (
    Kind("the same calls again", is_repetition=True),
    Kind("any rows, any places"),
    Kind("fixed rows, any places", has_fixed_rows=True),
    Kind("fixed rows, fixed places", has_fixed_rows=True, has_fixed_places=True),
)


def count_by_kind(
    model: CausalLM, *, num_tokens: int = NUM_TOKENS, num_ways: int = NUM_WAYS, seed: int = 0
) -> dict[str, WayCount]:
    """Return for every kind how many ways and numbers differ from the plain way of the kind."""
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, model.spec.vocab_size, num_tokens)
    counts = {}
    for kind in KINDS:
        wanted = outputs_of(model, token_ids, kind, rng, is_plain=True)
        count = WayCount()
        for _ in range(num_ways):
            outputs = outputs_of(model, token_ids, kind, rng, is_plain=kind.is_repetition)
            others = int(np.count_nonzero(outputs != wanted))
            count += WayCount(1, int(others > 0), wanted.size, others)
        counts[kind.name] = count
    return counts


def outputs_of(
    model: CausalLM,
    token_ids: NDArray[np.int64],
    kind: Kind,
    rng: np.random.Generator,
    *,
    is_plain: bool,
) -> NDArray[np.float64]:
    """Return the head's numbers after every token of the path, (n, V or 2K + 1).

    In the plain way, the path's rows are at fixed places, and each call has as many of them as
    possible.
    """
    model.keep(np.arange(0))
    places = np.arange(0)
    outputs: list[NDArray[np.float64]] = []
    while (num_done := len(places)) < len(token_ids):
        num_left = len(token_ids) - num_done
        max_rows = FIXED_ROWS if kind.has_fixed_rows else num_left
        if is_plain:
            chunk, num_rows = min(num_left, max_rows), max_rows
        else:
            chunk = int(rng.integers(1, min(num_left, rng.choice([1, 2, 8, max_rows])) + 1))
            free = chunk + int(rng.integers(0, _MOST_NEIGHBOURS + 1))
            num_rows = FIXED_ROWS if kind.has_fixed_rows else free
        is_in_order = is_plain or kind.has_fixed_places
        path = np.arange(chunk)
        if not is_in_order:
            path = np.sort(rng.choice(num_rows, chunk, replace=False))
        first, end = model.num_rows, model.num_rows + num_rows
        call = PathCall.drawn(
            token_ids, places, path, range(first, end),
            num_columns=end, vocab_size=model.spec.vocab_size, rng=rng,
        )  # fmt: skip
        others = np.arange(num_rows if kind.has_fixed_rows else 0)
        logit_rows = np.concatenate([path, np.setdiff1d(others, path)])
        forward = Forward(call.token_ids, call.positions, call.mask, logit_rows)
        outputs.append(_numbers(model.forward(forward).logits)[:chunk])
        places = _keep(model, places, path, num_rows, None if is_in_order else rng)
    return np.concatenate(outputs)


def _keep(
    model: CausalLM,
    places: NDArray[np.int64],
    path: NDArray[np.int64],
    num_rows: int,
    rng: np.random.Generator | None,
) -> NDArray[np.int64]:
    """Drop all or some rows of other paths in the last call; return the path's places.

    rng: draws the rows that stay; None: all are dropped.
    """
    first = model.num_rows - num_rows
    stays = np.zeros(num_rows, np.bool_)
    if rng is not None:
        room = max(_MOST_KEPT - (first - len(places)), 0)
        others = np.setdiff1d(np.arange(num_rows), path)
        stays[rng.permutation(others)[: rng.integers(0, min(room, len(others)) + 1)]] = True
    stays[path] = True
    model.keep(np.concatenate([np.arange(first), first + np.flatnonzero(stays)]))
    return np.concatenate([places, first + np.cumsum(stays)[path] - 1])


def _numbers(logits: Logits) -> NDArray[np.float64]:
    """Return all outputs of the head for each row as one array."""
    if logits.whole is not None:
        return logits.whole.astype(np.float64)
    return np.concatenate([*logits.most_probable(0), logits.log_normalizers], axis=1)


def main() -> None:
    """Print the counts of the target and write them to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--provider", required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    with load_causal_lm(open_bundle(options.bundle), "target", provider=options.provider) as model:
        counts = count_by_kind(model)
    by_kind = {name: dataclasses.asdict(count) for name, count in counts.items()}
    text = json.dumps({"provider": options.provider, "counts": by_kind}, indent=1)
    print(text)
    options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
