"""A trace against what it is a trace of: the result, the statistics and the models' own laws."""

import collections
import itertools

import numpy as np
import pytest

from dsbd_forward.logits import DenseLogits
from dsbd_ort.decoding import DecodingConfig, RequestTrace, TableModel, decode
from dsbd_ort.decoding.warp import Warp
from tests.decoding.path_constraint import PathConstraint
from tests.decoding.tables import ends_with, mixed_table, random_table
from tests.decoding.test_drafters import copying
from tests.decoding.test_strategies import VARIANT_NAMES, VARIANTS

VOCAB = 6
EOS = 5
PROMPT = (1, 0, 1)
TARGET = random_table(41, VOCAB)
DRAFT = mixed_table(TARGET, random_table(42, VOCAB), 0.7)
SEEDS = range(2)

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_NAMES)


def traced(seed, trace, **options):
    config = DecodingConfig(**({"max_new_tokens": 12, "eos_token_id": EOS} | options))
    target, draft = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
    return decode(target, draft, PROMPT, config, np.random.default_rng(seed), trace=trace)


def traces(variant):
    for seed in SEEDS:
        trace = RequestTrace()
        yield trace, traced(seed, trace, **variant)


def paths_by_id(trace):
    """The tokens from the prompt to every node, by id: an id never changes its path."""
    paths = {0: PROMPT}
    for iteration in trace.iterations:
        for node in iteration.nodes:
            path = PROMPT if node.parent is None else (*paths[node.parent], node.token)
            assert paths.setdefault(node.id, path) == path
            assert len(path) == node.position + 1
    assert len(set(paths.values())) == len(paths)
    return paths


@every_variant
def test_committed_layers_lead_to_the_result(variant):
    for trace, result in traces(variant):
        paths = paths_by_id(trace)
        last = trace.iterations[-1]
        alive = [[link.token for link in beam.hypothesis.chain()] for beam in last.beams]
        assert all(sequence.token_ids in alive for sequence in result.sequences)
        for iteration in trace.iterations:
            for beam in iteration.beams:
                tokens = tuple(link.token for link in beam.hypothesis.chain())
                assert beam.node is None or paths[beam.node] == PROMPT + tokens
            goes_on = {beam.node for beam in iteration.beams} - {None}
            assert goes_on <= set(iteration.committed[-1])


@every_variant
def test_iterations_add_up_to_the_statistics(variant):
    for trace, result in traces(variant):
        stats, iterations = result.stats, trace.iterations
        num_prefilled = len(PROMPT) - 1
        assert len(iterations) == stats.num_iterations
        assert sum(len(i.drafted) for i in iterations) == stats.num_draft_layers
        assert sum(len(i.committed) - 1 for i in iterations) == stats.num_accepted_layers
        assert sum(i.target_rows for i in iterations) == stats.target_rows - num_prefilled
        assert sum(i.draft_rows for i in iterations) == stats.draft_rows
        assert sum(i.target_s for i in iterations) <= stats.target_s
        assert all(min(i.draft_s, i.target_s, i.host_s) >= 0.0 for i in iterations)


@every_variant
def test_roles_say_what_became_of_a_node(variant):
    for trace, _ in traces(variant):
        before = set()
        for iteration in trace.iterations:
            selected = set(itertools.chain(*iteration.committed))
            there = before.union(*iteration.drafted)
            roots = set(iteration.roots)
            for node in iteration.nodes:
                is_selected = node.id in selected - roots
                assert (node.role == "root") == (node.id in roots)
                assert (node.role == "accepted") == (is_selected and node.id in there)
                assert (node.role == "bonus") == (is_selected and node.id not in there)
                if node.role == "kept":
                    assert node.survives and node.id in there
                if node.role == "rejected":
                    depth = node.position - max(
                        n.position for n in iteration.nodes if n.id in roots
                    )
                    assert depth <= len(iteration.committed) and not node.survives
                if node.role == "pruned":
                    assert not node.survives
            survivors = {node.id for node in iteration.nodes if node.survives}
            before = survivors
        for now, then in itertools.pairwise(trace.iterations):
            survivors = {node.id for node in now.nodes if node.survives}
            assert survivors <= {node.id for node in then.nodes}
            assert then.roots == [beam.node for beam in now.beams if beam.node is not None]


@every_variant
def test_probabilities_are_those_of_the_models(variant):
    for trace, _ in traces(variant):
        config, paths = trace.config, paths_by_id(trace)
        warp = Warp(config.temperature or 1.0, config.top_k, config.top_p)
        num_drafted_known = 0
        for iteration in trace.iterations:
            weights = {node.id: node.log_weight for node in iteration.nodes}
            drafted = set(itertools.chain(*iteration.drafted)) - set(iteration.roots)
            for node in iteration.nodes:
                if node.parent is None:
                    continue
                *prefix, token = paths[node.id]
                for found, table in ((node.target_log_prob, TARGET), (node.draft_log_prob, DRAFT)):
                    if found is not None:
                        logits = np.array([table(tuple(prefix))], dtype=np.float32)
                        assert found == pytest.approx(
                            warp.distributions(DenseLogits(logits))[0].log_probs[token]
                        )
                if node.id in drafted:
                    assert node.draft_log_prob is not None
                    num_drafted_known += 1
                if node.role in ("accepted", "bonus"):
                    assert node.target_log_prob is not None
                    expected = weights[node.parent] + node.target_log_prob
                    assert node.log_weight == pytest.approx(expected)
        assert (num_drafted_known > 0) == config.row.has_draft


def test_drafted_ends_that_a_beam_search_collects_are_not_called_rejected():
    config = DecodingConfig(strategy="speculative-beam-search", num_beams=3, max_new_tokens=12)
    trace, roles = RequestTrace(), set()
    models = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
    rng, stop = np.random.default_rng(0), ends_with((2,), (4,))
    decode(*models, PROMPT, config, rng, stop=stop, trace=trace)
    paths = paths_by_id(trace)
    for iteration in trace.iterations:
        ended = [beam.hypothesis.chain() for beam in iteration.beams if beam.node is None]
        collected = {PROMPT + tuple(link.token for link in chain) for chain in ended}
        for node in iteration.nodes:
            assert (node.role == "finished") == (paths[node.id] in collected)
            roles.add(node.role)
    assert {"finished", "rejected", "accepted"} <= roles


def test_a_weak_and_a_perfect_draft_look_different():
    """With the target as draft and equal widths nothing is rejected; else something is."""
    config = DecodingConfig(num_beams=2, width_policy="fixed", draft_beams=2, max_new_tokens=12)
    roles = {}
    for name, table in (("perfect", TARGET), ("weak", random_table(7, VOCAB))):
        trace = RequestTrace()
        models = TableModel(VOCAB, TARGET), TableModel(VOCAB, table)
        decode(*models, PROMPT, config, np.random.default_rng(0), trace=trace)
        roles[name] = {node.role for iteration in trace.iterations for node in iteration.nodes}
    assert "rejected" not in roles["perfect"] and {"accepted", "bonus"} <= roles["perfect"]
    assert {"rejected", "pruned", "bonus"} <= roles["weak"]


LONG_MATCH = 5  # tokens from which on a repetition is believed before the model


def test_who_drafted_a_node_with_a_model_and_what_was_there_before():
    """One beam: by the n-grams where the last five tokens were there before, else by the model."""
    config = DecodingConfig(
        strategy="speculative", drafter="model+ngram", draft_length=3, max_new_tokens=60
    )
    trace = RequestTrace()
    models = TableModel(9, copying(5, 6.0)), TableModel(9, copying(5, 3.0))
    decode(*models, PROMPT, config, np.random.default_rng(0), trace=trace)
    paths, drafted_by = paths_by_id(trace), collections.Counter()
    for iteration in trace.iterations:
        (text,) = (paths[root] for root in iteration.roots)
        known = {text[i : i + LONG_MATCH] for i in range(len(text) - LONG_MATCH)}
        drafted = set(itertools.chain(*iteration.drafted))
        for node in iteration.nodes:
            if node.id in drafted:
                is_known = paths[node.id][-LONG_MATCH - 1 : -1] in known
                assert node.proposer == ("ngram" if is_known else "model")
                drafted_by[node.proposer] += 1
            elif node.role == "bonus":
                assert node.proposer is None
    assert min(drafted_by["ngram"], drafted_by["model"]) > 5


def test_who_drafted_stays_with_a_node():
    trace = RequestTrace()
    traced(0, trace, num_beams=4, num_return_sequences=4, draft_length=3, draft_beams=8)
    last: dict[int, str | None] = {}
    num_stayed = 0
    for iteration in trace.iterations:
        drafted = set(itertools.chain(*iteration.drafted)) - set(iteration.roots)
        for node in iteration.nodes:
            expected = "model" if node.id in drafted else last.get(node.id)
            assert node.proposer == expected
            last[node.id] = node.proposer
            num_stayed += node.proposer == "model" and node.id not in drafted
    assert num_stayed and None in last.values()


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_the_constraint_drafts_where_it_leaves_one_token(drafter):
    def allowed(path):
        return {len(path) % 4} if len(path) % 3 else {0, 1, 2, 3, 4}

    trace = RequestTrace()
    options = {"draft_length": 4, "draft_beams": 2, "eos_token_id": None, "drafter": drafter}
    traced(0, trace, num_beams=2, constraint=PathConstraint(VOCAB, allowed), **options)
    seen = collections.Counter()
    for iteration in trace.iterations:
        drafted = set(itertools.chain(*iteration.drafted))
        for node in iteration.nodes:
            if node.id in drafted:
                is_forced = node.position % 3 != 0
                assert node.proposer == ("constraint" if is_forced else drafter)
                seen[node.proposer] += 1
    assert seen["constraint"] and seen[drafter]
