"""A server under mixed load for minutes: its answers and its memory.

Starts dsbd-serve on BUNDLE and clients in threads: small requests, streams, clients that disconnect
during a stream, invalid and oversized bodies, prompts that are too long, bursts larger than the
queue. Exits with code 1 if a request got a status that is not allowed for its kind, or if the
server does not shut down cleanly.
"""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import click
import httpx2

from lab.frame.page import BUNDLE, RESULTS, Page, writes
from lab.frame.server_process import MemorySamples, sampled_memory, served, server_process
from lab.soak.mixed_load import MIX, MODEL, WANTED, Client, Outcomes, gone_client

WARM_UP = 0.2  # first share of the time, not used in the line fitted to the memory


def run_clients(
    url: str, clients: Sequence[Client], seed: int, until: float, outcomes: Outcomes
) -> None:
    """Run randomly chosen clients until the time ``until``."""
    random = Random(seed)
    weights = [MIX.get(client, 1) for client in clients]
    with httpx2.Client(base_url=url, timeout=120) as http:
        while time.monotonic() < until:
            (client,) = random.choices(clients, weights)
            try:
                client(http, random, outcomes)
            except httpx2.HTTPError as error:
                kind = client.__name__.replace("_", " ")
                WANTED.setdefault(kind, set())
                outcomes.add(kind, type(error).__name__, 0.0)


def load(url: str, seconds: float, num_clients: int) -> Outcomes:
    """Run all clients; return the outcomes of their requests."""
    outcomes, until = Outcomes(), time.monotonic() + seconds
    groups = [[gone_client], *[list(MIX)] * num_clients]
    threads = [
        threading.Thread(target=run_clients, args=(url, clients, seed, until, outcomes))
        for seed, clients in enumerate(groups)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def section(outcomes: Outcomes, memory: MemorySamples, unwanted: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the section."""
    yield from outcomes.table()
    slope = memory.slope_after(WARM_UP)
    yield from ("", f"Unwanted: {', '.join(unwanted) or 'none'}.", "")
    yield (
        f"The server's resident memory; a line fitted after the first {WARM_UP:.0%} of the time "
        f"rises by {slope:+.2f} MB a minute:"
    )
    yield from ("", *memory.table())


@click.command(help=__doc__)
@BUNDLE
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--clients", default=6, show_default=True)
@writes(RESULTS / "serving.md", is_timed=False)
def main(bundle: Path, minutes: float, clients: int, page: Page) -> None:
    """Run the load and write the tables into the page."""
    page.begin("soak")
    limits = ("--max-requests", 8, "--max-queued", 16)
    with server_process(bundle, *served(MODEL, page.threads), *limits) as server:
        every_s = min(1.0, minutes)
        with sampled_memory(server.process.pid, every_s) as memory:
            outcomes = load(server.url, 60 * minutes, clients)
        exit_code = server.end()
    unwanted = outcomes.unwanted(WANTED)
    if exit_code:
        unwanted.append(f"the server ended with {exit_code}")
    details = f"`{bundle.name}`", f"{minutes:g} minutes", f"{clients + 1} clients"
    page.write("soak", section(outcomes, memory, unwanted), *details)
    sys.exit(1 if unwanted else 0)
