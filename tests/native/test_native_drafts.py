"""Drafting of the native library: what n-grams propose, draft policies decide, calls cost."""

import json
import math
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsbd_forward.forward import ForwardResult
from dsbd_forward.logits import DenseLogits
from dsbd_ort.decoding.drafting.acceptance import WHOLE, AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import (
    CostCurve,
    CostKind,
    EngineCosts,
    LearnedCosts,
    RequestCosts,
)
from dsbd_ort.decoding.drafting.ngram import NGramDrafter, NGramPool
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from dsbd_ort.decoding.engine_call import Meter
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.joint_distribution import STAY, JointDistribution, best_candidates
from dsbd_ort.decoding.stats import StatsRecorder

Case = dict[str, Any]
KINDS: tuple[CostKind, ...] = ("target", "draft", "source")


@pytest.fixture(scope="module")
def native(native_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from the cases to what drafts_test prints of them."""
    file = tmp_path_factory.mktemp("drafts") / "cases.json"

    def run(**cases: list[Case]) -> Any:
        file.write_text(
            json.dumps({"ngrams": [], "costs": [], "policies": [], "stats": [], **cases})
        )
        command = [native_build / "tests" / "drafts_test", file]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    return run


def text(rng: random.Random, length: int, num_words: int) -> list[int]:
    """Return tokens that repeat themselves in parts, as texts do."""
    tokens = [rng.randrange(num_words) for _ in range(max(length // 3, 1))]
    while len(tokens) < length:
        start = rng.randrange(len(tokens))
        tokens += [*tokens[start : start + rng.randrange(1, 12)], rng.randrange(num_words)]
    return tokens[:length]


def ngram_case(rng: random.Random) -> Case:
    num_words, prompt = rng.choice([3, 12, 200]), []
    prompt = text(rng, rng.choice([1, 4, 30, 200]), num_words)
    copied = text(rng, rng.choice([0, 0, 25, 90]), num_words)
    is_late = bool(copied) and rng.random() < 0.3
    source, num_nodes, operations = copied or prompt, 1, list[list[Any]]()
    for step in range(rng.randrange(5, 40)):
        parents = [rng.randrange(num_nodes) for _ in range(rng.randrange(1, 5))]
        is_edit = rng.random() < 0.2
        tokens = [
            rng.randrange(num_words) if is_edit else source[step % len(source)] for _ in parents
        ]
        operations.append(["add", parents, tokens])
        num_nodes += len(parents)
        nodes = [rng.randrange(num_nodes) for _ in range(4)]
        operations += [["learn", nodes[:2]], ["propose", nodes]]
        if rng.random() < 0.3:
            kept = sorted(rng.sample(range(num_nodes), rng.randrange(1, num_nodes)))
            operations.append(["prune", kept])
            num_nodes = len(kept)
    return {
        "prompt": prompt,
        "pool": rng.choice([0, 40, 1000]),
        "texts": [text(rng, rng.randrange(1, 60), num_words) for _ in range(rng.randrange(4))],
        "temperature": rng.choice([1.0, 0.7, 0.05, 2.5]),
        "only_long_matches": rng.random() < 0.4,
        "num_beams": rng.choice([1, 4]),
        "copied": [] if is_late else copied,
        "late": copied if is_late else None,
        "operations": operations,
    }


def ngram_proposals(case: Case) -> list[Any]:
    pool = NGramPool(case["pool"])
    for each in case["texts"]:
        pool.add_text(each)
    late = case["late"]
    drafter = NGramDrafter(
        case["prompt"],
        pool,
        case["temperature"],
        only_long_matches=case["only_long_matches"],
        copied_ids=case["copied"] if late is None else lambda: late,
        num_beams=case["num_beams"],
    )
    found: list[Any] = []
    for name, *arguments in case["operations"]:
        nodes, *tokens = map(np.array, arguments)
        if name == "add":
            drafter.paths.add(nodes, *tokens)
        elif name == "learn":
            drafter.learn(nodes)
        elif name == "prune":
            drafter.paths.prune(nodes, np.zeros(len(nodes), np.int64))
        else:
            proposed = drafter.proposals(nodes)
            for path, unlisted in enumerate(proposed.unlisted.tolist()):
                of_path = proposed.paths == path
                tokens_of = proposed.tokens[of_path].tolist()
                found.append([tokens_of, proposed.log_probs[of_path].tolist(), unlisted])
    return found


@pytest.mark.parametrize("number", [60, pytest.param(3000, marks=pytest.mark.long)])
def test_ngram_proposals_equal_pythons(number: int, native: Any) -> None:
    rng = random.Random(11)
    cases = [ngram_case(rng) for _ in range(number)]
    expected = [ngram_proposals(case) for case in cases]
    assert native(ngrams=cases)["ngrams"] == expected
    assert sum(bool(tokens) for case in expected for tokens, _, _ in case) > 5 * number


def cost_case(rng: random.Random, number: int) -> Case:
    calls = []
    for _ in range(number):
        kind = rng.choices([0, 1, 2], [6, 6, 1])[0]
        rows = rng.choice(
            [1, 2, 3, 4, 5, 8, 13, 16, 40, 100, 256, 300, 5000][: rng.randrange(1, 14)]
        )
        calls.append(timed_call(rng, kind, rows))
    calls[7][2] = 0.0
    return {"bytes": [1e7, 2e6, rng.choice([0, 10**6])], "calls": calls}


def timed_call(rng: random.Random, kind: int, rows: int) -> list[Any]:
    one_row = 1e-3 if kind == 0 else 2.3e-4
    return [kind, rows, one_row * (1 + 0.04 * min(rows, 256)) * rng.uniform(0.9, 1.6)]


def learned_curves(case: Case) -> list[Any]:
    costs, found, last = LearnedCosts(*map(int, case["bytes"])), list[Any](), None
    for kind, num_rows, seconds in case["calls"]:
        costs.observe(KINDS[kind], num_rows, seconds)
        if (now := costs.now()) is not last:
            last = now
            curves = (now.target, now.draft, now.source)
            found.append([[list(c.seconds), c.seen and list(c.seen)] for c in curves])
    return found


def flat(value: Any) -> list[Any]:
    """Return all numbers, -1 for None."""
    if isinstance(value, list):
        return [number for each in value for number in flat(each)]
    return [-1 if value is None else value]


def test_learned_costs_equal_pythons(native: Any) -> None:
    """To rounding: numpy fits the line by a singular value decomposition."""
    rng = random.Random(5)
    cases = [cost_case(rng, 150) for _ in range(10)]
    for expected, found in zip(
        map(learned_curves, cases), native(costs=cases)["costs"], strict=True
    ):
        np.testing.assert_allclose(flat(found), flat(expected), rtol=1e-9)


def policy_case(rng: random.Random, num_iterations: int) -> Case:
    num_beams, most_layers = rng.choice([1, 2, 4, 8]), rng.randrange(1, 9)
    most_beams = num_beams * rng.choice([1, 2, 4])
    quality = rng.choice([0.0, 0.1, 0.5, 5.0])  # of the draft: how far it is off
    are_learned = rng.random() < 0.5
    return {
        "costs": [engine_costs(rng, are_learned) for _ in range(5)],
        "num_beams": num_beams,
        "agreement": rng.choice([None, 0.05, 0.7, 1.0]),
        "most_layers": most_layers,
        "most_beams": most_beams,
        "most_rows": (most_layers + 2) * (most_beams + num_beams),
        "has_draft_model": rng.random() < 0.7,
        "may_rest": rng.random() < 0.8,
        "requests": [
            [policy_iteration(rng, most_layers, quality) for _ in range(num_iterations)]
            for _ in range(2)
        ],
    }


def engine_costs(rng: random.Random, are_learned: bool) -> list[Any]:
    """Return rows, seconds of target, draft and source, and the rows that were seen or none."""
    rows = [1, 2, 4, 8, 16, 32]
    steps = [rng.choice([0.0, 0.02, 0.3]) * n for n in rows]
    target = [
        rng.uniform(1e-3, 1.1e-3) * 1.0 + 1e-3 * sum(steps[: i + 1]) for i in range(len(rows))
    ]
    target.sort()
    one_row = 2e-4 * rng.choice([0.1, 1.0, 3.0])
    draft = [one_row * (1.0 + 0.02 * n) for n in rows]
    seen = [rng.randrange(1, 9), rng.randrange(9, 33)] if are_learned else None
    return [rows, target, draft, [1e-6 * n for n in rows], seen]


def policy_iteration(rng: random.Random, most_layers: int, quality: float) -> Case:
    return {
        "before": rng.uniform(0.0, 1e-4),
        "host": rng.choice([2e-4, 3e-4, 5e-3]) * rng.uniform(0.5, 1.0),
        "target": rng.uniform(0.0, 3e-3),
        "unread": rng.choice([[0, 0], [0, 0], [300, 0], [20, 40]]),
        "context_size": rng.choice([8, 64, 100, 300, 512, WHOLE]),
        "num_sharers": rng.choice([1, 1, 1, 2, 3, 8]),
        "num_pending": rng.randrange(1, 9),
        "most_layers": rng.choice([0, 3, 100]),
        "layers": [policy_layer(rng, quality) for _ in range(most_layers + 2)],
        "num_committed": rng.randrange(1, most_layers + 2),
        "has_all_ended": rng.random() < 0.05,
        "num_calls": rng.choice([0, 0, 1]),  # after which other costs are known
    }


def policy_layer(rng: random.Random, quality: float) -> Case:
    noise = [-math.log(-math.log(rng.uniform(1e-9, 1.0 - 1e-9))) for _ in range(37)]
    return {
        "log_probs": [rng.uniform(-8.0, 0.0) for _ in range(rng.choice([1, 3, 8, 20]))],
        "log_unlisted": rng.choice([None, None, -3.0]),
        "noise": noise,
        "target_noise": [each + quality * rng.gauss(0.0, 1.0) for each in noise],
        "num_rows": rng.randrange(0, 9),
        "is_forced": rng.random() < 0.1,
        "is_whole": rng.random() < 0.1,
    }


class ChangingCosts:
    """Costs: the next of some after every call."""

    def __init__(self, given: list[Any]) -> None:
        self._known, self._number = [], 0
        for rows, *seconds, seen in given:
            curves = [CostCurve(tuple(rows), tuple(each), seen) for each in seconds]
            self._known.append(EngineCosts(*curves))

    def now(self) -> EngineCosts:
        return self._known[self._number % len(self._known)]

    def observe(self, kind: CostKind, num_rows: int, seconds: float) -> None:
        self._number += 1


class PolicyReplay:
    """One setting of the draft policy, on layers that the case describes; as drafts_test does."""

    def __init__(self, case: Case) -> None:
        self.case, self.found = case, list[Any]()
        self.estimator = AcceptanceEstimator.of_pair(case["agreement"])
        self.host = self.target = 0.0
        self.unread, self.context_size, self.num_sharers = (0, 0), WHOLE, 1
        self.costs = ChangingCosts(case["costs"])
        for request in case["requests"]:
            policy = self.policy()
            for iteration in request:
                self.iterate(policy, iteration)

    def policy(self) -> ThroughputDraftPolicy:
        case = self.case
        names = ("num_beams", "most_rows", "most_beams", "has_draft_model")
        limits = {name: case[name] for name in names}
        return ThroughputDraftPolicy(
            RequestCosts(self.costs, lambda: self.num_sharers, **limits),
            self.estimator,
            lambda joint, _: noisy(joint, self.layer["noise"]),
            Forest(1, 0, 0, frozenset({0})),
            most_layers=case["most_layers"],
            host_seconds=lambda: self.host,
            target_seconds=lambda: self.target,
            unread=lambda: self.unread,
            context_size=lambda: self.context_size,
            may_rest=case["may_rest"],
        )

    def iterate(self, policy: ThroughputDraftPolicy, given: Case) -> None:
        self.forest = policy._forest = Forest(1, 0, 0, frozenset({0}))
        self.joints: list[JointDistribution] = []
        self.num_sharers = given["num_sharers"]
        self.host += given["before"]
        self.target += given["target"]
        self.unread, self.context_size = tuple(given["unread"]), given["context_size"]
        decisions: list[Any] = []
        num_drafted = 0
        if num_to_rest := policy.rest():
            decisions.append(num_to_rest)
        else:
            policy.begin(given["num_pending"], given["most_layers"])
            num_drafted = self.draft(policy, given["layers"], decisions)
        self.host += given["host"]
        for _ in range(given["num_calls"]):
            self.costs.observe("target", 1, 0.0)
        committed: Any = self.committed(given, num_drafted)
        policy.observe(SimpleNamespace(committed=committed))  # type: ignore[arg-type]
        self.found.append([decisions, self.state()])

    def draft(self, policy: ThroughputDraftPolicy, layers: list[Case], decisions: list[Any]) -> int:
        nodes, log_weights = np.zeros(1, np.int64), np.zeros(1)
        for number, self.layer in enumerate(layers):
            joint = self.joint(nodes, log_weights)
            decisions.append(policy.wants_layer(0))
            if not decisions[-1]:
                return number
            num_candidates = len(joint.tokens)
            num_whole = num_candidates if policy.takes_all(num_candidates, len(nodes)) else 0
            decisions.append(num_whole)
            if not self.layer["is_forced"]:
                whole = num_whole if self.layer["is_whole"] else 0
                decisions.append(policy.wants_layer(self.layer["num_rows"], whole))
                if not decisions[-1]:
                    return number
            is_forced = self.layer["is_forced"]
            drawn = policy.choose_forced(joint) if is_forced else policy.choose(joint, 0)
            decisions.append(drawn.tolist())
            self.joints.append(joint)
            if not len(drawn):
                return number
            nodes, log_weights = self.forest.descend(joint, drawn), joint.log_weights[drawn]
        return len(layers)

    def joint(self, nodes: Any, log_weights: Any) -> JointDistribution:
        log_probs, found = self.layer["log_probs"], list[tuple[int, int, float]]()
        for beam, has_ended in enumerate(self.forest.is_absorbing[nodes].tolist()):
            if has_ended:
                found.append((beam, STAY, 0.0))
                continue
            size = len(log_probs)
            found += [(beam, k, log_probs[(k + 3 * beam) % size]) for k in range(size)]
        parents, tokens, raw = map(np.array, zip(*found, strict=True))
        weights = log_weights[parents] + raw
        joint = JointDistribution(nodes, parents, tokens, weights, weights, raw, 0)
        if self.layer["log_unlisted"] is not None:
            joint.log_unlisted = self.layer["log_unlisted"]
        return joint

    def committed(self, given: Case, num_drafted: int) -> list[Any]:
        found = []
        for joint, layer in zip(
            self.joints[: given["num_committed"]], given["layers"], strict=False
        ):
            best = best_candidates(noisy(joint, layer["target_noise"]), self.case["num_beams"])
            is_over = given["has_all_ended"]
            found.append(np.arange(0) if is_over else self.forest.descend(joint, best))
        if len(found) <= num_drafted:
            found.append(np.zeros(1, np.int64))
        return [SimpleNamespace(nodes=nodes) for nodes in found]

    def state(self) -> list[Any]:
        e, budget = self.estimator, self.estimator.budget(self.num_sharers)
        return [
            *(e.rates.tolist(), e.tokens, e.calls, e.acceptance, e.rows, e.num_learned),
            *(e.loop.iteration, e.loop.layer, e.agreement(64), e.agreement(1000)),
            *(budget.balance, budget.share, budget.saved, budget.gained),
        ]


def noisy(joint: JointDistribution, noise: list[float]) -> Any:
    return joint.log_weights + np.resize(np.array(noise), len(joint.tokens))


@pytest.mark.parametrize("number", [12, pytest.param(300, marks=pytest.mark.long)])
def test_draft_policies_decide_as_pythons(number: int, native: Any) -> None:
    """To the last bit, except a product of vectors, which BLAS adds in an order of its own."""
    rng = random.Random(2)
    cases = [policy_case(rng, 20) for _ in range(number)]
    num_rests = num_drafts = 0
    for case, found in zip(cases, native(policies=cases)["policies"], strict=True):
        expected = PolicyReplay(case).found
        for i, ((ours, our_state), (theirs, their_state)) in enumerate(
            zip(expected, found, strict=True)
        ):
            assert theirs == ours, i
            np.testing.assert_allclose(flat(their_state), flat(our_state), rtol=1e-12, atol=1e-15)
            num_rests += len(ours) == 1 and ours[0] is not False
            num_drafts += any(isinstance(each, list) and each for each in ours)
    assert num_rests > number and num_drafts > number


def stats_case(rng: random.Random) -> Case:
    iterations = []
    for _ in range(rng.randrange(1, 9)):
        num_drafted = rng.randrange(4)
        widths = [rng.randrange(5) for _ in range(rng.randrange(1, num_drafted + 2))]
        tokens = rng.randrange(num_drafted + 1)
        iterations.append(
            {
                "seconds": rng.uniform(0.01, 0.1),
                "rows": rng.randrange(1, 9),
                "num_drafted": num_drafted,
                "num_draft_tokens": tokens,
                "num_accepted_tokens": rng.randrange(tokens + 1),
                "widths": widths,
            }
        )
    numbers = {"num_prompt_tokens": 5, "num_output_tokens": rng.choice([1, 2, 9])}
    return {**numbers, "iterations": iterations}


def recorded(case: Case) -> list[Any]:
    now, target, draft = 0.0, Meter(), Meter()
    untimed = ForwardResult(DenseLogits(np.zeros((0, 1), np.float32)))
    recorder = StatsRecorder(case["num_prompt_tokens"], target, draft, lambda: now, "ngram")
    for each in case["iterations"]:
        now += each["seconds"]
        target.count(each["rows"], 0.25 * each["seconds"], untimed)
        draft.count(1, 0.125 * each["seconds"], untimed)
        iteration: Any = SimpleNamespace(
            drafted=[None] * each["num_drafted"],
            num_draft_tokens=each["num_draft_tokens"],
            num_accepted_tokens=each["num_accepted_tokens"],
            committed=[SimpleNamespace(width=width) for width in each["widths"]],
        )
        recorder.observe(iteration)
    fields = vars(recorder.stats(case["num_output_tokens"]))
    return [fields[name] for name in fields if name not in ("kv_bytes_peak", "energy_joules")]


def test_statistics_equal_pythons(native: Any) -> None:
    rng = random.Random(1)
    cases = [stats_case(rng) for _ in range(50)]
    assert native(stats=cases)["stats"] == [recorded(case) for case in cases]
