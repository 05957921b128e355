"""Translation between languages that are tokens, in Python, on the command line and over HTTP.

Token ids of a source are checked before an engine is called, whichever way the source arrives.
"""

from queue import SimpleQueue

import numpy as np
import pytest

import dsbd_ort
from dsbd_errors import DsbdError
from dsbd_ort.cli import run
from dsbd_ort.embedding.calls import answer
from dsbd_ort.engine import Service
from dsbd_ort.openai_server.errors import ErrorBody
from dsbd_runtime.errors import InputError
from tests.commands.calls import answered, assert_one_line_error, called
from tests.encoder_decoder_pair import LANGUAGES, exported_translator
from tests.made_once import made_once
from tests.openai_server.running_server import MODEL, running_server

TEXT = "def read"


@pytest.fixture(scope="session")
def bundle(captures, tmp_path_factory):
    def exported(folder):
        return exported_translator(None, captures, folder) / "bundle"

    return made_once(tmp_path_factory, "translation", exported)


@pytest.fixture(scope="session")
def pipe(bundle):
    with dsbd_ort.Pipeline.from_bundle(bundle, num_threads=1) as opened:
        yield opened


def test_the_manifest_has_the_languages(pipe):
    assert pipe.bundle.manifest.target.encoder.languages == LANGUAGES


def test_languages_are_tokens_of_source_and_target(pipe):
    tokens = pipe.tokenizer.encode(TEXT)
    assert (tokens[0], tokens[-1]) == (290, 1)
    for source in LANGUAGES:
        for target in LANGUAGES:
            ids = [LANGUAGES[source], *tokens[1:]]
            wanted = pipe.generate(source=ids, forced_bos_token_id=LANGUAGES[target])
            found = pipe.translate(TEXT, src_lang=source, tgt_lang=target)
            assert found.sequences[0].token_ids == wanted.sequences[0].token_ids
            assert found.sequences[0].token_ids[0] == LANGUAGES[target]
            assert found.stats.num_output_tokens <= 8
    plain = pipe.translate(TEXT).sequences[0]
    assert plain.token_ids == pipe.generate(TEXT).sequences[0].token_ids


def test_a_source_is_drafted_by_n_grams_without_a_draft(pipe):
    wanted = pipe.translate(TEXT, num_return_sequences=3)
    found = pipe.translate(TEXT, num_return_sequences=3, drafter="ngram", draft_length=3)
    for ours, plain in zip(found.sequences, wanted.sequences, strict=True):
        assert ours.token_ids == plain.token_ids
        assert ours.score == pytest.approx(plain.score, abs=1e-4)
    assert found.stats.num_draft_tokens > 0
    assert pipe.translate(TEXT, drafter="ngram").sequences[0].token_ids == (
        wanted.sequences[0].token_ids
    )


WRONG = [
    ({"src_lang": "eng"}, "src_lang is 'eng', expected one of the 3 languages of this model"),
    ({"tgt_lang": "fra_Lat"}, "such as fra_Latn"),
    (
        {"tgt_lang": "fra_Latn", "forced_bos_token_id": 5},
        "tgt_lang is 'fra_Latn' and forced_bos_token_id 5: both",
    ),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_wrong_languages_are_refused(options, words, pipe):
    with pytest.raises(InputError, match=words):
        pipe.translate(TEXT, **options)


def test_a_source_without_a_language_is_refused(pipe):
    with pytest.raises(InputError, match="begins and ends with no token of a language"):
        pipe.prepare([5, 6, 1], {"src_lang": "fra_Latn"})


def test_the_command_line(bundle, pipe, tmp_path):
    wanted = pipe.translate(TEXT, src_lang="zho_Hans", tgt_lang="fra_Latn").sequences[0]
    languages = ("--src-lang", "zho_Hans", "--tgt-lang", "fra_Latn")
    done = called(run, bundle, "--prompt", TEXT, *languages)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{wanted.text}\n"
    lines = [
        {"prompt": TEXT},
        {"prompt": TEXT, "tgt_lang": "eng_Latn"},
        {"prompt": TEXT, "tgt_lang": "xxx"},
        {"messages": [{"role": "user", "content": TEXT}]},
    ]
    answers = answered(bundle, tmp_path, lines, *languages)
    assert answers[0]["sequences"][0]["token_ids"] == wanted.token_ids
    assert answers[1]["sequences"][0]["token_ids"][0] == LANGUAGES["eng_Latn"]
    assert "tgt_lang is 'xxx'" in answers[2]["error"]
    assert "has no chats" in answers[3]["error"]


def test_a_chat_is_refused(bundle):
    assert_one_line_error(called(run, bundle, "--prompt", TEXT, "--chat"), "has no chats")


def test_over_http(pipe):
    wanted = pipe.translate(TEXT, src_lang="zho_Hans", tgt_lang="fra_Latn").sequences[0]
    with Service(pipe) as service, running_server(service) as server:
        client, model = server.http, {"model": MODEL}
        body = {**model, "prompt": TEXT, "src_lang": "zho_Hans", "tgt_lang": "fra_Latn"}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == wanted.text
        assert answer["usage"]["prompt_tokens"] == len(pipe.tokenizer.encode(TEXT))
        message = {"role": "user", "content": TEXT}
        chat = {**model, "messages": [message]}
        refused = client.post("/v1/chat/completions", json=chat)
        assert refused.status_code == 400
        assert "has no chats" in refused.json()["error"]["message"]


WRONG_IDS = [  # (source, what is said of it)
    ([-1], "the source has token id -1; expected 0 to 299"),
    ([2**63], "the source has token id 9223372036854775808; expected 0 to 299"),
    ([10**400], "the source has token id a number of 1329 bits; expected 0 to 299"),
    ([300], "the source has token id 300; expected 0 to 299"),
    ([5, True], "the source has a bool among its token ids; expected whole numbers"),
    ([5, 1.5], "the source has a float among its token ids; expected whole numbers"),
    ([5, [5]], "the source has a list among its token ids; expected whole numbers"),
    ([5, None], "the source has a NoneType among its token ids; expected whole numbers"),
]
WAYS = {
    "source": lambda pipe, ids: pipe.generate(source=ids),
    "stream": lambda pipe, ids: list(pipe.stream(ids)),
    "translate": lambda pipe, ids: pipe.translate(ids, src_lang="eng_Latn"),
    "prepare": lambda pipe, ids: pipe.prepare(ids, {}),
}


@pytest.mark.parametrize(("source", "words"), WRONG_IDS, ids=[words for _, words in WRONG_IDS])
@pytest.mark.parametrize("way", WAYS)
def test_wrong_ids_are_named(pipe, way, source, words):
    with pytest.raises(DsbdError) as refused:
        WAYS[way](pipe, source)
    assert str(refused.value).startswith(words)


def test_ids_of_any_integer_type_are_the_same_source(pipe):
    ids = pipe.tokenizer.encode("def")
    assert max(ids) > 255  # the language: uint8 would not hold it
    wanted = pipe.generate(source=ids).sequences[0].token_ids
    for each in (
        np.array(ids, np.uint16),
        np.array(ids, np.int32),
        list(np.array(ids)),
        tuple(ids),
    ):
        assert pipe.generate(source=each).sequences[0].token_ids == wanted


def test_a_service_refuses_them_at_submission(pipe):
    events = SimpleQueue()
    with Service(pipe) as service:
        for source, words in WRONG_IDS:
            for options in ({}, {"src_lang": "eng_Latn"}):
                with pytest.raises(DsbdError) as refused:
                    service.submit(source, options, events.put)
                assert str(refused.value).startswith(words)
            with pytest.raises(DsbdError) as refused:  # as C's dsbd_generate asks for it
                answer(service, source, {}, lambda step: True)
            assert str(refused.value).startswith(words)
    assert events.empty()


@pytest.mark.parametrize("stream", [False, True])
def test_over_http_they_are_a_bad_request(pipe, stream):
    sources = [[-1], [300], [5, 2**63 - 1], [[5, 6], [-1]]]
    with Service(pipe) as service, running_server(service) as server:
        for source in sources:
            body = {"model": MODEL, "prompt": source, "stream": stream}
            refused = server.http.post("/v1/completions", json=body)
            error = ErrorBody.model_validate(refused.json()).error
            assert refused.status_code == 400, source
            assert error.param == "prompt"
            assert error.message.startswith("the source has token id")
