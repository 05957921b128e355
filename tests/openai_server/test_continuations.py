"""Continuations over HTTP with tokenizers whose decoders drop the space before a text."""

from dataclasses import dataclass

import openai
import pytest
import tokenizers

from tests.continuations import ANSWER, PROMPT, answered_by, prompt_and_answer, write_bundle
from tests.openai_server.running_server import MODEL

TAGGED = {"constraint": {"trie": "answer"}}


@dataclass(frozen=True)
class Served:
    client: openai.OpenAI
    backend: tokenizers.Tokenizer
    prompt: list[int]
    answer: list[int]

    def completed(self, prompt=PROMPT, trie="answer", **fields):
        """Return the answer of a trie: one choice, or the choices of a stream."""
        found = self.client.completions.create(
            model=MODEL, prompt=prompt, extra_body={"constraint": {"trie": trie}}, **fields
        )
        chunks = found if fields.get("stream") else [found]
        return [choice for chunk in chunks for choice in chunk.choices]


@pytest.fixture(scope="module", params=["llama_2", "metaspace", "word_piece"])
def served(request, serve, tmp_path_factory):
    path = tmp_path_factory.mktemp("bundles") / request.param
    backend = write_bundle(request.param, path)
    prompt, answer = prompt_and_answer(backend)
    tries = {"answer": answered_by(answer)}
    with serve(bundle=path, tries=tries) as server, server.client() as client:
        yield Served(client, backend, prompt, answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_an_answer_and_an_echo_have_the_space(served, stream, echo):
    for prompt in (PROMPT, served.prompt):
        choices = served.completed(prompt, stream=stream, echo=echo)
        assert "".join(choice.text for choice in choices) == PROMPT * echo + ANSWER


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"echo": True}])
def test_tokens_and_offsets_have_the_space(served, fields):
    parts = [c.logprobs for c in served.completed(logprobs=3, **fields) if c.logprobs]
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    text = PROMPT + ANSWER if fields.get("echo") else ANSWER
    assert "".join(tokens) == text
    after = [served.backend.decode([*served.prompt, *served.answer[:n]]) for n in range(9)]
    ends = [len(each) - len(PROMPT) for each in after[: len(served.answer)]]
    assert [o - len(text) + len(ANSWER) for o in offsets[-len(served.answer) :]] == ends
    for part in parts:
        for token, top in zip(part.tokens, part.top_logprobs, strict=True):
            assert not token or top is None or token in top or f" {token}" in top
    assert tokens[-len(served.answer)].startswith(" ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_with_the_space(served, stream):
    choices = served.completed(stream=stream, stop=" words", echo=True)
    assert "".join(choice.text for choice in choices) == f"{PROMPT} the"


def test_a_chosen_text_is_a_choice(served):
    fields = {"guided_choice": [" the", " words"], "n": 3}
    try:
        found = served.client.completions.create(
            model=MODEL, prompt=PROMPT, seed=2, extra_body=fields
        )
    except openai.BadRequestError as error:
        assert "grammars cannot use this tokenizer" in str(error)
        return
    assert {choice.text for choice in found.choices} <= {" the", " words"}


def test_bytes_of_a_chat_have_the_space(served):
    """The first token of an answer is named as it is among the most probable."""
    found = served.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        logprobs=True,
        top_logprobs=2,
        extra_body=TAGGED,
    )
    tokens = found.choices[0].logprobs.content
    assert found.choices[0].message.content == ANSWER
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == ANSWER
    assert "".join(token.token for token in tokens) == ANSWER
