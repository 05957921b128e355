"""The rejection coupling is exact: every draft, coin and draw through the real code."""

from functools import cache

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig, TableModel
from dsbd_ort.decoding.drafting.draft import DraftLayer
from dsbd_ort.decoding.joint_distribution import JointDistribution
from dsbd_ort.decoding.rejection_coupling import RejectionCoupling
from tests.decoding.exact_laws import ScriptedChance, beam_sampling_law, law_of, total_variation
from tests.decoding.tables import (
    decoded,
    final_beams,
    joint_of,
    mixed_table,
    random_table,
    request_on,
)

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB = 3


def random_law(
    rng: np.random.Generator, nodes: list[int], absorbing: int | None, vocab_size: int
) -> JointDistribution:
    tokens = list(range(vocab_size))
    laws = [
        None if node == absorbing else (tokens, rng.dirichlet(np.ones(vocab_size)))
        for node in nodes
    ]
    return joint_of(nodes, np.log(rng.dirichlet(np.ones(len(nodes)))), laws)


def drawn_one_by_one(law: JointDistribution, num_draws: int, replacement: bool) -> dict:
    """The law of sequential draws, written without the code under test."""

    def draw(rest: tuple[tuple[int, float], ...], count: int) -> dict:
        if count == 0 or not rest:
            return {(): 1.0}
        total, outcomes = sum(p for _, p in rest), {}
        for i, (candidate, p) in enumerate(rest):
            left = rest if replacement else rest[:i] + rest[i + 1 :]
            for tail, share in draw(left, count - 1).items():
                outcomes[(candidate, *tail)] = (
                    outcomes.get((candidate, *tail), 0) + p / total * share
                )
        return outcomes

    return draw(tuple(enumerate(law.probabilities().tolist())), num_draws)


LAYERS = {  # name: (target's nodes, draft's nodes, absorbing node)
    "one beam": ([0], [0], None),
    "same beams": ([0, 1], [0, 1], None),
    "most draft beams not accepted": ([2], [0, 1, 2], None),
    "an absorbing beam": ([0, 1], [0, 1], 1),
    "no common beam": ([0], [1], None),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
def test_one_layer_has_the_law_of_sequential_draws(layer, replacement, width, num_drafts):
    target_nodes, draft_nodes, absorbing = LAYERS[layer]
    has_many_outcomes = num_drafts + width > 5 and len(draft_nodes) * len(target_nodes) > 1
    vocab_size = 2 if has_many_outcomes else VOCAB
    rng = np.random.default_rng(0)
    p = random_law(rng, target_nodes, absorbing, vocab_size)
    q = random_law(rng, draft_nodes, absorbing, vocab_size)

    def run(chance: ScriptedChance) -> tuple[int, ...]:
        coupling = RejectionCoupling(chance, replacement)
        drawn = coupling.propose(q, num_drafts, 0)
        layer = DraftLayer(drawn, np.arange(0), 0, q)
        return tuple(coupling.choose(p, layer, width, 0)[0].tolist())

    expected = drawn_one_by_one(p, width, replacement)
    assert total_variation(law_of(run), expected) < 1e-12


TARGET = random_table(21, VOCAB, spread=1.0)
DRAFT = mixed_table(TARGET, random_table(22, VOCAB), 0.5)

COMPOSED = [  # (options, steps, eos)
    ({"strategy": "speculative", "draft_length": 2}, 3, 0),
    ({"strategy": "tree-speculative", "draft_length": 1, "draft_beams": 2}, 3, 0),
    ({"strategy": "dsbd", "num_beams": 2, "draft_length": 1, "draft_beams": 2}, 2, 0),
    ({"strategy": "dsbd", "num_beams": 2, "draft_length": 1, "draft_beams": 3}, 2, -1),
    ({"strategy": "dsbd", "num_beams": 2, "draft_length": 1, "replacement": True}, 2, 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "steps", "eos"), COMPOSED)
def test_whole_requests_have_the_law_of_beam_sampling(options, steps, eos):
    prompt = (1, 2)
    config = DecodingConfig(
        coupling="rejection",
        max_new_tokens=steps,
        eos_token_id=() if eos < 0 else eos,
        num_return_sequences=options.get("num_beams", 1),
        **({"width_policy": "fixed"} | options),
    )
    target, draft = cache(TARGET), cache(DRAFT)

    def run(chance: ScriptedChance) -> tuple:
        request = request_on(config, prompt, random_source=chance)
        return final_beams(decoded(request, TableModel(VOCAB, target), TableModel(VOCAB, draft)))

    expected = beam_sampling_law(TARGET, prompt, config.num_beams, steps, eos, config.replacement)
    assert total_variation(law_of(run), expected) < 1e-12
