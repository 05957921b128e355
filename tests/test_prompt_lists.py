"""Prompts: token ids in any collection with an order, lists of prompts, configs for keywords."""

import dataclasses
from collections import deque
from typing import get_type_hints

import numpy as np
import pytest

from dsbd_ort import DecodingConfig, GenerationResult, Pipeline, RequestTrace, Service
from dsbd_ort.decoding import STRATEGIES, ConfigError, DecodingError, DecodingOptions
from dsbd_ort.pipeline_options import OpeningOptions, PipelineOptions
from dsbd_ort.requests.prompts import prompt_ids
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.text.tokenizer import Tokenizer
from tests.runtime.bundle_edits import without_draft
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

TEXTS = ["abc", "abd", "x", "abc", *(f"{number} of many" for number in range(8))]
ASKED = {"max_new_tokens": 10, "seed": 7}


def tokens(result):
    return [sequence.token_ids for sequence in result.sequences]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_prompt_of_a_list_gets_what_it_gets_alone(tiny_pipe, strategy):
    together = tiny_pipe.generate(TEXTS, strategy=strategy, **ASKED)
    alone = [tiny_pipe.generate(text, strategy=strategy, **ASKED) for text in TEXTS]
    assert [tokens(result) for result in together] == [tokens(result) for result in alone]
    assert [r.sequences[0].text for r in together] == [r.sequences[0].text for r in alone]


def test_prompts_of_a_list_share_engine_calls(tiny_pipe):
    options = {**ASKED, "strategy": "beam-sample", "eos_token_id": ()}
    calls = {"target": 0}
    forward = tiny_pipe.models.costs.observe

    class Counted:
        def now(self):
            raise AssertionError("nothing is planned")

        def observe(self, role, num_rows, seconds):
            calls[role] += 1
            forward(role, num_rows, seconds)

    learned, tiny_pipe.models.costs = tiny_pipe.models.costs, Counted()
    try:
        results = tiny_pipe.generate(TEXTS[:8], **options)
    finally:
        tiny_pipe.models.costs = learned
    of_each = [result.stats.num_iterations for result in results]
    assert of_each == [10] * 8
    assert calls["target"] <= 14  # and not 80


def test_token_ids_and_texts(tiny_pipe):
    ids = [tiny_pipe.tokenizer.encode(text) for text in TEXTS[:3]]
    assert isinstance(tiny_pipe.generate(ids[0], **ASKED), GenerationResult)
    by_ids, by_text = tiny_pipe.generate(ids, **ASKED), tiny_pipe.generate(TEXTS[:3], **ASKED)
    assert [tokens(result) for result in by_ids] == [tokens(result) for result in by_text]
    assert [tokens(r) for r in tiny_pipe.generate(tuple(TEXTS[:3]), **ASKED)] == [
        tokens(result) for result in by_text
    ]
    with pytest.raises(DecodingError, match="the prompt has no token"):
        tiny_pipe.generate([], **ASKED)


def test_a_bundle_without_a_draft_takes_lists_too(tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    without_draft(tmp_path / "bundle", TinyModel())
    with Pipeline.from_bundle(tmp_path / "bundle") as pipeline:
        together = pipeline.generate(TEXTS[:3], strategy="beam-sample", **ASKED)
        for text, result in zip(TEXTS, together, strict=False):
            assert tokens(result) == tokens(
                pipeline.generate(text, strategy="beam-sample", **ASKED)
            )


WRONG = [
    (["a", ""], {}, DecodingError, "the prompt has no token"),
    (["a", 5], {}, InputError, "the prompt is a int; expected a text"),
    (["a", "b" * 3000], {}, CapacityError, "shorten the prompt"),
    ([[1], [1, 5000]], {}, DecodingError, "prompt has token id 5000"),
    (["a", "b"], {"trace": RequestTrace()}, InputError, "trace records one request"),
    (["a", "b"], {"num_beams": 0}, ConfigError, "num_beams is 0"),
]


@pytest.mark.parametrize(("prompts", "options", "kind", "words"), WRONG)
def test_a_wrong_prompt_is_named_before_any_is_continued(tiny_pipe, prompts, options, kind, words):
    learned = tiny_pipe.models.costs.now()
    with pytest.raises(kind, match=words) as caught:
        tiny_pipe.generate(prompts, **options)
    assert tiny_pipe.models.costs.now() is learned
    if not options:
        assert caught.value.__notes__ == ["prompt 1 of the list"]
    tiny_pipe.generate("a", **ASKED)  # it is free


def test_a_config_stands_for_the_keyword_arguments(tiny_pipe):
    config = DecodingConfig(num_beams=2, top_k=9, **ASKED)
    wanted = tokens(tiny_pipe.generate("abc", num_beams=2, top_k=9, **ASKED))
    assert tokens(tiny_pipe.generate("abc", config=config)) == wanted
    assert [tokens(r) for r in tiny_pipe.generate(["abc", "abc"], config=config)] == [wanted] * 2
    stream = tiny_pipe.stream("abc", config=config)
    assert [t for piece in stream for t in piece.token_ids] == wanted[0]
    with Service(tiny_pipe) as service:
        assert tokens(service.generate("abc", config=config)) == wanted
    with pytest.raises(ConfigError, match="config and num_beams, top_p are both given"):
        tiny_pipe.generate("abc", config=config, num_beams=3, top_p=0.5)
    with pytest.raises(CapacityError):  # what a config says was said by the caller
        tiny_pipe.generate("abc", config=dataclasses.replace(config, max_new_tokens=2048))


def test_keyword_arguments_are_typed_as_the_fields():
    assert DecodingOptions.__optional_keys__ == DecodingConfig.__dataclass_fields__.keys()
    assert get_type_hints(OpeningOptions) == get_type_hints(PipelineOptions)
    assert DecodingOptions.__required_keys__ == OpeningOptions.__required_keys__ == frozenset()


@pytest.fixture(scope="module")
def tokenizer(tiny_bundle):
    return Tokenizer.from_bundle(tiny_bundle)


IDS = [3, 4, 5]
ORDERED = [IDS, (3, 4, 5), range(3, 6), np.array(IDS), np.array(IDS, np.uint8), np.arange(9)[3:6]]


@pytest.mark.parametrize("prompt", [*ORDERED, deque(IDS)], ids=lambda p: type(p).__name__)
def test_ids_in_order_are_taken(tokenizer, prompt):
    assert prompt_ids(tokenizer, prompt) == IDS


UNORDERED = [
    set(IDS),
    frozenset(IDS),
    dict.fromkeys(IDS),
    dict.fromkeys(IDS).keys(),
    {1: 3}.values(),
    iter(IDS),
    (token for token in IDS),
    b"abc",
    bytearray(b"abc"),
    memoryview(b"abc"),
    None,
    7,
    np.int64(7),
]


@pytest.mark.parametrize("prompt", UNORDERED, ids=lambda prompt: type(prompt).__name__)
def test_what_has_no_order_is_refused(tokenizer, prompt):
    with pytest.raises(InputError, match=f"the prompt is a {type(prompt).__name__}; expected a te"):
        prompt_ids(tokenizer, prompt)


@pytest.mark.parametrize("prompt", [np.array(7), np.zeros((1, 3), np.int64)])
def test_an_array_has_one_dimension(tokenizer, prompt):
    with pytest.raises(InputError, match=f"an array of {prompt.ndim} dimensions"):
        prompt_ids(tokenizer, prompt)
