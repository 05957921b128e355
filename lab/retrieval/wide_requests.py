"""Requests of wide beams under a trie, with the memory of a process that does nothing else."""

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
        strategy, num_beams: of every request; all beams are returned.
        are_together: whether they share the engine calls, instead of one after another.
    """

    strategy: str
    num_beams: int
    are_together: bool


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Results, memory and times of the requests of a setting.

    Attributes:
        outputs: of each request.
        resident_bytes: peak resident memory of the process, file pages included.
        kv_bytes: the highest ``kv_bytes_peak`` of a request.
    """

    outputs: list[Output]
    resident_bytes: int
    kv_bytes: int


def settings_of(pair: tuple[str, str], num_beams: int) -> list[Setting]:
    """Return the settings of a row: what the others are compared with is first."""
    return [
        Setting(strategy=strategy, num_beams=num_beams, are_together=are_together)
        for are_together in (False, True)
        for strategy in pair
    ]


def cells_of(found: list[Computed], ids: Ids) -> tuple[list[str], bool]:
    """Return the figures of a row's settings, and whether all requests were the same and legal.

    Legal: all sequences of a request are different ids.
    """
    memory = [f"{each.resident_bytes / 1e6:.0f}, {each.kv_bytes / 1e6:.1f}" for each in found]
    plain, *others = found
    counts = [
        pair_count("", zip(plain.outputs, other.outputs, strict=True)).num_other_tokens
        for other in others
    ]
    number = len(plain.outputs)
    same = [f"{number - count}/{number}" for count in counts]
    are_legal = all(
        ids.num_legal([tokens for tokens, _ in output]) == len(output)
        for each in found
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
    """Compute the requests; the trie is mapped. The peak is that of the whole process."""
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
