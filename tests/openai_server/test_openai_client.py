"""The official client against the server: what it gets is what the pipeline gives."""

import collections
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest

from dsbd_ort.decoding.noise import sample_seed
from tests.openai_server.running_server import MODEL
from tests.runtime.tiny_tokenizer import BOS

PROMPT, TOKENS = "def f(", 12


def test_a_completion_is_that_of_the_pipeline(client, pipeline):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, seed=5)
    wanted = pipeline.generate(PROMPT, max_new_tokens=TOKENS, seed=5)
    (choice,) = answer.choices
    assert (choice.text, choice.index) == (wanted.sequences[0].text, 0)
    assert choice.finish_reason == "length"
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage.prompt_tokens == wanted.stats.num_prompt_tokens
    assert answer.usage.completion_tokens == TOKENS
    assert answer.usage.total_tokens == wanted.stats.num_prompt_tokens + TOKENS
    report = answer.model_extra["dsbd"]
    assert (report["seed"], report["strategy"]) == (5, "dsbd")
    assert report["requests"][0]["num_output_tokens"] == TOKENS


def completed(client, stream=False, **fields):
    """Return the parts of an answer: those of a stream, or the answer alone."""
    fields = {"max_tokens": TOKENS, **fields}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, stream=stream, **fields)
    return list(answer) if stream else [answer]


def texts_of(parts):
    """Return the text of every choice."""
    texts = collections.defaultdict(str)
    for part in parts:
        for choice in part.choices:
            texts[choice.index] += choice.text
    return [texts[index] for index in sorted(texts)]


def test_a_stream_is_the_same_text(client, pipeline):
    parts = completed(client, stream=True, seed=5, stream_options={"include_usage": True})
    wanted = pipeline.generate(PROMPT, max_new_tokens=TOKENS, seed=5).sequences[0].text
    assert texts_of(parts) == [wanted]
    assert [part.choices[0].finish_reason for part in parts[:-1]][-2:] == [None, "length"]
    assert parts[-1].choices == []
    assert parts[-1].usage.completion_tokens == TOKENS
    assert parts[-2].model_extra["dsbd"]["seed"] == 5


def samples_of(pipeline, seed, number, **options):
    """Return the results of as many requests, each with a seed of its own."""
    seeds = [sample_seed(seed, index) for index in range(number)]
    return [
        pipeline.generate(PROMPT, max_new_tokens=TOKENS, seed=each, **options).sequences[0]
        for each in seeds
    ]


@pytest.mark.parametrize("strategy", ["dsbd", "sample"])
@pytest.mark.parametrize("stream", [False, True])
def test_n_are_independent_samples(client, pipeline, stream, strategy):
    options = {"strategy": strategy}
    texts = texts_of(completed(client, stream, seed=5, n=3, extra_body=options))
    wanted = [sequence.text for sequence in samples_of(pipeline, 5, 3, **options)]
    assert texts == wanted and len({*texts}) == 3
    alone = completed(client, seed=5, extra_body=options)
    assert texts_of(alone) == texts[:1]  # n = 1 is the plain request


def test_best_of_are_samples_of_which_the_best_are_returned(client, pipeline):
    options = {"strategy": "speculative"}
    found = completed(client, seed=6, n=2, best_of=4, extra_body=options)
    tried = samples_of(pipeline, 6, 4, **options)
    best = sorted(tried, key=lambda each: -each.score)[:2]
    assert best != tried[:2]  # or the test could not fail
    assert texts_of(found) == [each.text for each in best]


SEARCH = {"strategy": "beam-search", "num_beams": 4}
BEAM_SAMPLE = {"strategy": "beam-sample", "num_beams": 3, "top_k": 5}
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
OPTIONS = [  # (fields of the body, of DecodingConfig)
    ({"num_return_sequences": 3}, {"num_return_sequences": 3}),
    ({"use_beam_search": True, "n": 3}, {**SEARCH, "num_return_sequences": 3}),
    (
        {"use_beam_search": True, "n": 2, "best_of": 6},
        {**SEARCH, "num_beams": 6, "num_return_sequences": 2},
    ),
    ({"use_beam_search": True, "best_of": 2}, SEARCH),
    ({"use_beam_search": True, "best_of": 2, "num_beams": 3}, {**SEARCH, "num_beams": 3}),
    (
        {"strategy": "beam-search", "n": 2, "num_beams": 3, "length_penalty": 0.5},
        {**SEARCH, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    ),
    ({"temperature": 0}, SEARCH),
    ({"temperature": 0, "top_p": 0.95, "top_k": 20}, SEARCH),
    (BEAM_SAMPLE, BEAM_SAMPLE),
    (PENALTIES, PENALTIES),
    ({"logit_bias": {"100": 5, "97": -100}}, {"logit_bias": {100: 5, 97: -100}}),
    (
        {"repetition_penalty": 1.3, "min_p": 0.1, "min_tokens": 4},
        {"repetition_penalty": 1.3, "min_p": 0.1, "min_new_tokens": 4},
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "options"), OPTIONS, ids=str)
def test_options_are_those_of_the_pipeline(client, pipeline, fields, options, stream):
    if stream and "best_of" in fields:
        pytest.skip("the best are known at the end")
    found = completed(client, stream, seed=3, extra_body=fields)
    wanted = pipeline.generate(PROMPT, max_new_tokens=TOKENS, seed=3, **options).sequences
    assert texts_of(found) == [sequence.text for sequence in wanted]
    plain = pipeline.generate(PROMPT, max_new_tokens=TOKENS, seed=3).sequences
    assert wanted != plain, "without effect"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"strategy": "greedy"}, {"strategy": "mjgd"}], ids=str)
def test_what_draws_nothing_gives_n_copies(client, pipeline, fields, stream):
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    parts = completed(client, stream, n=3, extra_body=fields, **usage)
    wanted = pipeline.generate(PROMPT, max_new_tokens=TOKENS, **fields).sequences[0].text
    assert texts_of(parts) == [wanted] * 3
    assert parts[-1].usage.completion_tokens == 3 * TOKENS


def test_prompts_of_every_kind(client, pipeline):
    ids = pipeline.tokenizer.encode(PROMPT)
    wanted = pipeline.generate(PROMPT, max_new_tokens=4, seed=1).sequences[0].text
    for prompt, number in ((PROMPT, 1), ([PROMPT, PROMPT], 2), (ids, 1), ([ids, ids], 2)):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, seed=1)
        assert [choice.text for choice in answer.choices] == [wanted] * number
        assert [choice.index for choice in answer.choices] == list(range(number))


def test_a_stop_text_ends_and_is_cut(client, pipeline):
    options = {"strategy": "speculative", "seed": 5, "top_k": 4}
    plain = pipeline.generate(PROMPT, max_new_tokens=TOKENS, **options).sequences[0].text
    stop = next(character for character in plain[3:] if character.isascii())
    for stream in (False, True):
        parts = completed(client, stream, stop=[stop], extra_body=options)
        assert texts_of(parts) == [plain[: plain.index(stop)]]
        assert parts[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_that_is_a_special_token_ends_as_its_id_does(client, pipeline, stream):
    stop, letter = pipeline.tokenizer.encode(f"{BOS}o", add_special_tokens=False)
    likely = {"logit_bias": {str(stop): 30, str(letter): 30}, "ignore_eos": True, "num_beams": 2}
    messages = [{"role": "user", "content": "né"}]

    def ended_by(**ends):
        common = {"model": MODEL, "max_tokens": TOKENS, "seed": 3, "stream": stream}
        common["extra_body"] = {**likely, **ends}
        chat = client.chat.completions.create(messages=messages, **common)
        chat = [c for part in (chat if stream else [chat]) for c in part.choices]
        parts = [c.delta if stream else c.message for c in chat]
        text = client.completions.create(prompt=PROMPT, **common)
        text = [c for part in (text if stream else [text]) for c in part.choices]
        assert [c.finish_reason for c in (chat[-1], text[-1])] == ["stop", "stop"]
        return "".join(part.content or "" for part in parts), "".join(c.text for c in text)

    assert ended_by(stop=[BOS]) == ended_by(stop_token_ids=[stop]) != ("", "")


def test_without_a_seed_the_answer_names_one(client):
    (first,), (other,) = completed(client), completed(client)
    seed = first.model_extra["dsbd"]["seed"]
    (again,) = completed(client, seed=seed)
    assert again.choices[0].text == first.choices[0].text
    assert again.system_fingerprint == first.system_fingerprint
    assert other.model_extra["dsbd"]["seed"] != seed


PARTS = [{"type": "text", "text": "He"}, {"type": "text", "text": "y"}]


def test_chat_fills_the_template(client, pipeline):
    system = {"role": "system", "content": "Be brief."}
    prompt = pipeline.chat_prompt([system, {"role": "user", "content": "He\ny"}])
    text = pipeline.generate(prompt, max_new_tokens=TOKENS, seed=5).sequences[0].text
    messages = [system, {"role": "user", "content": PARTS}]
    assert pipeline.chat_prompt(messages) == prompt
    asked = {"model": MODEL, "messages": messages, "seed": 5}
    answer = client.chat.completions.create(**asked, max_completion_tokens=TOKENS)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert choice.finish_reason == "length"
    parts = list(client.chat.completions.create(**asked, max_tokens=TOKENS, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert parts[-1].choices[0].finish_reason == "length"


def test_models(client):
    (model,) = client.models.list()
    assert (model.id, model.model_extra["max_model_len"]) == (MODEL, 2048)
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="unknown model 'other'"):
        client.models.retrieve("other")


def test_errors_are_the_clients_exceptions(client):
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as refused:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=-1)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt="x" * 2100)
    assert too_long.value.code == "context_length_exceeded"
    assert too_long.value.body["message"].startswith(
        "the prompt is too long: this model's maximum context length is 2048 tokens, the prompt "
        "has 2100"
    )


def test_a_bundle_without_a_chat_template_says_so(serve, tiny_bundle):
    with serve(bundle=tiny_bundle.path) as plain, plain.client() as client:
        with pytest.raises(openai.BadRequestError, match="no usable chat template") as refused:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
        assert str(tiny_bundle.path) not in str(refused.value)


def test_the_clients_url_has_no_other_spelling(server):
    with pytest.raises(openai.NotFoundError):
        openai.OpenAI(base_url=f"{server.url}//v1", api_key="x", max_retries=0).models.list()


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


@pytest.mark.parametrize("num_clients", [1, 8])
def test_fifty_prompts_alone_or_with_others_get_the_tokens_of_the_pipeline(
    server, pipeline, num_clients
):
    with (
        httpx2.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(num_clients) as threads,
    ):
        answers = list(threads.map(lambda body: http.post("/v1/completions", json=body), BODIES))
    for body, answer in zip(BODIES, answers, strict=True):
        assert answer.status_code == 200, answer.text
        options = {name: body[name] for name in body if name not in ("model", "prompt", "logprobs")}
        options["max_new_tokens"] = options.pop("max_tokens")
        wanted = pipeline.generate(body["prompt"], **options).sequences
        for choice, sequence in zip(answer.json()["choices"], wanted, strict=True):
            assert choice["text"] == sequence.text
            logprobs = choice["logprobs"]["token_logprobs"]
            assert logprobs == pytest.approx(sequence.token_logprobs, abs=1e-5)
