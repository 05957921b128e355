"""Log-probabilities over HTTP: of new tokens, of the most probable ones, of an echoed prompt."""

import pytest

from tests.openai_server.running_server import MODEL
from tests.runtime.tiny_tokenizer import BOS, EOS

PROMPT, TOKENS, NUMBER = "def f(x):", 10, 3
STRATEGIES = [
    {},
    {"strategy": "speculative", "top_k": 4},
    {"strategy": "speculative-beam-search"},
]


def wanted_of(pipeline, prompt=PROMPT, **options):
    defaults = {"max_new_tokens": TOKENS, "seed": 5, "top_logprobs": NUMBER}
    return pipeline.generate(prompt, **{**defaults, **options})


def check_tops(found, wanted, pipeline):
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


def scored(answer, stream):
    """Return what the parts of an answer say of their tokens."""
    parts = answer if stream else [answer]
    return [choice.logprobs for part in parts for choice in part.choices if choice.logprobs]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_completions_return_the_most_probable_tokens(client, pipeline, options, stream):
    asked = {"prompt": PROMPT, "max_tokens": TOKENS, "seed": 5, "extra_body": options}
    best = wanted_of(pipeline, **options).sequences[0]
    for number in (0, NUMBER):
        answer = client.completions.create(model=MODEL, logprobs=number, stream=stream, **asked)
        parts = scored(answer, stream)
        logprobs = [each for part in parts for each in part.token_logprobs]
        assert logprobs == pytest.approx(best.token_logprobs, abs=1e-6)
        tokens = [token for part in parts for token in part.tokens]
        offsets = [offset for part in parts for offset in part.text_offset]
        assert best.text.startswith("".join(tokens)) and len(tokens) == len(best.token_ids)
        for offset, token in zip(offsets, tokens, strict=True):
            assert best.text[offset:].startswith(token)
    check_tops([top for part in parts for top in part.top_logprobs], best.top_logprobs, pipeline)


def bytes_by_id(pipeline):
    """The tiny tokenizer has a token a byte; bytes that no text has are left out."""
    found = {pipeline.tokenizer.encode(each)[0]: each.encode() for each in (BOS, EOS)}
    for character in map(chr, (*range(0x800), *range(0x800, 0xD800, 64), 0xE000, 0xF000)):
        ids = pipeline.tokenizer.encode(character, add_special_tokens=False)
        found |= {i: bytes([b]) for i, b in zip(ids, character.encode(), strict=True)}
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strategy", ["greedy", "dsbd"])
def test_chats_return_the_most_probable_tokens_and_their_bytes(client, pipeline, stream, strategy):
    """Most bytes here are parts of characters, or of none."""
    messages = [{"role": "user", "content": "Hey"}]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=3 * TOKENS,
        seed=5,
        logprobs=True,
        top_logprobs=NUMBER,
        stream=stream,
        extra_body={"ignore_eos": True, "strategy": strategy},
    )
    options = {"strategy": strategy, "max_new_tokens": 3 * TOKENS, "eos_token_id": ()}
    best = wanted_of(pipeline, pipeline.chat_prompt(messages), **options).sequences[0]
    content = [token for part in scored(answer, stream) for token in part.content]
    assert [token.logprob for token in content] == pytest.approx(best.token_logprobs, abs=1e-6)
    own = bytes_by_id(pipeline)
    for token_id, token, top in zip(best.token_ids, content, best.top_logprobs, strict=True):
        assert bytes(token.bytes) == own.get(token_id, bytes(token.bytes)) != b""
        for (alternative, logprob), each in zip(top, token.top_logprobs, strict=True):
            assert each.logprob == pytest.approx(logprob, abs=1e-5)
            assert bytes(each.bytes) == own.get(alternative, bytes(each.bytes)) != b""
        tops = [(each.token, each.bytes) for each in token.top_logprobs]
        assert strategy != "greedy" or (token.token, token.bytes) in tops
    assert any(not bytes(token.bytes).isascii() for token in content)
    joined = b"".join(bytes(token.bytes) for token in content)
    assert joined.decode(errors="replace") == best.text


@pytest.mark.parametrize("number", [0, NUMBER])
def test_an_echoed_prompt_has_its_log_probabilities(client, pipeline, number):
    """Twice: the second finds the prompt's rows in the cache, which have no logits any more."""
    result = wanted_of(pipeline, prompt_logprobs=True)
    scored, best = result.prompt_logprobs, result.sequences[0]
    ids = pipeline.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, ids, PROMPT):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=TOKENS, seed=5, logprobs=number, echo=True
        )
        (choice,) = answer.choices
        assert choice.text == PROMPT + best.text
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
        assert answer.usage.completion_tokens == TOKENS


def test_a_harness_can_tell_what_greedy_decoding_would_take(client, pipeline):
    """lm-eval compares a token's log-probability with the largest of its top_logprobs."""
    ids = pipeline.tokenizer.encode(PROMPT)
    greedy = pipeline.generate(ids, strategy="greedy", max_new_tokens=6).sequences[0].token_ids
    answer = client.completions.create(
        model=MODEL, prompt=[[*ids, *greedy]], max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    found = answer.choices[0].logprobs
    for logprob, top in zip(found.token_logprobs[-7:-1], found.top_logprobs[-7:-1], strict=True):
        assert logprob == max(top.values())
    assert any(
        logprob != max(top.values())
        for logprob, top in zip(found.token_logprobs[1:-7], found.top_logprobs[1:-7], strict=True)
    )


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_new_tokens_with_echo(client, stream, name):
    fields = {} if stream else {"logprobs": 1}
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


def test_an_echo_streams_and_precedes_every_sample(client, pipeline):
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
