"""Wide beams under a trie over HTTP: one request, the ranked items, many requests at a time."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

from dsbd_ort import TokenTrie
from dsbd_ort.engine import ServiceLimits
from tests.openai_server.running_server import MODEL

PROMPTS = ["def read(path):", "import ", "class Reader:\n", "x", "def read(p", "return None"]
_SEQUENCES = np.random.default_rng(0).integers(0, 64, size=(5000, 3))
TRIE = TokenTrie.from_array(_SEQUENCES, items=[f"item-{number}" for number in range(5000)])
WIDE = {"num_beams": 64, "num_return_sequences": 50, "seed": 1}


@pytest.fixture(scope="module")
def server(serve):
    limits = ServiceLimits(max_requests=4)
    with serve(limits, tries={"items": TRIE}, max_beams=256, max_best_of=64) as running:
        yield running


def ranked(client, prompt, **body):
    fields = {"constraint": {"trie": "items"}, **body}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=fields)


@pytest.mark.parametrize("strategy", ["beam-search", "speculative-beam-search", "dsbd"])
def test_one_request_returns_the_ranked_items(server, pipeline, strategy):
    with server.client() as client:
        found = ranked(client, PROMPTS[0], strategy=strategy, **WIDE)
    wanted = pipeline.generate(PROMPTS[0], strategy=strategy, constraint=TRIE, **WIDE).sequences
    assert len(found.choices) == len(wanted) == 50
    for choice, sequence in zip(found.choices, wanted, strict=True):
        report = choice.dsbd
        assert report["token_ids"] == sequence.token_ids
        assert report["items"] == sequence.items == TRIE.items_of(sequence.token_ids) != []
        assert report["score"] == pytest.approx(sequence.score, abs=1e-5)
        assert report["logprob"] == pytest.approx(sequence.logprob, abs=1e-5)
        assert choice.finish_reason == "stop"
    assert found.usage.completion_tokens == 3 * 50


def test_many_requests_at_a_time_get_what_each_gets_alone(server, pipeline):
    def answer(prompt):
        with server.client() as client:
            found = ranked(client, prompt, strategy="speculative-beam-search", **WIDE)
        return [choice.dsbd["items"] for choice in found.choices]

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = list(threads.map(answer, PROMPTS))
    for prompt, found in zip(PROMPTS, answers, strict=True):
        wanted = pipeline.generate(prompt, strategy="beam-search", constraint=TRIE, **WIDE)
        assert found == [sequence.items for sequence in wanted.sequences]
    stats = server.service.stats()
    assert stats.num_running == stats.rows_reserved == 0 and stats.num_preemptions == 0


def test_a_search_by_its_usual_names(server):
    with server.client() as client:
        plain = ranked(client, "x", strategy="speculative-beam-search", **WIDE)
        usual = ranked(client, "x", use_beam_search=True, n=50, best_of=64)
    names = [[choice.dsbd["items"] for choice in found.choices] for found in (plain, usual)]
    assert names[0] == names[1]


def test_a_stream_ends_each_choice_with_its_items(server):
    with server.client() as client:
        whole = ranked(client, "x", strategy="beam-search", **WIDE)
        chunks = client.completions.create(
            model=MODEL,
            prompt="x",
            stream=True,
            extra_body={"constraint": {"trie": "items"}, "strategy": "beam-search", **WIDE},
        )
        ends = [chunk.choices[0] for chunk in chunks if chunk.choices[0].finish_reason]
    assert [end.dsbd for end in ends] == [choice.dsbd for choice in whole.choices]


def test_an_answer_without_a_trie_tells_its_score_alone(server):
    with server.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt="x", max_tokens=3, extra_body={"ignore_eos": True}
        )
    (choice,) = answer.choices
    assert choice.dsbd["score"] == pytest.approx(choice.dsbd["logprob"] / 3)
    assert choice.dsbd["token_ids"] is None and choice.dsbd["items"] is None


REFUSED = [
    ({"num_beams": 257}, "num_beams amounts to 257, this server allows 256"),
    ({"num_beams": 65, "num_return_sequences": 65}, "num_return_sequences amounts to 65 sequences"),
    (
        {"num_beams": 4, "num_return_sequences": 5},
        "num_beams is 4, but 5 sequences are returned or tried",
    ),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_limits_are_named(server, options, said):
    with server.client() as client, pytest.raises(openai.BadRequestError, match=said):
        ranked(client, "x", strategy="beam-search", **options)


def test_what_no_cache_could_hold_is_refused(serve):
    limits = ServiceLimits(kv_bytes=600_000)
    with serve(limits, tries={"items": TRIE}, max_beams=256) as small, small.client() as client:
        rows = small.service.stats().max_rows
        with pytest.raises(openai.APIStatusError, match=rf"rows.*{rows}"):
            ranked(client, "x", strategy="beam-search", num_beams=256)
        ranked(client, "x", strategy="beam-search", num_beams=8)
