"""Predicted outputs over HTTP: the answer is the same, and usage says what it repeats."""

import pytest

from tests.openai_server.running_server import MODEL

MESSAGES = [{"role": "user", "content": "def f("}]
FIELDS = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "seed": 3}


def predicted(text):
    return {"type": "content", "content": text}


@pytest.mark.parametrize("options", [{"strategy": "speculative"}, {"num_beams": 4}, {"n": 2}])
def test_the_answer_is_the_same_and_all_tokens_are_counted(client, pipeline, options):
    plain = client.chat.completions.create(**FIELDS, extra_body=options)
    assert plain.usage.completion_tokens_details is None
    texts = [choice.message.content for choice in plain.choices]
    parts = [{"type": "text", "text": texts[0][:5]}, {"type": "text", "text": texts[0][5:]}]
    num_predicted = len(pipeline.tokenizer.encode(texts[0], add_special_tokens=False))
    for content in (texts[0], parts):
        given = {"extra_body": options, "prediction": predicted(content)}
        answer = client.chat.completions.create(**FIELDS, **given)
        assert [choice.message.content for choice in answer.choices] == texts
        details = answer.usage.completion_tokens_details
        found = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        assert sum(found) == num_predicted * len(texts) and min(found) >= 0


def test_a_wrong_prediction_is_rejected(client):
    answer = client.chat.completions.create(**FIELDS, prediction=predicted("\n\n\n"))
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == 3


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_what_the_answer_repeats_is_accepted_streamed_or_not(client, pipeline, path):
    prompt = pipeline.chat_prompt(MESSAGES) if path == "chat" else "def f("
    ids = pipeline.generate(prompt, seed=3, max_new_tokens=16).sequences[0].token_ids
    fields = FIELDS if path == "chat" else {**FIELDS, "prompt": prompt}
    create = client.chat.completions.create if path == "chat" else client.completions.create
    if path != "chat":
        del fields["messages"]
    fields = {**fields, "extra_body": {"predicted_token_ids": [*ids, 1, 1, 1]}}
    whole = create(**fields)
    *_, last = create(**fields, stream=True, stream_options={"include_usage": True})
    whole.usage.prompt_tokens_details = last.usage.prompt_tokens_details = None  # came before
    assert last.usage == whole.usage
    details = whole.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 16
    assert details.rejected_prediction_tokens == 3


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prediction": {"type": "content"}}, "prediction.content", "Field required"),
        ({"prediction": {"type": "code", "content": ""}}, "prediction.type", "'content'"),
        ({"prediction": predicted("a"), "predicted_text": "b"}, "prediction", "contradicts"),
        ({"predicted_text": "a", "predicted_token_ids": [1]}, "predicted_text", "leave out one"),
        ({"prediction": predicted("a"), "strategy": "sample"}, "prediction", "sample"),
        ({"predicted_token_ids": [-1]}, "predicted_token_ids", "expected token ids from 0"),
        ({"predicted_token_ids": [10**6]}, "predicted_token_ids", "the target's vocabulary"),
    ],
)
def test_an_invalid_prediction_is_one_line(server, fields, param, said):
    answer = server.http.post("/v1/chat/completions", json={**FIELDS, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"], error
    assert "\n" not in error["message"] and error["param"] == param


def test_an_empty_prediction_is_none(client):
    answer = client.chat.completions.create(**FIELDS, prediction=predicted(""))
    assert answer.usage.completion_tokens_details is None


@pytest.mark.parametrize(
    "fields",
    [
        {"prediction": predicted("a" * 9999)},
        {"prediction": predicted("a" * (2**17 + 1))},
        {"predicted_token_ids": [97] * (2**17 + 1)},
    ],
    ids=["text", "very long text", "token ids"],
)
def test_a_prediction_longer_than_the_context_is_cut(server, pipeline, fields):
    with_it, without = (
        server.http.post("/v1/chat/completions", json={**FIELDS, **more}).json()
        for more in (fields, {})
    )
    assert with_it["choices"][0]["message"] == without["choices"][0]["message"]
    details = with_it["usage"]["completion_tokens_details"]
    assert sum(details.values()) == pipeline.bundle.context_length
