"""The official client against the server: what it gets is what the pipeline gives."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from dsbd_ort import Pipeline
from dsbd_ort.decoding.noise import sample_seed
from tests.openai_server.running_server import MODEL, RunningServer

PROMPT, TOKENS = "def f(", 12


def test_a_completion_is_that_of_the_pipeline(client: openai.OpenAI, pipeline: Pipeline) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, seed=5)
    wanted = pipeline.generate(PROMPT, max_new_tokens=TOKENS, seed=5)
    (choice,) = answer.choices
    assert (choice.text, choice.index) == (wanted.sequences[0].text, 0)
    assert choice.finish_reason == "length"
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == wanted.stats.num_prompt_tokens
    assert answer.usage.completion_tokens == TOKENS
    assert answer.usage.total_tokens == wanted.stats.num_prompt_tokens + TOKENS
    report = answer.model_extra["dsbd"]  # type: ignore[index]
    assert (report["seed"], report["strategy"]) == (5, "dsbd")
    assert report["requests"][0]["num_output_tokens"] == TOKENS


def test_a_stream_is_the_same_text(client: openai.OpenAI, pipeline: Pipeline) -> None:
    parts = list(
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=TOKENS,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    wanted = pipeline.generate(PROMPT, max_new_tokens=TOKENS, seed=5).sequences[0].text
    assert "".join(part.choices[0].text for part in parts[:-1]) == wanted
    assert [part.choices[0].finish_reason for part in parts[:-1]][-2:] == [None, "length"]
    assert parts[-1].choices == [] and parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == TOKENS
    assert parts[-2].model_extra["dsbd"]["seed"] == 5  # type: ignore[index]


def texts_of(answer: Any, stream: bool, number: int) -> list[str]:
    """The text of every choice."""
    texts = [""] * number
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    return texts


@pytest.mark.parametrize("strategy", ["dsbd", "sample"])
@pytest.mark.parametrize("stream", [False, True])
def test_n_are_independent_samples(
    client: openai.OpenAI, pipeline: Pipeline, stream: bool, strategy: str
) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=TOKENS,
        seed=5,
        n=3,
        stream=stream,
        extra_body={"strategy": strategy},
    )
    wanted = [
        pipeline.generate(
            PROMPT, strategy=strategy, max_new_tokens=TOKENS, seed=sample_seed(5, index)
        )
        for index in range(3)
    ]
    texts = texts_of(answer, stream, 3)
    assert texts == [result.sequences[0].text for result in wanted] and len({*texts}) == 3
    alone = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=TOKENS, seed=5, extra_body={"strategy": strategy}
    )
    assert texts[0] == alone.choices[0].text  # n = 1 is the plain request


BEAMS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # (fields of the body, of DecodingConfig)
    ({"num_return_sequences": 3}, {"num_return_sequences": 3}),
    (
        {"use_beam_search": True, "n": 3},
        {"strategy": "beam-search", "num_beams": 4, "num_return_sequences": 3},
    ),
    (
        {"use_beam_search": True, "n": 2, "best_of": 6},
        {"strategy": "beam-search", "num_beams": 6, "num_return_sequences": 2},
    ),
    (
        {"use_beam_search": True, "best_of": 2},
        {"strategy": "beam-search", "num_beams": 4, "num_return_sequences": 1},
    ),
    (
        {"use_beam_search": True, "best_of": 2, "num_beams": 3},
        {"strategy": "beam-search", "num_beams": 3, "num_return_sequences": 1},
    ),
    (
        {"strategy": "beam-search", "n": 2, "num_beams": 3, "length_penalty": 0.5},
        {
            "strategy": "beam-search",
            "num_beams": 3,
            "num_return_sequences": 2,
            "length_penalty": 0.5,
        },
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "options"), BEAMS, ids=str)
def test_beams_are_asked_for_by_name_and_n_counts_those_of_a_search(
    client: openai.OpenAI,
    pipeline: Pipeline,
    fields: dict[str, Any],
    options: dict[str, Any],
    stream: bool,
) -> None:
    if stream and "best_of" in fields:
        pytest.skip("the best are known at the end")
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=TOKENS, seed=5, stream=stream, extra_body=fields
    )
    wanted = pipeline.generate(PROMPT, max_new_tokens=TOKENS, seed=5, **options)
    texts = [sequence.text for sequence in wanted.sequences]
    assert texts_of(answer, stream, len(texts)) == texts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"strategy": "greedy"}, {"strategy": "mjgd"}], ids=str)
def test_what_draws_nothing_gives_n_copies(
    client: openai.OpenAI, pipeline: Pipeline, fields: dict[str, Any], stream: bool
) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=TOKENS,
        n=3,
        stream=stream,
        stream_options={"include_usage": True} if stream else openai.omit,
        extra_body=fields,
    )
    parts = list(answer) if stream else [answer]
    wanted = pipeline.generate(PROMPT, max_new_tokens=TOKENS, **fields).sequences[0].text
    assert texts_of(parts, True, 3) == [wanted] * 3
    assert parts[-1].usage.completion_tokens == 3 * TOKENS


def test_best_of_are_samples_of_which_the_best_are_returned(
    client: openai.OpenAI, pipeline: Pipeline
) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=TOKENS,
        seed=6,
        n=2,
        best_of=4,
        extra_body={"strategy": "speculative"},
    )
    tried = [
        pipeline.generate(
            PROMPT, strategy="speculative", max_new_tokens=TOKENS, seed=sample_seed(6, i)
        )
        for i in range(4)
    ]
    best = sorted((each.sequences[0] for each in tried), key=lambda each: -each.score)[:2]
    assert best != [each.sequences[0] for each in tried[:2]]  # or the test could not fail
    assert [choice.text for choice in answer.choices] == [each.text for each in best]


def test_prompts_of_every_kind(client: openai.OpenAI, pipeline: Pipeline) -> None:
    ids = pipeline.tokenizer.encode(PROMPT)
    wanted = pipeline.generate(PROMPT, max_new_tokens=4, seed=1).sequences[0].text
    for prompt, number in ((PROMPT, 1), ([PROMPT, PROMPT], 2), (ids, 1), ([ids, ids], 2)):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, seed=1)
        assert [choice.text for choice in answer.choices] == [wanted] * number
        assert [choice.index for choice in answer.choices] == list(range(number))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_tokens(
    client: openai.OpenAI, pipeline: Pipeline, stream: bool
) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=TOKENS, seed=5, logprobs=0, stream=stream
    )
    wanted = pipeline.generate(PROMPT, max_new_tokens=TOKENS, seed=5).sequences[0]
    text, tokens, logprobs, offsets = "", [], [], []
    for part in answer if stream else [answer]:
        for choice in part.choices:
            text += choice.text
            if choice.logprobs:
                tokens += choice.logprobs.tokens
                logprobs += choice.logprobs.token_logprobs
                offsets += choice.logprobs.text_offset
    assert logprobs == pytest.approx(wanted.token_logprobs, abs=1e-6)
    assert text.startswith("".join(tokens)) and len(tokens) == TOKENS
    assert all(text[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True))


def test_a_stop_text_ends_and_is_cut(client: openai.OpenAI, pipeline: Pipeline) -> None:
    options = {"strategy": "speculative", "seed": 5, "top_k": 4}
    plain = pipeline.generate(PROMPT, max_new_tokens=TOKENS, **options).sequences[0].text
    stop = next(character for character in plain[3:] if character.isascii())
    for stream in (False, True):
        answer = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=TOKENS,
            stop=[stop],
            stream=stream,
            extra_body=options,
        )
        parts = list(answer) if stream else [answer]
        assert "".join(part.choices[0].text for part in parts) == plain[: plain.index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"


def test_temperature_0_is_the_search_of_the_same_width(
    client: openai.OpenAI, pipeline: Pipeline
) -> None:
    for fields in ({}, {"top_p": 0.95, "extra_body": {"top_k": 20}}):
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=TOKENS, temperature=0, **fields
        )
        wanted = pipeline.generate(
            PROMPT, strategy="beam-search", num_beams=4, max_new_tokens=TOKENS
        )
        assert answer.choices[0].text == wanted.sequences[0].text


def test_without_a_seed_the_answer_names_one(client: openai.OpenAI) -> None:
    first = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=TOKENS)
    seed = first.model_extra["dsbd"]["seed"]  # type: ignore[index]
    again = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, seed=seed)
    other = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=TOKENS)
    assert again.choices[0].text == first.choices[0].text
    assert again.system_fingerprint == first.system_fingerprint
    assert other.model_extra["dsbd"]["seed"] != seed  # type: ignore[index]


def test_options_come_as_extra_body(client: openai.OpenAI, pipeline: Pipeline) -> None:
    options = {"strategy": "beam-sample", "num_beams": 3, "top_k": 5, "max_new_tokens": 6}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, seed=2, extra_body=options)
    wanted = pipeline.generate(PROMPT, seed=2, **options)
    assert answer.choices[0].text == wanted.sequences[0].text
    assert answer.model_extra["dsbd"]["requests"][0]["num_draft_tokens"] == 0  # type: ignore[index]


PENALTIES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # (fields of OpenAI, of vLLM, of DecodingConfig)
    (
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    ),
    ({"logit_bias": {"100": 5, "97": -100}}, {}, {"logit_bias": {100: 5, 97: -100}}),
    (
        {},
        {"repetition_penalty": 1.3, "min_p": 0.1, "min_tokens": 4},
        {"repetition_penalty": 1.3, "min_p": 0.1, "min_new_tokens": 4},
    ),
]


@pytest.mark.parametrize(("fields", "extra", "options"), PENALTIES)
def test_penalties_and_biases_are_those_of_the_pipeline(
    client: openai.OpenAI,
    pipeline: Pipeline,
    fields: dict[str, Any],
    extra: dict[str, Any],
    options: dict[str, Any],
) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=TOKENS, seed=3, extra_body=extra, **fields
    )
    wanted = pipeline.generate(PROMPT, max_new_tokens=TOKENS, seed=3, **options)
    assert answer.choices[0].text == wanted.sequences[0].text
    plain = pipeline.generate(PROMPT, max_new_tokens=TOKENS, seed=3)
    assert wanted.sequences[0].token_ids != plain.sequences[0].token_ids, "without effect"


def test_chat_fills_the_template(client: openai.OpenAI, pipeline: Pipeline) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "y"}],
        },
    ]
    plain = [messages[0], {"role": "user", "content": "Hey"}]
    wanted = pipeline.generate(pipeline.chat_prompt(plain), max_new_tokens=TOKENS, seed=5)
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=TOKENS, seed=5, logprobs=True
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == wanted.sequences[0].text
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    found = [token.logprob for token in choice.logprobs.content]
    assert found == pytest.approx(wanted.sequences[0].token_logprobs, abs=1e-6)


def test_chat_streams(client: openai.OpenAI, pipeline: Pipeline) -> None:
    messages = [{"role": "user", "content": "Hey"}]
    wanted = pipeline.generate(pipeline.chat_prompt(messages), max_new_tokens=TOKENS, seed=5)
    parts = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=TOKENS, seed=5, stream=True
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == wanted.sequences[0].text
    assert parts[-1].choices[0].finish_reason == "length"


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.model_extra["max_model_len"]) == (MODEL, 2048)  # type: ignore[index]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="unknown model 'other'"):
        client.models.retrieve("other")


def test_errors_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as refused:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=-1)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt="x" * 2100)
    assert too_long.value.code == "context_length_exceeded"


def test_a_bundle_without_a_chat_template_says_so(serve, tiny_bundle) -> None:
    with serve(bundle=tiny_bundle.path) as plain, plain.client() as client:
        with pytest.raises(openai.BadRequestError, match="no usable chat template") as refused:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
        assert str(tiny_bundle.path) not in str(refused.value)


def test_the_clients_url_has_no_other_spelling(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError):
        openai.OpenAI(base_url=f"{server.url}//v1", api_key="x", max_retries=0).models.list()
