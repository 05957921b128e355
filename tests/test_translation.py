"""Translation between languages that are tokens, in Python, on the command line and over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dsbd_ort
from dsbd_ort.engine import Service
from dsbd_runtime.errors import InputError
from tests.commands.test_run import assert_one_line_error, dsbd_run
from tests.encoder_decoder_pair import LANGUAGES, exported_translator
from tests.made_once import made_once
from tests.openai_server.running_server import MODEL, running_server

TEXT = "def read"


@pytest.fixture(scope="session")
def bundle(captures, tmp_path_factory) -> Path:
    def exported(folder: Path) -> Path:
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
    done = dsbd_run(bundle, "--prompt", TEXT, *languages)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{wanted.text}\n"
    lines = [
        {"prompt": TEXT},
        {"prompt": TEXT, "tgt_lang": "eng_Latn"},
        {"prompt": TEXT, "tgt_lang": "xxx"},
        {"messages": [{"role": "user", "content": TEXT}]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = dsbd_run(
        bundle, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", *languages
    )
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert answers[0]["sequences"][0]["token_ids"] == wanted.token_ids
    assert answers[1]["sequences"][0]["token_ids"][0] == LANGUAGES["eng_Latn"]
    assert "tgt_lang is 'xxx'" in answers[2]["error"]
    assert "has no chats" in answers[3]["error"]


def test_a_chat_is_refused(bundle):
    assert_one_line_error(dsbd_run(bundle, "--prompt", TEXT, "--chat"), "has no chats")


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
