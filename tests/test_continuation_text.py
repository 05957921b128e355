"""Text of a continuation: what its tokens add to the text of the prompt, wherever text is made."""

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_ort import Choice, JsonSchema, Lark, Pipeline, Regex, RequestTrace
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.openai_server.responses import pieces_of
from dsbd_ort.requests.results import StopSearch, text_until_stop
from dsbd_ort.trace_page.trace_file import trace_object
from dsbd_runtime.text.stream_decoder import REPLACEMENT, StreamDecoder, TextWindow, whole_text
from dsbd_runtime.text.tokenizer import Tokenizer
from tests.continuations import (
    KINDS,
    answered_by,
    continuation,
    prompt_and_answer,
    write_bundle,
)
from tests.tokenizer_corpus import CORPUS, random_texts, write_tokenizer


@dataclass(frozen=True)
class Opened:
    """A bundle of random models; what the library says of its tokenizer; a prompt, an answer."""

    pipeline: Pipeline
    backend: tokenizers.Tokenizer
    prompt: list[int]
    answer: list[int]

    @property
    def special(self):
        """The first special token."""
        return next(t for t, a in self.backend.get_added_tokens_decoder().items() if a.special)

    def text(self, prompt, token_ids):
        return continuation(self.backend, prompt, token_ids)


@pytest.fixture(scope="module", params=KINDS)
def opened(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("bundles") / request.param
    backend = write_bundle(request.param, path)
    with Pipeline.from_bundle(path, num_threads=1) as pipeline:
        yield Opened(pipeline, backend, *prompt_and_answer(backend))


def test_a_forced_answer_has_its_space(opened):
    options = {"constraint": answered_by(opened.answer), "max_new_tokens": 16}
    result = opened.pipeline.generate(opened.prompt, **options)
    assert result.sequences[0].token_ids == opened.answer
    assert result.sequences[0].text == " the words are"
    pieces = list(opened.pipeline.stream(opened.prompt, **options))
    assert "".join(piece.text for piece in pieces) == " the words are"


@pytest.mark.parametrize("seed", range(4))
def test_beams_and_samples_have_what_they_add(opened, seed):
    options = {"seed": seed, "max_new_tokens": 12, "eos_token_id": ()}
    several = {"strategy": "beam-search", "num_beams": 3, "num_return_sequences": 3}
    for more in ({}, several):
        found = opened.pipeline.generate(opened.prompt, **options, **more)
        for each in found.sequences:
            assert each.text == opened.text(opened.prompt, each.token_ids)


def test_a_prompt_without_text_is_the_beginning_of_one(opened):
    special = [opened.special]
    result = opened.pipeline.generate(special, constraint=answered_by(opened.answer))
    assert result.sequences[0].text == opened.backend.decode(opened.answer)
    ends_special = [*opened.prompt, *special]
    result = opened.pipeline.generate(ends_special, constraint=answered_by(opened.answer))
    assert result.sequences[0].text == opened.text(ends_special, opened.answer)


def test_a_stop_string_begins_with_the_space(opened):
    options = {"constraint": answered_by(opened.answer)}
    result = opened.pipeline.generate(opened.prompt, stop_strings=" the", **options)
    (best,) = result.sequences
    texts = [opened.text(opened.prompt, opened.answer[:n]) for n in range(len(opened.answer) + 1)]
    first = next(n for n, text in enumerate(texts) if " the" in text)
    assert (best.finish_reason, best.text) == ("stop", "")
    assert best.token_ids == opened.answer[:first]
    exempt = opened.pipeline.generate(
        opened.prompt, stop_strings=[" the", "s are"], min_new_tokens=first, **options
    )
    assert exempt.sequences[0].text == " the word"


def test_special_tokens_in_the_text_are_part_of_what_precedes(opened):
    prompt = [*opened.prompt, opened.special]
    trace = RequestTrace()
    found = opened.pipeline.generate(
        prompt, constraint=answered_by(opened.answer), skip_special_tokens=False, trace=trace
    )
    rows = trace_object(trace, opened.pipeline.tokenizer)["hypotheses"]
    assert "".join(row["text"] for row in rows) + rows[-1]["rest"] == found.sequences[0].text
    before = opened.backend.decode(prompt, skip_special_tokens=False)
    whole = opened.backend.decode([*prompt, *opened.answer], skip_special_tokens=False)
    assert found.sequences[0].text == whole.removeprefix(before)


def test_the_trace_tells_the_same_text(opened):
    trace = RequestTrace()
    opened.pipeline.generate(opened.prompt, constraint=answered_by(opened.answer), trace=trace)
    fields = trace_object(trace, opened.pipeline.tokenizer)
    assert fields["prompt"]["text"] == opened.backend.decode(opened.prompt)
    rows = fields["hypotheses"]
    assert "".join(row["text"] for row in rows) + rows[-1]["rest"] == " the words are"


SPECS = [
    Choice(["the", " words"]),
    Choice([" the"]),
    Choice(["the"]),
    Regex(" ?the words"),
    Lark('start: " the" | "(" "the" ")"'),
    JsonSchema({"enum": ["the", 7]}),
]


@pytest.mark.parametrize("opened", ["llama_2", "gemma", "gpt_2"], indirect=True)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_grammar_is_followed_after_a_text_and_at_the_beginning(opened, spec):
    texts = {"the", " words", "the words", " the", " the words", "(the)", '"the"', "7"}
    for prompt in ([opened.special], opened.prompt):
        for seed in range(3):
            found = opened.pipeline.generate(prompt, constraint=spec, seed=seed, num_beams=2)
            for each in found.sequences:
                assert each.text == opened.text(prompt, each.token_ids)
                assert each.text in (spec.texts if isinstance(spec, Choice) else texts)


@pytest.mark.parametrize("opened", ["metaspace", "word_piece"], indirect=True)
def test_grammars_refuse_tokens_that_are_no_bytes(opened):
    with pytest.raises(ConstraintError, match="grammars cannot use this tokenizer"):
        opened.pipeline.generate(opened.prompt, constraint=SPECS[0])


@pytest.fixture(scope="module", params=CORPUS)
def published(request, tmp_path_factory):
    """A tokenizer as transformers has it, and as we read it with all of its tokens."""
    folder = write_tokenizer(request.param, tmp_path_factory.mktemp("corpus"))
    with quiet_libraries():
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    loaded.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return loaded, Tokenizer(folder, bos_token_id=None)


@dataclass(frozen=True)
class Split:
    """A text of tokens split anywhere; what transformers says of the first ``n`` new tokens."""

    loaded: Any
    prompt: list[int]
    new: list[int]

    def whole(self, num_new):
        """Return the text up to a new token."""
        ids = [*self.prompt, *self.new[:num_new]]
        return str(
            self.loaded.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


def check_split(split, tokenizer, stop):
    """Compare text, stream, stop string, and the tokens of log-probabilities with transformers."""
    before = whole_text(tokenizer, split.prompt)
    assert split.whole(0) == before or split.whole(0).endswith(REPLACEMENT)
    start, new = TextWindow.after(tokenizer, split.prompt), split.new
    texts = [split.whole(n) for n in range(len(new) + 1)]
    assert texts[-1] == before + start.text_of(new)
    decoder, given = StreamDecoder(start), before
    for token in new:
        given += decoder.push([token])
        assert texts[-1].startswith(given)
    assert given + decoder.finish() == texts[-1]

    pieces = pieces_of(start, (new, [0.0] * len(new), None))
    ends = itertools.accumulate(map(len, pieces.texts), initial=len(before))
    for end, text in zip(ends, texts, strict=True):
        assert texts[-1][:end] == text or REPLACEMENT in text

    added = [text[len(before) :] if text.startswith(before) else "" for text in texts]
    ended = next((n for n, text in enumerate(added) if stop in text), None)
    searches = itertools.accumulate(
        new,
        StopSearch.extended,
        initial=StopSearch(start, (stop,)),
    )
    assert next((n for n, s in enumerate(searches) if s.has_ended), None) == ended
    config = DecodingConfig(stop_strings=(stop,))
    wanted = added[-1] if ended is None else added[ended].partition(stop)[0]
    assert text_until_stop(start, new[:ended], config) == wanted


def check_texts(loaded, tokenizer, number):
    rng = random.Random(7)
    for text in random_texts(number, tokens=loaded.all_special_tokens[:3]):
        ids = loaded.encode(text)
        cut = rng.randrange(len(ids) + 1)
        whole = loaded.decode(ids, skip_special_tokens=True)
        begin = rng.randrange(len(whole) + 1)
        stop = whole[begin : begin + rng.randrange(1, 5)] or "the"
        check_split(Split(loaded, ids[:cut], ids[cut:]), tokenizer, stop)
        check_bytes(loaded, tokenizer, ids[:cut], ids[cut:])


def check_bytes(loaded, tokenizer, prompt, new):
    """The bytes of tokens after a text equal what they add to it, special tokens too."""
    before, whole = loaded.decode(prompt), loaded.decode([*prompt, *new])
    if before.strip() and whole.startswith(before) and REPLACEMENT not in whole:
        added = b"".join(map(tokenizer.bytes_of, new))
        assert before + added.decode() == whole


def test_texts_streams_stops_and_logprobs_are_those_of_transformers(published):
    check_texts(*published, number=40)


@pytest.mark.long
def test_many_texts_streams_stops_and_logprobs_are_those_of_transformers(published):
    check_texts(*published, number=500)
