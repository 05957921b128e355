"""The decoding loop: draft a forest, verify it in one target call, select, prune, observe.

Start here. Every strategy is this loop (docs/algorithm.md 3) with its own selection rule. The loop
yields the engine calls that it needs and never makes one: ``batched_decoder`` makes those of one
request, or of several together.

Glossary:
    iteration         draft, verify, select, prune once
    node              a (path, token) of the forest, the trie below the prompt; each exists once
    row               a node's entry in the key/value cache of an engine
    candidate         a (beam, token) pair that may become a node
    draft layer       candidates of one depth that the draft proposed
    accepted          committed layers whose nodes were all drafted
    bonus             the layer after the last accepted one: selected by the target alone
    committed         accepted and bonus layers together: final, never taken back
"""

from collections.abc import Generator

import numpy as np

from dsbd_forward.forward import ForwardResult
from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.drafting.draft import DraftLayer, Iteration
from dsbd_ort.decoding.engine_call import EngineCall, EngineCalls
from dsbd_ort.decoding.errors import ModelError
from dsbd_ort.decoding.request import GIVE_UP_INTERVAL, DecodingRequest
from dsbd_ort.decoding.result import DecodeResult, LiveHypotheses, decoded_sequences
from dsbd_ort.decoding.rule import Finished
from dsbd_ort.decoding.set_up import LoopParts, set_up

DecodingLoop = Generator[EngineCall | LiveHypotheses, ForwardResult | None, DecodeResult]
"""A running request: it is sent the result of each EngineCall, and None for LiveHypotheses."""


def decoding_loop(
    request: DecodingRequest, target: CacheView, draft: CacheView | None
) -> DecodingLoop:
    """Continue a prompt; yield the engine calls it needs, and the output of every iteration.

    Raises what ``check_decodable`` raises.

    target: a view of the cache of the model whose distribution the output follows, which begins
        with the rows of a prefix of the prompt without its last token.
    draft: the same of the model that proposes; unused by strategies without a draft.
    """
    run = set_up(request, target, draft)
    rule = run.rule
    prompt = np.array(request.prompt_ids, dtype=np.int64)
    yield from run.target.prefill(prompt[:-1], run.lockstep)
    for tracer in run.tracers:
        tracer.begin(prompt.tolist(), request.config)
    beams, depth = Beams.initial(), 0
    while not rule.is_finished(beams, depth):
        drafted = yield from run.draft_stage.draft(beams, depth)
        committed, num_accepted = yield from _verify_and_select(run, beams, drafted, depth)
        iteration = _iteration(run, beams, drafted, committed, num_accepted)
        for observer in run.observers:
            observer.observe(iteration)
        beams = _prune(run, iteration)
        depth += len(committed)
        outputs = run.hypotheses, iteration.hypotheses, run.agreement
        yield LiveHypotheses(*outputs, run.stats, run.target.distributions.tops)
        if request.gives_up is not None and _is_given_up(run, beams, depth, len(committed)):
            break
    return _finish(run, beams)


def _is_given_up(run: LoopParts, beams: Beams, depth: int, num_new: int) -> bool:
    """Return whether the caller has no use for the rest; ``num_new`` layers are new."""
    hypotheses, gives_up = run.hypotheses, run.request.gives_up
    is_due = depth // GIVE_UP_INTERVAL > (depth - num_new) // GIVE_UP_INTERVAL
    if gives_up is None or not is_due or run.rule.is_finished(beams, depth):
        return False
    paths = hypotheses.paths(beams.hypotheses)
    ended = decoded_sequences(run.rule.ended(), hypotheses, run.request.finish_reason)
    return gives_up([hypotheses.tokens[path].tolist() for path in paths], ended)


def _verify_and_select(
    run: LoopParts, beams: Beams, drafted: list[DraftLayer], depth: int
) -> EngineCalls[tuple[list[Beams], int]]:
    """Compute the forest; return the beams of every committed layer, as many as the nodes allow.

    And how many of their nodes the forest had already. Further calls are made if the first layer
    needs logits that a top-k head has left out: each returns some of them.
    """
    committed: list[Beams] = []
    num_met = run.forest.num_met
    for _ in range(1 + len(beams.nodes)):
        yield from run.target.compute(run.target.missing())
        for selected in run.rule.select(run.target, beams, drafted, depth):
            committed.append(selected)
            if run.rule.is_finished(selected, depth + len(committed)):
                break
        if committed:
            return committed, run.forest.num_met - num_met
    raise ModelError(
        "the target said that all logits of its last rows can be read, but they cannot; export the "
        "bundle again, or with --logits full"
    )


def _iteration(
    run: LoopParts,
    roots: Beams,
    drafted: list[DraftLayer],
    committed: list[Beams],
    num_accepted: int,
) -> Iteration:
    """Return the record of an iteration: which beams go on, and which nodes pruning leaves.

    The nodes that can still matter are the beams, descendants of them that the target has computed,
    and ancestors that an engine has yet to compute.
    """
    forest, most_descendants = run.forest, run.draft_stage.most_descendants
    beams = committed[-1]
    if run.request.config.memory == "single":
        # The beam of highest log-probability per token (DSBD paper, memory reduction).
        beams = beams.only(int(run.hypotheses.scores(beams.hypotheses, 1.0).argmax()))
    survivors = np.zeros(len(forest) + 1, dtype=np.bool_)  # the last: NO_NODE
    if most_descendants:
        survivors[forest.below(beams.nodes).nonzero()[0][:most_descendants]] = True
    survivors[beams.nodes] = True
    for runner in run.runners:
        runner.keep_needed(survivors)
    return Iteration(
        roots=roots,
        drafted=drafted,
        committed=committed,
        beams=beams,
        hypotheses=run.rule.live(beams),
        survivors=survivors[:-1],
        num_draft_tokens=sum([layer.num_new for layer in drafted]),
        num_accepted_tokens=num_accepted,
    )


def _prune(run: LoopParts, iteration: Iteration) -> Beams:
    """Drop all but the survivors from forest and caches; return the beams renumbered."""
    renumbered = run.forest.prune(iteration.survivors)
    for runner in run.runners:
        runner.prune()
    beams = iteration.beams
    return Beams(renumbered[beams.nodes], beams.log_weights, beams.hypotheses, beams.copies)


def _finish(run: LoopParts, beams: Beams) -> DecodeResult:
    """Leave the caches to the next request; return the best sequences and the statistics."""
    request, hypotheses = run.request, run.hypotheses
    agreed = hypotheses.tokens[hypotheses.common(beams.hypotheses)].tolist()
    for runner in run.runners:
        runner.finish([*request.prompt_ids, *agreed])
    best = run.rule.results(beams)
    if not len(best.hypotheses):  # given up before any has ended
        scores = hypotheses.scores(beams.hypotheses, request.config.length_penalty)
        best = Finished(beams.hypotheses, scores).ranked()
    best = best.first(request.config.num_return_sequences)
    sequences = decoded_sequences(
        best, hypotheses, request.finish_reason, run.target.distributions.tops
    )
    num_output_tokens = len(sequences[0].token_ids)
    request.estimator.learn_length(num_output_tokens)
    if request.ngram_pool is not None:
        request.ngram_pool.add_text([*request.prompt_ids, *sequences[0].token_ids])
    stats = run.stats.stats(num_output_tokens)
    num_bytes = sum(runner.distributions.bytes_peak for runner in run.runners)
    scorer = run.target.scorer
    return DecodeResult(sequences, stats, num_bytes, scorer.result() if scorer else None)
