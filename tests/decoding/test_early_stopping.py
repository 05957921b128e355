"""Sampled beams end early: when none can beat the best that have ended (docs/algorithm.md 3.13)."""

import math
from collections import defaultdict
from functools import cache

import pytest

from dsbd_ort.decoding import DecodingConfig, TableModel, WithResult, decode_iterations
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from tests.decoding.early_ends import Beam, beams_of, first_end, returned_at
from tests.decoding.exact_laws import law_of, next_beam_sets, token_probs, total_variation
from tests.decoding.tables import (
    decoded,
    ends_with,
    mixed_table,
    random_table,
    request_on,
)

VOCAB, EOS = 4, 3
TARGET = cache(random_table(31, VOCAB, spread=1.0))
DRAFT = cache(mixed_table(TARGET, random_table(32, VOCAB), 0.6))
COSTS = EngineCosts(CostCurve((1, 9), (1e-3, 1.1e-3)), CostCurve((1, 9), (1e-4, 2e-4)))
EARLY = [False, True, "never"]
PENALTIES = [1.0, 0.0, 2.0, -1.0]
WIDTHS = [(2, 1), (4, 1), (4, 3)]  # (num_beams, num_return_sequences)


def config_of(early_stopping, length_penalty=1.0, num_beams=4, num_returned=1, **options):
    return DecodingConfig(
        **{
            "strategy": "beam-sample",
            "early_stopping": early_stopping,
            "length_penalty": length_penalty,
            "num_beams": num_beams,
            "num_return_sequences": num_returned,
            "max_new_tokens": 8,
            "eos_token_id": EOS,
            **options,
        }
    )


def steps_and_result(config, seed, prompt=(1, 2), stop=None):
    request = request_on(config, prompt, seed, stop=stop, costs=COSTS)
    steps = WithResult(decode_iterations(request, TableModel(VOCAB, TARGET), None))
    return list(steps), steps.result


@cache
def layers_to_the_end(seed, num_beams, with_stop=False):
    """Return the beams of every layer of a run that returns all its beams."""
    config = config_of(False, num_beams=num_beams, num_returned=num_beams)
    steps, _ = steps_and_result(config, seed, stop=ends_with((0, 1)) if with_stop else None)
    return [beams_of(step) for step in steps]


def has_ended(tokens):
    return tokens[-1:] == (EOS,)


@pytest.mark.parametrize("early_stopping", EARLY)
@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize(("num_beams", "num_returned"), WIDTHS)
def test_it_ends_with_the_first_layer_that_decides(
    early_stopping, length_penalty, num_beams, num_returned
):
    config = config_of(early_stopping, length_penalty, num_beams, num_returned)
    num_early = 0
    for seed in range(25):
        layers = layers_to_the_end(seed, num_beams)
        steps, result = steps_and_result(config, seed)
        depth, expected = first_end(layers, config, has_ended)
        assert len(steps) == depth
        found = [Beam(tuple(s.token_ids), s.logprob) for s in result.sequences]
        assert found == expected
        num_early += depth < len(layers)
    hardly_ever = early_stopping == "never" and length_penalty == 2.0  # so much a length may bring
    assert hardly_ever or num_early > 0


def test_a_stop_string_ends_early_too():
    config, num_early = config_of(False), 0
    for seed in range(25):
        layers = layers_to_the_end(seed, 4, with_stop=True)
        steps, result = steps_and_result(config, seed, stop=ends_with((0, 1)))
        depth, (expected,) = first_end(layers, config, lambda t: has_ended(t) or t[-2:] == (0, 1))
        assert (len(steps), tuple(result.sequences[0].token_ids)) == (depth, expected.tokens)
        num_early += depth < len(layers) and expected.tokens[-1] != EOS
    assert num_early > 0


def best_scores(prompt, beam, length_penalty, most):
    """Yield the score of every complete sequence that a live beam may become."""
    if beam.tokens[-1:] == (EOS,) or len(beam.tokens) == most:
        yield beam.score(length_penalty)
        return
    for token, p in enumerate(token_probs(TARGET, prompt + beam.tokens)):
        longer = Beam((*beam.tokens, token), beam.logprob + math.log(p))
        yield from best_scores(prompt, longer, length_penalty, most)


@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_no_sequence_that_was_given_up_scores_more(early_stopping, length_penalty):
    """Compares all continuations; the bound is exact if a longer text cannot score more."""
    config = config_of(early_stopping, length_penalty, 4, 2, max_new_tokens=6)
    num_given_up = num_better = 0
    for seed in range(40):
        steps, result = steps_and_result(config, seed)
        if len(steps) == config.max_new_tokens:
            continue
        live = [beam for beam in beams_of(steps[-1]) if not has_ended(beam.tokens)]
        num_given_up += len(live)
        last = result.sequences[-1].score
        for beam in live:
            scores = best_scores((1, 2), beam, length_penalty, config.max_new_tokens)
            num_better += max(scores) > last + 1e-6
    assert num_given_up > 0 or length_penalty == 2.0
    is_admissible = early_stopping == "never" or length_penalty <= 0.0
    assert (num_better == 0) if is_admissible else (num_better > 0)


def law_of_the_best(prompt, config):
    """The exact law of the sequence that is returned, by recursion over the draws of all layers."""
    law = defaultdict(float)
    open_sets = {(((), 0.0),): 1.0}
    for depth in range(1, config.max_new_tokens + 1):
        following = defaultdict(float)
        for beams, probability in open_sets.items():
            drawn = next_beam_sets(TARGET, prompt, beams, config.num_beams, EOS, False)
            for layer, share in drawn.items():
                beams_of_layer = [Beam(*beam) for beam in layer]  # nothing is warped
                returned = returned_at(beams_of_layer, depth, config, has_ended)
                if returned is None:
                    following[layer] += probability * share
                else:
                    law[returned[0].tokens] += probability * share
        open_sets = following
    return dict(law)


def test_the_rejection_coupling_has_the_same_law_to_the_last_digit():
    options = {"num_beams": 2, "max_new_tokens": 2}
    prompt, expected = (1, 2), config_of(True, **options)
    drafting = {"strategy": "dsbd", "coupling": "rejection", "draft_length": 1, "draft_beams": 2}
    config = config_of(True, **options, **drafting)

    def best_of(chance):
        request = request_on(config, prompt, random_source=chance)
        result = decoded(request, TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT))
        return tuple(result.sequences[0].token_ids)

    assert total_variation(law_of(best_of), law_of_the_best(prompt, expected)) < 1e-12
