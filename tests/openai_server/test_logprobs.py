"""Log-probabilities over HTTP: of new tokens, of the most probable ones, of an echoed prompt."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from dsbd_ort import Pipeline
from tests.openai_server.running_server import MODEL
from tests.runtime.tiny_tokenizer import BOS, EOS

PROMPT, TOKENS, NUMBER = "def f(x):", 10, 3
STRATEGIES: list[dict[str, Any]] = [
    {},
    {"strategy": "speculative", "top_k": 4},
    {"strategy": "speculative-beam-search"},
]


def wanted_of(pipeline: Pipeline, prompt: Any = PROMPT, **options: Any) -> Any:
    defaults = {"max_new_tokens": TOKENS, "seed": 5, "top_logprobs": NUMBER}
    return pipeline.generate(prompt, **{**defaults, **options})


def check_tops(found: list[Any], wanted: list[Any], pipeline: Pipeline) -> None:
    """The tiny tokenizer has a token a byte: those of ASCII are spelled as themselves."""
    for dictionary, top in zip(found, wanted, strict=True):
        assert NUMBER <= len(dictionary) <= NUMBER + 1
        assert sorted(dictionary.values(), reverse=True)[: len(top)] == pytest.approx(
            [logprob for _, logprob in top], abs=1e-5
        )
        for token, logprob in top:
            text = pipeline.tokenizer.decode((token,))
            if text.isascii() and text:
                assert dictionary[text] == pytest.approx(logprob, abs=1e-5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_completions_return_the_most_probable_tokens(
    client: openai.OpenAI, pipeline: Pipeline, options: dict[str, Any], stream: bool
) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=TOKENS,
        seed=5,
        logprobs=NUMBER,
        stream=stream,
        extra_body=options,
    )
    best = wanted_of(pipeline, **options).sequences[0]
    parts = [c.logprobs for p in (answer if stream else [answer]) for c in p.choices if c.logprobs]
    logprobs = [each for part in parts for each in part.token_logprobs]
    assert logprobs == pytest.approx(best.token_logprobs, abs=1e-6)
    check_tops([top for part in parts for top in part.top_logprobs], best.top_logprobs, pipeline)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_return_the_most_probable_tokens(
    client: openai.OpenAI, pipeline: Pipeline, stream: bool
) -> None:
    messages: Any = [{"role": "user", "content": "Hey"}]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=TOKENS,
        seed=5,
        logprobs=True,
        top_logprobs=NUMBER,
        stream=stream,
    )
    best = wanted_of(pipeline, pipeline.chat_prompt(messages)).sequences[0]
    parts = [c.logprobs for p in (answer if stream else [answer]) for c in p.choices if c.logprobs]
    content = [token for part in parts for token in part.content]
    assert [token.logprob for token in content] == pytest.approx(best.token_logprobs, abs=1e-6)
    for token, top in zip(content, best.top_logprobs, strict=True):
        assert [each.logprob for each in token.top_logprobs] == pytest.approx(
            [logprob for _, logprob in top], abs=1e-5
        )


def bytes_by_id(pipeline: Pipeline) -> dict[int, bytes]:
    """The tiny tokenizer has a token a byte; bytes that no text has are left out."""
    found = {pipeline.tokenizer.encode(each)[0]: each.encode() for each in (BOS, EOS)}
    for character in map(chr, (*range(0x800), *range(0x800, 0xD800, 64), 0xE000, 0xF000)):
        ids = pipeline.tokenizer.encode(character, add_special_tokens=False)
        found |= {i: bytes([b]) for i, b in zip(ids, character.encode(), strict=True)}
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_are_the_tokens_own_and_the_chosen_is_among_the_most_probable(
    client: openai.OpenAI, pipeline: Pipeline, stream: bool
) -> None:
    """Most bytes here are parts of characters, or of none."""
    messages: Any = [{"role": "user", "content": "Hey"}]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=3 * TOKENS,
        logprobs=True,
        top_logprobs=NUMBER,
        stream=stream,
        extra_body={"ignore_eos": True, "strategy": "greedy"},
    )
    options = {"strategy": "greedy", "max_new_tokens": 3 * TOKENS, "eos_token_id": ()}
    best = wanted_of(pipeline, pipeline.chat_prompt(messages), **options).sequences[0]
    parts = [c.logprobs for p in (answer if stream else [answer]) for c in p.choices if c.logprobs]
    content = [token for part in parts for token in part.content]
    own = bytes_by_id(pipeline)
    for token_id, token, top in zip(best.token_ids, content, best.top_logprobs, strict=True):
        assert bytes(token.bytes) == own.get(token_id, bytes(token.bytes)) != b""
        for (alternative, _), each in zip(top, token.top_logprobs, strict=True):
            assert bytes(each.bytes) == own.get(alternative, bytes(each.bytes)) != b""
        assert (token.token, token.bytes) in [(t.token, t.bytes) for t in token.top_logprobs]
    assert any(not bytes(token.bytes).isascii() for token in content)
    joined = b"".join(bytes(token.bytes) for token in content)
    assert joined.decode(errors="replace") == best.text


@pytest.mark.parametrize("number", [0, NUMBER])
def test_an_echoed_prompt_has_its_log_probabilities(
    client: openai.OpenAI, pipeline: Pipeline, number: int
) -> None:
    """Twice: the second finds the prompt's rows in the cache, which have no logits any more."""
    result = wanted_of(pipeline, prompt_logprobs=True)
    scored, best = result.prompt_logprobs, result.sequences[0]
    ids = pipeline.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, ids, PROMPT):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=TOKENS, seed=5, logprobs=number, echo=True
        )
        (choice,) = answer.choices
        assert choice.text == PROMPT + best.text and choice.logprobs is not None
        first, *logprobs = choice.logprobs.token_logprobs
        wanted = [*scored.token_logprobs[1:], *best.token_logprobs]
        assert first is None and logprobs == pytest.approx(wanted, abs=1e-5)
        text = "".join(choice.logprobs.tokens)
        assert text == choice.text
        assert choice.logprobs.text_offset[: len(ids)] == list(range(len(ids)))
        if number:
            first_top, *tops = choice.logprobs.top_logprobs
            assert first_top is None
            check_tops(tops, [*scored.top_logprobs[1:], *best.top_logprobs], pipeline)
        else:
            assert choice.logprobs.top_logprobs is None
        assert answer.usage.completion_tokens == TOKENS  # type: ignore[union-attr]


def test_a_harness_can_tell_what_greedy_decoding_would_take(
    client: openai.OpenAI, pipeline: Pipeline
) -> None:
    """lm-eval compares a token's log-probability with the largest of its top_logprobs."""
    ids = pipeline.tokenizer.encode(PROMPT)
    greedy = pipeline.generate(ids, strategy="greedy", max_new_tokens=6).sequences[0].token_ids
    answer = client.completions.create(
        model=MODEL, prompt=[[*ids, *greedy]], max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    found = answer.choices[0].logprobs
    assert found is not None
    for logprob, top in zip(found.token_logprobs[-7:-1], found.top_logprobs[-7:-1], strict=True):
        assert logprob == max(top.values())
    assert any(
        logprob != max(top.values())
        for logprob, top in zip(found.token_logprobs[1:-7], found.top_logprobs[1:-7], strict=True)
    )


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_new_tokens_with_echo(client: openai.OpenAI, stream: bool, name: str) -> None:
    fields: dict[str, Any] = {} if stream else {"logprobs": 1}
    answer = client.completions.create(
        model=MODEL, prompt=[PROMPT, "x"], echo=True, stream=stream, extra_body={name: 0}, **fields
    )
    texts, reasons = ["", ""], []
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            reasons.append(choice.finish_reason)
            if not stream:
                assert len(choice.logprobs.tokens) == len(choice.text)
    assert texts == [PROMPT, "x"] and [each for each in reasons if each] == ["length"] * 2
    if not stream:
        assert answer.usage.completion_tokens == 0


def test_an_echo_streams_and_precedes_every_sample(
    client: openai.OpenAI, pipeline: Pipeline
) -> None:
    plain = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, seed=5, n=2)
    texts = ["", ""]
    for part in client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, seed=5, n=2, echo=True, stream=True
    ):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [PROMPT + choice.text for choice in plain.choices]
    scored = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, seed=5, n=2, echo=True, logprobs=0
    )
    prompts = [choice.logprobs.token_logprobs[:-4] for choice in scored.choices]
    assert prompts[0] == prompts[1] and len(prompts[0]) == len(pipeline.tokenizer.encode(PROMPT))
