"""Streams of a pipeline: the same text as the result's, in valid pieces, stop strings or none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsbd_ort.decoding import WithResult
from dsbd_ort.pipeline import Pipeline
from dsbd_runtime.bundle_files.bundle import TOKENIZER_FILE
from dsbd_runtime.errors import EngineError
from dsbd_runtime.text.stream_decoder import REPLACEMENT
from tests.runtime.bundle_edits import with_files
from tests.runtime.tiny_tokenizer import BOS, tiny_tokenizer

STRATEGIES = [
    {"strategy": "dsbd"},
    {"strategy": "dsbd", "width_policy": "fixed", "num_beams": 2},
    {"strategy": "beam-sample"},
    {"strategy": "speculative"},
    {"strategy": "speculative-beam-search"},
    {"strategy": "mjsd"},
]


def stops_within(text, place, length):
    """A stop string that comes in ``text``, and one whose beginning does."""
    piece = text[place : place + length]
    return [stop for stop in (piece, piece[-1:] + "\x00") if stop and REPLACEMENT not in stop]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    options=st.sampled_from(STRATEGIES),
    num_tokens=st.integers(1, 24),
    stop_place=st.none() | st.integers(0, 12),
    stop_length=st.integers(1, 3),
)
def test_pieces_together_are_the_text_of_the_best_sequence(
    tiny_pipe, seed, options, num_tokens, stop_place, stop_length
):
    request = {**options, "seed": seed, "max_new_tokens": num_tokens}
    if stop_place is not None:
        text = tiny_pipe.generate("né", **request).sequences[0].text
        request["stop_strings"] = stops_within(text, stop_place, stop_length)
    stream = WithResult(tiny_pipe.stream("né", **request))
    steps = list(stream)
    best = stream.result.sequences[0]
    assert "".join(step.text for step in steps) == best.text
    assert [token for step in steps for token in step.token_ids] == best.token_ids
    for step in steps:
        step.text.encode()  # no surrogate: every piece is UTF-8 for itself
    whole = tiny_pipe.tokenizer.decode([*tiny_pipe.tokenizer.encode("né"), *best.token_ids])
    assert (best.finish_reason == "stop") == (whole != "né" + best.text)
    assert not any(stop in best.text for stop in request.get("stop_strings", []))


@pytest.mark.parametrize(
    "options", [*STRATEGIES, {"strategy": "speculative", "drafter": "ngram"}], ids=str
)
def test_a_stop_string_that_is_a_special_token_is_an_end_token(tiny_pipe, options):
    """The same tokens and texts, streamed too; only the reason has another name."""
    tokenizer = tiny_pipe.tokenizer
    (stop,) = tokenizer.encode(BOS, add_special_tokens=False)
    reasons = set()
    for seed in range(4):
        common = {**options, "seed": seed, "max_new_tokens": 24, "logit_bias": {stop: 3.0}}
        by_token = tiny_pipe.generate("né", eos_token_id=[stop], **common).sequences
        common |= {"stop_strings": ["never", BOS], "eos_token_id": ()}
        stream = WithResult(tiny_pipe.stream("né", **common))
        text = "".join(piece.text for piece in stream)
        for wanted, found in zip(by_token, stream.result.sequences, strict=True):
            reason = {"eos": "stop"}.get(wanted.finish_reason, wanted.finish_reason)
            assert (found.token_ids, found.text) == (wanted.token_ids, wanted.text)
            assert found.finish_reason == reason
            reasons.add(reason)
        assert text == by_token[0].text
    assert "stop" in reasons
    spelled = tiny_pipe.generate("né", skip_special_tokens=False, **common).sequences[0]
    assert spelled.token_ids == found.token_ids and BOS not in spelled.text


@pytest.mark.parametrize("strategy", ["dsbd", "sample", "beam-search"])
def test_closing_under_an_unfinished_stream_is_an_error_that_says_so(tiny_bundle, strategy):
    pipe = Pipeline.from_bundle(tiny_bundle.path)
    pieces = pipe.stream("one", seed=0, max_new_tokens=50, strategy=strategy, min_new_tokens=50)
    next(pieces)
    pipe.close()
    with pytest.raises(EngineError, match="is closed; load it again"):
        list(pieces)


def test_without_prefix_cache_every_prompt_is_computed_anew(tiny_bundle):
    rows, options = {}, {"max_new_tokens": 4, "draft_length": 2, "seed": 0}
    for kept in (True, False):
        with Pipeline.from_bundle(tiny_bundle.path, num_threads=1, prefix_cache=kept) as pipeline:
            results = [pipeline.generate("a" * 50, **options) for _ in range(2)]
        rows[kept] = [result.stats.target_rows for result in results]
        assert results[0].sequences == results[1].sequences
    assert rows[False][1] == rows[False][0] == rows[True][0]
    assert rows[True][1] < rows[True][0] - 40


def test_a_seed_that_nobody_gave_is_random_and_reported(tiny_pipe):
    drafts = {"max_new_tokens": 12, "draft_length": 3}  # else calls differ, and last bits with them
    found = [tiny_pipe.generate("abc", **drafts) for _ in range(8)]
    assert len({result.seed for result in found}) == 8
    assert len({tuple(result.sequences[0].token_ids) for result in found}) > 1
    for result in found[:2]:
        again = tiny_pipe.generate("abc", seed=result.seed, **drafts)
        assert again.sequences == result.sequences and again.seed == result.seed


def test_a_predicted_text_may_have_tokens_that_the_model_lacks(tiny_bundle, tiny_pipe, tmp_path):
    backend = tiny_tokenizer()
    backend.add_special_tokens(["<picture>"])
    folder = with_files(tiny_bundle.path, tmp_path / "more", {TOKENIZER_FILE: backend.to_str()})
    options = {"seed": 1, "max_new_tokens": 12, "strategy": "speculative"}
    with Pipeline.from_bundle(folder, num_threads=1) as pipe:
        found = pipe.generate("one", predicted_text="a<picture>b", **options)
    (wanted,) = tiny_pipe.generate("one", **options).sequences
    assert found.sequences[0].token_ids == wanted.token_ids
