"""Options of dsbd-run that contradict each other: refused, never ignored."""

from __future__ import annotations

from collections.abc import Collection

import click

_EXCLUDE = [  # (option, option, what to do)
    ("--prompt", "--prompt-file", "give one of them, not both"),
    ("--stream", "--json", "one prints text as it comes, the other one object; use one"),
    *(
        ("--input", other, "the prompts are the lines of --input; leave the other out")
        for other in ("--prompt", "--prompt-file")
    ),
    *(
        ("--input", other, "--output gets one JSON object a line, statistics too; leave it out")
        for other in ("--stream", "--json", "--stats")
    ),
    ("--input", "--trace", "a trace draws one request; give one prompt with --prompt"),
    (
        "--workers",
        "--concurrency",
        "requests of several processes share no calls; give one of them",
    ),
    ("--cluster", "--concurrency", "a replica answers one line at a time; give --replicas"),
    ("--cluster", "--workers", "replicas take the place of workers; give --replicas"),
]
_NEED = [  # (option, what it needs)
    ("--input", "--output"),
    ("--output", "--input"),
    ("--workers", "--input"),
    ("--concurrency", "--input"),
    ("--cluster", "--input"),
    ("--replicas", "--cluster"),
    ("--system", "--chat"),
]


def check_options(given: Collection[str], num_return_sequences: int | None) -> None:
    """Refuse contradictions among the options ``given`` on the command line.

    Raises:
        click.UsageError: naming both options and the mend.
    """
    for one, other, mend in _EXCLUDE:
        if one in given and other in given:
            raise click.UsageError(f"{one} and {other} contradict each other: {mend}")
    for option, needed in _NEED:
        if option in given and needed not in given:
            raise click.UsageError(f"{option} means nothing without {needed}; give that as well")
    if "--stream" in given and (num_return_sequences or 1) > 1:
        raise click.UsageError(
            f"--stream prints the best sequence alone, but --num-return-sequences is "
            f"{num_return_sequences}; use 1, or leave --stream out"
        )
