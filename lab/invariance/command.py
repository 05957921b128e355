"""Bits that depend on how something is computed: of requests, or of the logits of one path.

A path on any provider, by what is held fixed, is counted by lab/run gpu.
"""

from __future__ import annotations

import click

from lab.invariance import logits, requests


@click.group(help=__doc__)
def main() -> None:
    """Take a subcommand."""


main.add_command(requests.main, "requests")
main.add_command(logits.main, "logits")
