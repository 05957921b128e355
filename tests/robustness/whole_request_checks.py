"""Checks of whole requests, computed independently of the decoder."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from dsbd_errors import DsbdError
from dsbd_ort.decoding import (
    DecodedSequence,
    DecodeResult,
    DecodingConfig,
    DecodingStats,
    RequestTrace,
    WithResult,
    decode_iterations,
)
from dsbd_ort.decoding.batched_decoder import BatchedDecoder, BatchedRequest, Preempted
from dsbd_ort.decoding.errors import ConfigError, ConstraintError
from dsbd_ort.decoding.native_decoder import new_decoder
from dsbd_ort.decoding.request import Preempts
from dsbd_ort.decoding.result import IterationOutput, result_of
from dsbd_ort.decoding.row_bounds import most_rows
from dsbd_ort.decoding.whole_requests import Iterations, decoded_alone
from tests.decoding.early_ends import beams_of, first_end
from tests.decoding.preempting import together
from tests.robustness.whole_requests import OF_DRAFT, OF_DSBD, WholeRequest

WITHOUT_DRAFT = {  # the strategy that returns the same with a draft policy that changes nothing
    "dsbd": "beam-sample",
    "speculative": "sample",
    "tree-speculative": "sample",
    "speculative-beam-search": "beam-search",
}


def check_whole_request(request: WholeRequest) -> bool:
    """Decode a request on tables and hold it against what must be true; False: it is refused.

    What it is compared with has lost its rows again and again; the request itself has not.
    """
    try:
        config = request.config
    except DsbdError as error:
        assert 10 < len(str(error)) < 600, error
        return False
    try:
        result, steps = decoded(request, config)
    except ConstraintError as error:
        assert 10 < len(str(error)) < 600, error
        if (plain := config_without_draft(config)) is not None:
            with pytest.raises(ConstraintError):
                decoded(request, plain, preempts=request.forced())
        return False
    except ConfigError as error:
        assert request.head != "full" and "engine returns the" in str(error), error
        return False
    check_result(result, config, request)
    check_stream(steps, result)
    plain = config_without_draft(config)
    sampled = plain or config
    if sampled.strategy == "beam-sample" and sampled.coupling == "gumbel":
        check_early_end(result, sampled, request)
    if plain is not None:
        undrafted, _ = decoded(request, plain, preempts=request.forced())
        assert told(undrafted) == told(result), "a draft was visible"
    if (wide := config_of_wide_drafts(config)) is not None and request.head != "full":
        assert told(decoded(request, wide)[0]) == told(result), "how wide a draft is was visible"
    again = AGAIN[request.check](request, config)
    if again is None:
        return True
    if request.check not in ("dense", "native"):
        assert told(again) == told(result)
        return True
    assert [s.token_ids for s in again.sequences] == [s.token_ids for s in result.sequences]
    for ours, theirs in zip(again.sequences, result.sequences, strict=True):
        np.testing.assert_allclose(ours.token_logprobs, theirs.token_logprobs, atol=1e-3)
    return True


def config_of_wide_drafts(config: DecodingConfig) -> DecodingConfig | None:
    """Return what must give the same with drafts of another shape, which look at more tokens."""
    has_tree = config.drafts and config.row.has_draft_tree
    if config_without_draft(config) is None or not has_tree or config.num_beams > 24:
        return None
    return dataclasses.replace(config, draft_policy="fixed", draft_length=2, draft_beams=24)


def told(result: DecodeResult) -> list[Any]:
    """Everything that a result says of its text, to the last bit."""
    return [vars(sequence) for sequence in result.sequences] + [result.prompt_logprobs]


def begun(
    request: WholeRequest,
    config: DecodingConfig,
    models: tuple[Any, Any],
    trace: RequestTrace | None = None,
    preempts: Preempts | None = None,
) -> Iterations:
    return decode_iterations(request.request(config, trace, preempts), *models)


def decoded(
    request: WholeRequest,
    config: DecodingConfig,
    models: tuple[Any, Any] | None = None,
    trace: RequestTrace | None = None,
    preempts: Preempts | None = None,
) -> tuple[DecodeResult, list[IterationOutput]]:
    models = models or request.models()
    outputs = WithResult(begun(request, config, models, trace, preempts))
    steps = list(outputs)
    return outputs.result, steps


def check_result(result: DecodeResult, config: DecodingConfig, request: WholeRequest) -> None:
    sequences = result.sequences
    num_wanted = config.num_return_sequences
    assert 1 <= len(sequences) <= num_wanted
    assert [s.score for s in sequences] == sorted((s.score for s in sequences), reverse=True)
    if not config.replacement:
        assert len({tuple(s.token_ids) for s in sequences}) == len(sequences), "a beam came twice"
    for sequence in sequences:
        check_sequence(sequence, config, request)
    check_stats(result.stats, config, request)
    scored = result.prompt_logprobs
    assert (scored is not None) is config.prompt_logprobs
    assert scored is None or len(scored.token_logprobs) == len(request.prompt)


def check_sequence(
    sequence: DecodedSequence, config: DecodingConfig, request: WholeRequest
) -> None:
    ids = sequence.token_ids
    assert 1 <= len(ids) <= config.max_new_tokens
    assert len(sequence.token_logprobs) == len(ids)
    is_possible = [math.isfinite(p) and p <= 0.0 for p in sequence.token_logprobs]
    assert all(is_possible), "an impossible token"
    check_top_logprobs(sequence, config, request)
    assert math.isclose(sequence.logprob, sum(sequence.token_logprobs), abs_tol=1e-9)
    if config.row.rule != "search" or not config.processes_logits:  # else by the processed one
        score = sequence.logprob / len(ids) ** config.length_penalty
        assert math.isclose(sequence.score, score, abs_tol=1e-9)
    check_processing(ids, config, request)
    by_eos, by_stop = [
        [end for end in range(1, len(ids) + 1) if ends(tuple(ids[:end]), config, request)]
        for ends in (ends_by_eos, ends_by_stop)
    ]
    first_end = min([*by_eos, *by_stop], default=None)
    assert first_end in (None, len(ids)), "tokens after the end"
    reason = "eos" if by_eos else "stop" if by_stop else "length"
    assert sequence.finish_reason == reason
    if reason == "length":
        assert len(ids) == config.max_new_tokens


def ends_by_eos(tokens: tuple[int, ...], config: DecodingConfig, request: WholeRequest) -> bool:
    return tokens[-1] in config.eos_ids


def ends_by_stop(tokens: tuple[int, ...], config: DecodingConfig, request: WholeRequest) -> bool:
    """Return whether a stop string or the constraint ends these new tokens."""
    searched = tokens[config.min_new_tokens :]
    if any(searched[-len(run) :] == run for run in request.stop):
        return True
    return bool(config.constraint and config.constraint.ends_after((*request.prompt, *tokens)))


def check_early_end(result: DecodeResult, plain: DecodingConfig, request: WholeRequest) -> None:
    """Hold the result of sampled beams against all layers of a run to the end without a draft."""
    if plain.replacement:  # a beam may count several times
        return
    to_the_end = dataclasses.replace(plain, num_return_sequences=plain.num_beams)
    try:
        layers = [beams_of(step) for step in decoded(request, to_the_end)[1]]
    except ConstraintError:  # of a beam that was given up before
        return

    def has_ended(tokens: tuple[int, ...]) -> bool:
        return ends_by_eos(tokens, plain, request) or ends_by_stop(tokens, plain, request)

    _, expected = first_end(layers, plain, has_ended)
    assert [tuple(s.token_ids) for s in result.sequences] == [beam.tokens for beam in expected]


def check_processing(ids: list[int], config: DecodingConfig, request: WholeRequest) -> None:
    """Hold the tokens against what the processing forbid, searched for in another way."""
    path = (*request.prompt, *ids)
    for begin in range(len(request.prompt), len(path)):
        token, before = path[begin], path[:begin]
        if config.constraint:
            has_ended = config.constraint.ends_after(before)  # with the prompt already
            allowed = config.eos_ids if has_ended else config.constraint.allowed_after(before)
            assert token in allowed, "a forbidden token"
        is_forced = (begin == 1 and config.forced_bos_token_id is not None) or (
            len(ids) == config.max_new_tokens
            and begin == len(path) - 1
            and config.forced_eos_token_id is not None
        )
        assert token not in config.suppress_tokens
        is_first_forced = config.forced_bos_token_id is not None and len(request.prompt) == 1
        if begin == len(request.prompt) + is_first_forced:
            assert token not in config.begin_suppress_tokens
        if config.no_timestamps_token_id is not None:
            check_times(token, before[len(request.prompt) :], config)
        if is_forced:
            continue
        assert not any(path[: begin + 1][-len(word) :] == word for word in config.bad_words_ids)
        if size := config.no_repeat_ngram_size:
            ngrams = [path[i : i + size] for i in range(begin + 2 - size)]
            assert begin + 1 < size or ngrams.count(ngrams[-1]) == 1, "a repeated n-gram"
        if size := config.encoder_no_repeat_ngram_size:
            ngrams = [path[i : i + size] for i in range(len(request.prompt) + 1 - size)]
            assert begin + 1 < size or path[: begin + 1][-size:] not in ngrams, "one of the prompt"
        assert token not in config.eos_ids or begin - len(request.prompt) >= config.min_new_tokens


def check_times(token: int, before: tuple[int, ...], config: DecodingConfig) -> None:
    """Hold a token against the rules of times, the sum of their probabilities aside."""
    first = config.no_timestamps_token_id + 1
    assert token != first - 1
    last = config.last_timestamp_token_id or 10**9
    is_time = [first <= each <= last for each in before]
    times = [each for each in before if first <= each <= last]
    if not before:
        assert first <= token <= last
        index = config.max_initial_timestamp_index
        assert index is None or token <= first + index
    elif is_time[-1] and (len(before) == 1 or is_time[-2]):
        assert not first <= token <= last, "a third time"
    elif is_time[-1]:
        assert min(config.eos_ids, default=first - 1) <= token <= last, "a text within a pair"
        assert token < first or token >= times[-1], "a decreasing time"
    else:
        assert not first <= token <= max(times, default=-1), "a time again"


def check_top_logprobs(
    sequence: DecodedSequence, config: DecodingConfig, request: WholeRequest
) -> None:
    if not config.top_logprobs:
        assert sequence.top_logprobs is None
        return
    number = min(config.top_logprobs, request.vocab_size)
    for token, own, top in zip(
        sequence.token_ids, sequence.token_logprobs, sequence.top_logprobs, strict=True
    ):
        assert len({each for each, _ in top}) == number
        logprobs = [logprob for _, logprob in top]
        np.testing.assert_array_less(np.diff(np.maximum(logprobs, -1e9)), 1e-5)
        assert dict(top).get(token, own) == own <= logprobs[0] + 1e-5


def check_stats(stats: DecodingStats, config: DecodingConfig, request: WholeRequest) -> None:
    values = dataclasses.asdict(stats)
    for name, value in values.items():
        if isinstance(value, int | float):
            assert math.isfinite(value) and value >= 0, name
    assert sum(stats.acceptance_histogram) == stats.num_iterations
    if not config.row.has_draft:
        assert stats.draft_calls == stats.draft_rows == 0
    assert stats.num_prompt_tokens == len(request.prompt)
    assert 0.0 < stats.mean_beam_width <= max(config.num_beams, config.widest_search)


def check_stream(steps: list[IterationOutput], result: DecodeResult) -> None:
    best, shown = result.sequences[0].token_ids, 0
    for step in steps:
        agreed = step.agreed_tokens
        assert agreed == best[: len(agreed)], "a streamed token was taken back"
        assert len(agreed) >= shown
        shown = len(agreed)


def config_without_draft(config: DecodingConfig) -> DecodingConfig | None:
    """Return what must give the same without a draft, None where the draft may be seen."""
    plain = WITHOUT_DRAFT.get(config.strategy)
    is_seen = (
        config.coupling == "rejection"
        or config.width_policy == "threshold"
        or config.memory == "single"
        or (config.replacement and config.num_beams == 1)  # one draw has nothing to replace
    )
    if plain is None or is_seen:
        return None
    kept = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in ("coupling", *OF_DRAFT, *OF_DSBD)
    }
    return DecodingConfig(**kept | {"strategy": plain})


def on_dense_tables(request: WholeRequest, config: DecodingConfig) -> DecodeResult | None:
    """Decode on engines that return all logits, whose normalizers are added up elsewhere.

    None where the last bits of these decide: equal candidates, or equal scores of sequences.
    """
    if request.head == "full":
        return None
    has_equal_scores = config.num_beams > 1 and request.table in ("equal", "rounded")
    has_ties = has_equal_scores or (config.row.rule == "search" and request.table != "smooth")
    # The last bit of a log-probability decides whether a coin is tossed if p = q.
    tosses_by_rounding = config.coupling == "rejection" and request.draft == "itself"
    if has_ties or tosses_by_rounding:
        return None
    looks_beyond = config.row.rule != "search" and not 1 <= config.top_k <= request.num_top
    is_another_draft = request.head == "proposed" or (
        request.head == "top" and (config.processes_logits or looks_beyond)
    )
    if is_another_draft and config_without_draft(config) is None:
        return None  # and visible: a draft never reads what its head has left out
    return decoded(request, config, request.models("full"), preempts=request.forced())[0]


def with_others(request: WholeRequest, config: DecodingConfig) -> DecodeResult:
    """Decode with a twin that came first and one that leaves half-way; check the rows held."""
    forest = BatchedDecoder(*request.models())
    early = forest.join(request.request(config))
    leaver, late = forest.join(request.request(config)), None
    outcome, held = None, 0
    waiting: list[BatchedRequest] = []
    for iteration in range(10_000):
        if iteration == 1:
            late = forest.join(request.request(config, preempts=request.forced()))
        if iteration == 2:
            forest.leave(leaver)
        for member in waiting:
            forest.resume(member)
        waiting = []
        for progress in forest.iterate():
            assert not isinstance(progress.event, Exception), progress.event
            if isinstance(progress.event, Preempted):
                waiting.append(progress.live)
            elif progress.live is late and isinstance(progress.event, DecodeResult):
                outcome = progress.event
        for member in (early, late):
            if member is not None:
                held = max(held, *(view.num_rows for view in member.views.values()), 0)
        if iteration > 1 and forest.num_live == 0 and not waiting:
            break
    assert held <= most_rows(len(request.prompt), config), "more rows than were reserved"
    assert outcome is not None
    return outcome


def in_a_small_cache(request: WholeRequest, config: DecodingConfig) -> DecodeResult:
    """Decode with two older twins in a cache that is too small for all."""
    max_rows = len(request.prompt) + config.num_beams * (2 + request.table_seed % 9)
    forest = BatchedDecoder(*request.models(), max_rows=max_rows)
    twins = [request.request(config, preempts=request.forced()) for _ in range(3)]
    return together(forest, twins, request.table_seed).result(2)


def again_on_the_same_caches(request: WholeRequest, config: DecodingConfig) -> DecodeResult:
    """Give a request up half-way, then decode it on what the caches still hold."""
    decoder = BatchedDecoder(*request.models())
    given_up, again = (
        decoded_alone(decoder, request.request(config, preempts=request.forced())) for _ in range(2)
    )
    next(given_up, None)
    given_up.close()
    return result_of(again)


def traced(request: WholeRequest, config: DecodingConfig) -> DecodeResult:
    return decoded(request, config, trace=RequestTrace(), preempts=request.forced())[0]


def alone(request: WholeRequest, config: DecodingConfig) -> DecodeResult:
    return decoded(request, config, preempts=request.forced())[0]


def by_the_core(request: WholeRequest, config: DecodingConfig) -> DecodeResult:
    """Decode in C++, whose exp may round otherwise, after a twin that was given up."""
    decoder = new_decoder(*request.models(), "auto")
    given_up, again = (
        decoded_alone(decoder, request.request(config, preempts=request.forced())) for _ in range(2)
    )
    next(given_up, None)
    given_up.close()
    return result_of(again)


AGAIN = {
    "dense": on_dense_tables,
    "shared": with_others,
    "crowded": in_a_small_cache,
    "repeated": again_on_the_same_caches,
    "traced": traced,
    "alone": alone,
    "native": by_the_core,
}
