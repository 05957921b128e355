"""Count requests whose output depends on how they are computed.

Of each of BUNDLES, all pairs of settings of ``dsbd-bench --check-invariance``, and requests to a
dsbd-serve: 8 clients at a time, whose requests share the engine calls and the rows of prompts,
against each request alone in this process. Tokens and log-probabilities must be equal, to the last
bit; a bundle that claims to be bit-exact and is not ends the command with an error.

--record keeps the counts after every round of prompts: the next call with the same settings goes on
where this one ended, be it by --minutes or Ctrl-C. The table has what was counted so far.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import onnxruntime as ort
from rich.console import Console
from rich.progress import track

from dsbd_ort import Pipeline
from dsbd_ort.benchmark.bench_run import CommonSettings
from dsbd_ort.benchmark.invariance import (
    AT_A_TIME,
    CheckedRequest,
    CheckedRequests,
    Output,
    PairCount,
    check_invariance,
    pair_count,
)
from dsbd_ort.benchmark.prompts import PROMPTS
from dsbd_ort.pipeline import PipelineSettings
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from lab.frame.page import BUNDLES, RESULTS, Page, writes
from lab.frame.server_process import MODEL, client_of
from lab.invariance.kept_counts import KeptCounts, bundle_key, counted_name, kept_options
from scripts.document_sections import table

SECTIONS = {False: "invariance", True: "invariance, weight-only"}
WEIGHT_ONLY = ("int8", "int4")
COLUMNS = ("bundle", "settings", "requests", "other tokens", "other log-probabilities")


def section_of(bundles: tuple[Path, ...]) -> str:
    """Return the section of these bundles; of weight-only bundles it is another."""
    found = {open_bundle(path).entry("target").quantization in WEIGHT_ONLY for path in bundles}
    if len(found) > 1:
        raise click.UsageError(
            "BUNDLES are weight-only (int8, int4) and others, whose tables are apart; measure them "
            "one after the other"
        )
    return SECTIONS[found.pop()]


def served_body(request: CheckedRequest) -> dict[str, Any]:
    """Return a request as the body of /v1/completions."""
    options = {**request.options}
    max_tokens = options.pop("max_new_tokens")
    names = {"model": MODEL, "prompt": request.prompt, "max_tokens": max_tokens, "logprobs": 0}
    return {**names, **options}


def served_output(answer: dict[str, Any]) -> Output:
    """Return texts and log-probabilities of a response."""
    return [
        ([choice["text"]], choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]
    ]


def served_count(
    settings: PipelineSettings, requests: list[CheckedRequest], threads: int
) -> PairCount:
    """Return the count of requests through a server against each alone here."""
    with settings.open() as pipeline:
        outputs = [_own_output(pipeline, request) for request in requests]
    with (
        client_of(Path(settings.bundle), threads, "--no-generation-config") as http,
        ThreadPoolExecutor(AT_A_TIME) as clients,
    ):

        def answer(request: CheckedRequest) -> Output:
            answered = http.post("/v1/completions", json=served_body(request)).raise_for_status()
            return served_output(answered.json())

        found = list(clients.map(answer, requests))
    name = f"HTTP, {AT_A_TIME} at a time, of mixed strategies / alone"
    return pair_count(name, zip(found, outputs, strict=True))


def _own_output(pipeline: Pipeline, request: CheckedRequest) -> Output:
    result = pipeline.generate(request.prompt, **request.options)
    return [([sequence.text], sequence.token_logprobs) for sequence in result.sequences]


@dataclass(frozen=True)
class Counting:
    """How the requests of a bundle are computed, and where their counts are kept."""

    common: CommonSettings
    threads: int
    kept: KeptCounts

    def counted(self, bundle: Bundle) -> list[PairCount]:
        """Return the counts of all rounds so far, none before the first one."""
        return [PairCount(**pair) for pair in self.kept.get(self._key(bundle)) or ()]

    def go_on(self, bundle: Bundle, num_rounds: int, until: float) -> None:
        """Count until there are so many rounds, or the clock says ``until``."""
        found = self.counted(bundle)
        rounds = range(found[0].num_requests // len(PROMPTS) if found else 0, num_rounds)
        for number in track(rounds, bundle.path.name, console=Console(stderr=True)):
            if time.monotonic() >= until:
                break
            new = list(self._round(bundle, number))
            found = [one + other for one, other in zip(found, new, strict=True)] if found else new
            self.kept.put(self._key(bundle), [asdict(pair) for pair in found])

    def _key(self, bundle: Bundle) -> str:
        common = self.common
        return bundle_key(bundle, *common.num_beams, common.max_new_tokens, self.threads)

    def _round(self, bundle: Bundle, number: int) -> Iterator[PairCount]:
        """Yield the count of every pair of settings, every prompt once."""
        settings = PipelineSettings(
            bundle=bundle.path,
            num_threads=self.threads,
            verify=False,
            prefix_cache=False,
            generation_config=False,
            ngram_pool=0,
        )
        seed = number * len(PROMPTS)
        yield from check_invariance(settings, PROMPTS, self.common, repetitions=1, seed=seed)
        requests = CheckedRequests(PROMPTS, self.common, 1, seed)
        mixed = requests.mixed(has_draft=bundle.manifest.draft is not None)
        yield served_count(settings, mixed, self.threads)


@click.command(help=__doc__)
@BUNDLES
@click.option(
    "--requests", "num_requests", default=200, show_default=True, help="At least, of every pair."
)
@click.option("--num-beams", default=(2, 4), show_default=True, multiple=True)
@click.option("--max-new-tokens", default=64, show_default=True)
@kept_options(minutes=60.0)
@writes(RESULTS / "invariance.md", is_timed=False)
def main(
    bundles: tuple[Path, ...],
    num_requests: int,
    num_beams: tuple[int, ...],
    max_new_tokens: int,
    minutes: float,
    record: Path,
    page: Page,
) -> None:
    """Count, print the table and write it between the marks of the document."""
    section = section_of(bundles)
    page.begin(section)
    common = CommonSettings(num_beams=num_beams, max_new_tokens=max_new_tokens)
    counting = Counting(common, page.threads, KeptCounts(record))
    num_rounds = -(-num_requests // len(PROMPTS))
    rows: list[tuple[str, ...]] = []
    broken: list[str] = []
    for path in bundles:
        bundle = open_bundle(path)
        counting.go_on(bundle, num_rounds, time.monotonic() + 60 * minutes)
        for pair in counting.counted(bundle):
            found = pair.num_requests, pair.num_other_tokens, pair.num_other_logprobs
            rows.append((counted_name(bundle), pair.name, *map(str, found)))
            if pair.num_other_logprobs and bundle.entry("target").bit_exact:
                broken.append(f"{path}: {pair.name}")
        num_counted = sum(pair.num_requests for pair in counting.counted(bundle)[:1])
        if num_counted < num_requests:
            message = f"{path}: {num_counted} of {num_requests} requests of a pair; call again"
            click.echo(message, err=True)
    details = f"{max_new_tokens} new tokens, onnxruntime {ort.__version__}"
    page.write(section, table(COLUMNS, rows), details)
    if broken:
        raise click.ClickException(
            "said to be bit-exact, but requests differ: " + "; ".join(broken)
        )
