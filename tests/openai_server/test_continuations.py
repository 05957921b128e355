"""Texts of single tokens, and continuations with decoders that drop the space before a text."""

from dataclasses import dataclass

import numpy as np
import openai
import pytest
import tokenizers

from dsbd_ort.openai_server.responses import TokenTexts
from dsbd_runtime.text.stream_decoder import REPLACEMENT, TextWindow
from tests.continuations import ANSWER, PROMPT, answered_by, prompt_and_answer, write_bundle
from tests.openai_server.running_server import MODEL
from tests.runtime.tokenizer_kinds import TEXTS

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


def pushed(tokenizer, groups):
    """The pieces of every push and of the end, each a list of texts."""
    texts, logprob, pieces = TokenTexts(TextWindow(tokenizer)), 0.0, []
    for group in groups:
        logprobs = [logprob - index for index in range(len(group))]
        logprob -= len(group)
        pieces.append(texts.push(group, logprobs))
    pieces.append(texts.finish())
    found = [each.logprob for piece in pieces if piece for each in piece.tokens]
    assert found == [-float(index) for index in range(len(found))]
    return [list(piece.texts) if piece else [] for piece in pieces]


def test_texts_of_tokens_are_the_text(any_tokenizer):
    tokenizer = any_tokenizer
    rng = np.random.default_rng(0)
    random_ids = [rng.integers(0, tokenizer.vocab_size + 1, 30).tolist() for _ in range(20)]
    for ids in (*map(tokenizer.encode, TEXTS), *random_ids):
        for groups in ([[i] for i in ids], [ids], [ids[:3], ids[3:]]):
            texts = [text for piece in pushed(tokenizer, groups) for text in piece]
            assert "".join(texts) == tokenizer.decode(ids) and len(texts) == len(ids)


def test_a_character_belongs_to_the_token_that_completes_it(llama_2):
    ids = llama_2.encode("aé😀 b")
    texts = [text for piece in pushed(llama_2, [ids]) for text in piece]
    assert texts == ["a", "é", "", "", "", "😀", " b"]


def test_tokens_of_a_run_of_bytes_wait_for_its_end(llama_2):
    a, _, *emoji, b = llama_2.encode("aé😀 b")
    assert pushed(llama_2, [[a], emoji, [b]]) == [["a"], [], ["", "", "", "😀", " b"], []]
    assert pushed(llama_2, [[a], emoji]) == [["a"], [], ["", "", "", "😀"]]
    assert pushed(llama_2, [emoji[:2], [b]]) == [[], [REPLACEMENT, REPLACEMENT, " b"], []]
    assert pushed(llama_2, [emoji[:2]]) == [[], [REPLACEMENT, REPLACEMENT]]
    assert pushed(llama_2, [emoji[:2], emoji]) == [[], [REPLACEMENT] * 6, []]
