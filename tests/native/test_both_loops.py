"""The loop in C++ returns what the loop in numpy does, to the last bit; what it leaves to that."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsbd_ort import Pipeline, Regex, Service, TokenTrie
from dsbd_ort.decoding import DecodingConfig, RequestTrace, TableModel, result_of
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.errors import DecodingError
from dsbd_ort.decoding.native_decoder import EitherDecoder, NativeDecoder, obstacle
from dsbd_ort.decoding.whole_requests import decoded_alone, decoded_together
from tests.decoding.tables import all_tokens, mixed_table, random_table, request_on
from tests.native.table_requests import PORTABLE

pytest.importorskip("dsbd_ort_native", reason="pip install ./native/python")

ROOT = Path(__file__).parents[2]
VOCAB = 6
TARGET = random_table(1, VOCAB)
DRAFT = mixed_table(TARGET, random_table(2, VOCAB), 0.7)
PROMPT = (1, 2, 3, 4)


def check_requests(number: int, seed: int) -> int:
    command = [sys.executable, "-W", "ignore", "-m", "tests.native.table_requests"]
    run = subprocess.run(
        [*command, str(number), str(seed)],
        cwd=ROOT,
        env={**os.environ, **PORTABLE},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:] + run.stdout[-4000:]
    return int(json.loads(run.stdout)["num_decoded"])


def test_drawn_requests_have_the_same_bits_and_calls() -> None:
    assert check_requests(80, 7) >= 30, "most are refused: draw others"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_many_drawn_requests_have_the_same_bits_and_calls(seed: int) -> None:
    assert check_requests(1000, seed) >= 400


def models() -> tuple[TableModel, TableModel]:
    return TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)


def test_a_conversation_computes_as_few_rows() -> None:
    """Rows that the last request left are used, also of the end of a prompt that the draft read."""
    for context in ("all", 8):
        config = DecodingConfig(num_beams=2, max_new_tokens=8, draft_context=context)
        rows = []
        for kind in (BatchedDecoder, NativeDecoder):
            decoder, prompt, stats = kind(*models()), PROMPT * 8, []
            for seed in range(3):
                result = result_of(decoded_alone(decoder, request_on(config, prompt, seed)))
                stats.append((result.stats.target_rows, result.stats.draft_rows))
                prompt = (*prompt, *result.sequences[0].token_ids, 1, 2)
            rows.append(stats)
        assert rows[0] == rows[1]
        assert rows[0][1][0] < rows[0][0][0]


class Failing(TableModel):
    """An engine whose second call fails."""

    def forward(self, forward: Any) -> Any:
        if len(self.computed_paths) > len(PROMPT):
            raise RuntimeError("no memory")
        return super().forward(forward)


def test_an_error_of_an_engine_is_that_of_the_caller() -> None:
    decoder = NativeDecoder(Failing(VOCAB, TARGET), None)
    config = DecodingConfig(strategy="beam-sample", num_beams=2, max_new_tokens=8)
    with pytest.raises(RuntimeError, match="no memory"):
        result_of(decoded_alone(decoder, request_on(config, PROMPT)))
    assert decoder.num_live == 0


LEFT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logits_processors": [lambda *_: None]}, {}),
    ({}, {"trace": RequestTrace()}),
    ({}, {"gives_up": lambda *_: False}),
    ({}, {"rng": np.random.Generator(np.random.MT19937(0))}),
]


@pytest.mark.parametrize(("options", "more"), LEFT)
def test_what_the_core_does_not_know_runs_in_numpy(options: Any, more: Any) -> None:
    config = DecodingConfig(num_beams=2, max_new_tokens=6, **options)
    request = request_on(config, PROMPT, 1)
    left = type(request)(**{**vars(request), **more})
    assert obstacle(request_on(DecodingConfig(num_beams=2), PROMPT)) is None
    reason = obstacle(left)
    assert reason is not None
    with pytest.raises(DecodingError, match=reason[:20]):
        NativeDecoder(*models()).join(left)


def test_requests_of_both_kinds_take_turns() -> None:
    """A queue of requests, of which every third runs in numpy; each as alone."""
    config = DecodingConfig(num_beams=2, max_new_tokens=6)

    def requests() -> list[Any]:
        return [
            request_on(config, PROMPT, seed, trace=RequestTrace() if seed % 3 == 0 else None)
            for seed in range(9)
        ]

    together = decoded_together(EitherDecoder(*models()), requests(), 4)
    for request, found in zip(requests(), together, strict=True):
        alone = result_of(decoded_alone(BatchedDecoder(*models()), request))
        assert all_tokens(found) == all_tokens(alone)


def test_a_pipeline_and_a_service_of_either_loop_answer_alike(demo_bundle: Path) -> None:
    prompt, answers = "The cat", []
    trie = TokenTrie.from_sequences([[5, 6, 7], [5, 9]])
    kinds: list[dict[str, Any]] = [
        {"strategy": "greedy"},
        {"num_beams": 4, "top_logprobs": 2, "prompt_logprobs": True},
        {"num_beams": 2, "stop_strings": ["a"], "draft_policy": "throughput"},
        {"num_beams": 2, "constraint": trie},
        {"num_beams": 2, "constraint": Regex("[a-z]{3,9}")},
    ]
    for loop in ("python", "native", "auto"):
        with Pipeline.from_bundle(demo_bundle, loop=loop) as pipeline:
            found = []
            for options in kinds:
                given = {"seed": 3, "max_new_tokens": 24, **options}
                result = pipeline.generate(prompt, **given)
                pieces = [*pipeline.stream(prompt, **given)]
                assert "".join(piece.text for piece in pieces) == result.sequences[0].text
                found.append([sequence.token_ids for sequence in result.sequences])
            answers.append(found)
        if loop == "native":
            continue
        with (
            Pipeline.from_bundle(demo_bundle, loop=loop) as pipeline,
            Service(pipeline) as service,
            ThreadPoolExecutor(len(kinds)) as threads,
        ):
            given = {"seed": 3, "max_new_tokens": 24}
            runs = [threads.submit(service.generate, prompt, **given, **each) for each in kinds]
            answers.append([[s.token_ids for s in run.result().sequences] for run in runs])
    assert all(found == answers[0] for found in answers)


def test_a_bundle_that_reads_sound_is_decoded_in_numpy_so_that_its_requests_share_calls(
    whisper: Path, demo_bundle: Path
) -> None:
    kinds = []
    for bundle in (whisper / "english-bundle", demo_bundle):
        with Pipeline.from_bundle(bundle, num_threads=1) as pipeline:
            kinds.append(type(pipeline.models.new_decoder()))
    assert kinds == [BatchedDecoder, EitherDecoder]


HOLDS_A_DECODER = """
import threading
from dsbd_ort.decoding.native_decoder import NativeDecoder
from tests.native.test_both_loops import models
decoder, holds = NativeDecoder(*models()), threading.Event()
def hold(kept): holds.set(); threading.Event().wait()
threading.Thread(target=hold, args=(decoder,), daemon=True).start()
holds.wait()
"""


def test_a_process_that_ends_with_a_decoder_in_use_prints_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-c", HOLDS_A_DECODER], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
