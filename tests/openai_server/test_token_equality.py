"""Through the server, alone or with others, a request gets the tokens that it gets alone."""

from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.openai_server.running_server import MODEL

STRATEGIES = (
    {},
    {"strategy": "dsbd", "num_beams": 2, "width_policy": "fixed"},
    {"strategy": "speculative", "draft_length": 3},
    {"strategy": "beam-sample", "num_beams": 3, "top_k": 20},
    {"strategy": "speculative-beam-search", "num_beams": 3},
)
BODIES = [
    {
        "model": MODEL,
        "prompt": f"def f_{number}(" + "x, " * (number % 7),
        "seed": number,
        "max_tokens": 6 + number % 5,
        "logprobs": 0,
        **STRATEGIES[number % len(STRATEGIES)],
    }
    for number in range(50)
]


def texts_and_logprobs(answer):
    return [(each["text"], each["logprobs"]["token_logprobs"]) for each in answer["choices"]]


@pytest.fixture(scope="module")
def alone(pipeline):
    wanted = []
    for body in BODIES:
        options = {name: body[name] for name in body if name not in ("model", "prompt", "logprobs")}
        options["max_new_tokens"] = options.pop("max_tokens")
        result = pipeline.generate(body["prompt"], **options)
        wanted.append([(each.text, each.token_logprobs) for each in result.sequences])
    return wanted


@pytest.mark.parametrize("num_clients", [1, 8])
def test_fifty_prompts(server, alone, num_clients):
    with (
        httpx2.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(num_clients) as threads,
    ):
        answers = list(threads.map(lambda body: http.post("/v1/completions", json=body), BODIES))
    for answer, wanted in zip(answers, alone, strict=True):
        assert answer.status_code == 200, answer.text
        for (text, logprobs), (own_text, own_logprobs) in zip(
            texts_and_logprobs(answer.json()), wanted, strict=True
        ):
            assert text == own_text
            assert logprobs == pytest.approx(own_logprobs, abs=1e-5)
