"""Lists of prompts, configs instead of keyword arguments, and the types of those."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from dsbd_ort import DecodingConfig, GenerationResult, Pipeline, RequestTrace, Service
from dsbd_ort.decoding import STRATEGIES, ConfigError, DecodingError, DecodingOptions
from dsbd_ort.pipeline_options import OpeningOptions, PipelineOptions
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.errors import CapacityError, InputError
from tests.runtime.bundle_edits import without_draft
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

TEXTS = ["abc", "abd", "x", "abc", *(f"{number} of many" for number in range(8))]
ASKED: dict[str, Any] = {"max_new_tokens": 10, "seed": 7}


@pytest.fixture(scope="module")
def pipeline(tiny_bundle: Bundle):
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as opened:
        yield opened


def tokens(result: GenerationResult) -> list[list[int]]:
    return [sequence.token_ids for sequence in result.sequences]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_prompt_of_a_list_gets_what_it_gets_alone(pipeline: Pipeline, strategy: str) -> None:
    together = pipeline.generate(TEXTS, strategy=strategy, **ASKED)
    alone = [pipeline.generate(text, strategy=strategy, **ASKED) for text in TEXTS]
    assert [tokens(result) for result in together] == [tokens(result) for result in alone]
    assert [r.sequences[0].text for r in together] == [r.sequences[0].text for r in alone]


def test_prompts_of_a_list_share_engine_calls(pipeline: Pipeline) -> None:
    options = {**ASKED, "strategy": "beam-sample", "eos_token_id": ()}
    calls = {"target": 0}
    forward = pipeline.costs.observe

    class Counted:
        def now(self):
            raise AssertionError("nothing is planned")

        def observe(self, role, num_rows, seconds):
            calls[role] += 1
            forward(role, num_rows, seconds)

    learned, pipeline.costs = pipeline.costs, Counted()
    try:
        results = pipeline.generate(TEXTS[:8], **options)
    finally:
        pipeline.costs = learned
    of_each = [result.stats.num_iterations for result in results]
    assert of_each == [10] * 8
    assert calls["target"] <= 14  # and not 80


def test_token_ids_and_texts(pipeline: Pipeline) -> None:
    ids = [pipeline.tokenizer.encode(text) for text in TEXTS[:3]]
    assert isinstance(pipeline.generate(ids[0], **ASKED), GenerationResult)
    by_ids, by_text = pipeline.generate(ids, **ASKED), pipeline.generate(TEXTS[:3], **ASKED)
    assert [tokens(result) for result in by_ids] == [tokens(result) for result in by_text]
    assert [tokens(r) for r in pipeline.generate(tuple(TEXTS[:3]), **ASKED)] == [
        tokens(result) for result in by_text
    ]
    with pytest.raises(DecodingError, match="the prompt has no token"):
        pipeline.generate([], **ASKED)


def test_a_bundle_without_a_draft_takes_lists_too(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path / "bundle")
    without_draft(tmp_path / "bundle", TinyModel())
    with Pipeline.from_bundle(tmp_path / "bundle") as pipeline:
        together = pipeline.generate(TEXTS[:3], strategy="beam-sample", **ASKED)
        for text, result in zip(TEXTS, together, strict=False):
            assert tokens(result) == tokens(
                pipeline.generate(text, strategy="beam-sample", **ASKED)
            )


WRONG: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    (["a", ""], {}, DecodingError, "the prompt has no token"),
    (["a", 5], {}, InputError, "the prompt is a int; expected a text"),
    (["a", "b" * 3000], {}, CapacityError, "shorten the prompt"),
    ([[1], [1, 5000]], {}, DecodingError, "prompt has token id 5000"),
    (["a", "b"], {"trace": RequestTrace()}, InputError, "trace records one request"),
    (["a", "b"], {"num_beams": 0}, ConfigError, "num_beams is 0"),
]


@pytest.mark.parametrize(("prompts", "options", "kind", "words"), WRONG)
def test_a_wrong_prompt_is_named_before_any_is_continued(
    pipeline: Pipeline, prompts: list[Any], options: dict[str, Any], kind: type, words: str
) -> None:
    learned = pipeline.costs.now()
    with pytest.raises(kind, match=words) as caught:
        pipeline.generate(prompts, **options)
    assert pipeline.costs.now() is learned
    if not options:
        assert caught.value.__notes__ == ["prompt 1 of the list"]
    pipeline.generate("a", **ASKED)  # it is free


def test_a_config_stands_for_the_keyword_arguments(pipeline: Pipeline) -> None:
    config = DecodingConfig(num_beams=2, top_k=9, **ASKED)
    wanted = tokens(pipeline.generate("abc", num_beams=2, top_k=9, **ASKED))
    assert tokens(pipeline.generate("abc", config=config)) == wanted
    assert [tokens(r) for r in pipeline.generate(["abc", "abc"], config=config)] == [wanted] * 2
    stream = pipeline.stream("abc", config=config)
    assert [t for piece in stream for t in piece.token_ids] == wanted[0]
    with Service(pipeline) as service:
        assert tokens(service.generate("abc", config=config)) == wanted
    with pytest.raises(ConfigError, match="config and num_beams, top_p are both given"):
        pipeline.generate("abc", config=config, num_beams=3, top_p=0.5)
    with pytest.raises(CapacityError):  # what a config says was said by the caller
        pipeline.generate("abc", config=dataclasses.replace(config, max_new_tokens=2048))


def test_keyword_arguments_are_typed_as_the_fields() -> None:
    assert DecodingOptions.__optional_keys__ == DecodingConfig.__dataclass_fields__.keys()
    assert get_type_hints(OpeningOptions) == get_type_hints(PipelineOptions)
    assert DecodingOptions.__required_keys__ == OpeningOptions.__required_keys__ == frozenset()
