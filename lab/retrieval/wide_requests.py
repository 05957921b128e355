"""Requests with wide beams under a trie, and the memory of a process that only computes them."""

from dataclasses import dataclass
from pathlib import Path

from dsbd_ort import Pipeline, TokenTrie
from dsbd_ort.benchmark.invariance import Output, output_of, pair_count
from dsbd_ort.requests.results import GenerationResult
from lab.peers.ids import Ids
from scripts.machine import memory_of

_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How requests are computed.

    Attributes:
        strategy, num_beams: options of every request; all beams are returned.
        are_together: whether requests share engine calls; else they run one after another.
    """

    strategy: str
    num_beams: int
    are_together: bool


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Results and memory of the requests of a setting.

    Attributes:
        outputs: output of each request.
        resident_bytes: peak resident memory of the process, including file pages.
        kv_bytes: maximum ``kv_bytes_peak`` of the requests.
    """

    outputs: list[Output]
    resident_bytes: int
    kv_bytes: int


def settings_of(pair: tuple[str, str], num_beams: int) -> list[Setting]:
    """Return the settings of a row; the others are compared with the first."""
    return [
        Setting(strategy=strategy, num_beams=num_beams, are_together=are_together)
        for are_together in (False, True)
        for strategy in pair
    ]


def cells_of(results: list[Computed], ids: Ids) -> tuple[list[str], bool]:
    """Return the cells of a row's settings, and whether all requests were equal and legal.

    Legal: all sequences of a request are distinct ids.
    """
    memory = [f"{each.resident_bytes / 1e6:.0f}, {each.kv_bytes / 1e6:.1f}" for each in results]
    plain, *others = results
    counts = [
        pair_count("", zip(plain.outputs, other.outputs, strict=True)).num_other_tokens
        for other in others
    ]
    number = len(plain.outputs)
    same = [f"{number - count}/{number}" for count in counts]
    are_legal = all(
        ids.num_legal([tokens for tokens, _ in output]) == len(output)
        for each in results
        for output in each.outputs
    )
    return [*memory, *same], not any(counts) and are_legal


def computed(
    bundle: Path,
    trie_file: Path,
    prompts: list[list[int]],
    setting: Setting,
    num_threads: int,
) -> Computed:
    """Compute the requests, with a memory-mapped trie; the peak is that of the whole process."""
    trie = TokenTrie.load(trie_file)
    with Pipeline.from_bundle(
        bundle, num_threads=num_threads, prefix_cache=False, ngram_pool=0, generation_config=False
    ) as pipeline:

        def generate(some: list[list[int]]) -> list[GenerationResult]:
            return pipeline.generate(
                some,
                strategy=setting.strategy,
                num_beams=setting.num_beams,
                num_return_sequences=setting.num_beams,
                constraint=trie,
                eos_token_id=(),
                seed=_SEED,
            )

        batches = [prompts] if setting.are_together else [[prompt] for prompt in prompts]
        results = [result for batch in batches for result in generate(batch)]
    return Computed(
        outputs=[output_of(result) for result in results],
        resident_bytes=memory_of()["VmHWM"],
        kv_bytes=max(result.stats.kv_bytes_peak or 0 for result in results),
    )
