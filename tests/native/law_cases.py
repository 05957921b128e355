"""Next-token distributions after nodes of tables, drawn at random, as Python makes them.

    python -m tests.native.law_cases FOLDER NUMBER SEED

writes into FOLDER what ``native/tests/laws_test.cpp`` reads, ``cases.json``, ``floats`` (float32)
and ``ids`` (int64), and what it should write: ``expected`` (int64, of floats the bits), and in
``expected.json`` how many numbers each case has there, or the text of its error. Of a case

    options, prompt, trie: of the request; vocab_size, num_top, keeps_full, is_draft: of the engine
    nodes: parent and token of node 1, 2, ... below the last token of the prompt, node 0
    first_float, first_id: where the logits of all nodes begin, (num_nodes, vocab_size), of a top-k
        head followed by top_logits and logsumexp; and its top_ids
    num_first: nodes of the first of two calls; narrowed: whether the search reads few tokens
    beams, log_weights, copies: of a joint distribution; tokens: one after each beam
    kept: slots that are kept at the end; num_wanted: candidates
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_errors import DsbdError
from dsbd_forward.logits import DenseLogits, Logits, TopLogits
from dsbd_forward.spec import EngineSpec, HeadSpec
from dsbd_ort import TokenTrie
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.computed_distributions import ComputedDistributions, LeftOut
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.joint_distribution import JointDistribution, best_candidates
from dsbd_ort.decoding.logits_processing.request_processing import RequestProcessing
from dsbd_ort.decoding.noise import noisy
from dsbd_ort.decoding.top_tokens import top_logprobs_of
from dsbd_ort.decoding.warp import Warp, check_top_k, num_searched
from tests.decoding.top_table import candidates_of

SEED, DEPTH, NUM_TOPS = 7, 5, 7
LEFT_OUT = [LeftOut.NOTHING, LeftOut.READ, LeftOut.GONE]
WIDTHS = [(20, 60), (100, 300), (1000, 2100), (2048, 5000), (9000, 40000)]
"""Of vocabularies: several of the ways to sum, to sort and to find the largest."""


@dataclass
class Full:
    """All logits of a top-k head."""

    logits: NDArray[np.float32]

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.logits[rows]

    def read_tokens(
        self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        return self.logits[rows, token_ids]


@dataclass
class Files:
    """Numbers that the cases have written so far."""

    floats: list[NDArray[np.float32]] = field(default_factory=list)
    ids: list[NDArray[np.int64]] = field(default_factory=list)

    def add(self, floats: list[NDArray[np.float32]], ids: list[NDArray[np.int64]]) -> None:
        self.floats += [each.ravel() for each in floats]
        self.ids += [each.ravel() for each in ids]

    @property
    def sizes(self) -> tuple[int, int]:
        return sum(map(len, self.floats)), sum(map(len, self.ids))


class Case:
    """One request, the nodes of its forest, and their logits."""

    def __init__(self, rng: np.random.Generator, folder: Path, number: int) -> None:
        self._rng, self._folder = rng, folder
        vocab_size = int(rng.integers(*WIDTHS[rng.choice(5, p=[0.4, 0.3, 0.15, 0.13, 0.02])]))
        prompt = rng.integers(vocab_size, size=rng.integers(1, 9)).tolist()
        num_top = int(rng.integers(1, min(vocab_size, 300))) if rng.random() < 0.6 else 0
        self.given: dict[str, Any] = {
            "vocab_size": vocab_size,
            "num_top": num_top,
            "keeps_full": bool(num_top and rng.random() < 0.7),
            "is_draft": bool(rng.random() < 0.3),
            "narrowed": bool(rng.random() < 0.3),
            "prompt": prompt,
            "options": self._options(vocab_size, prompt),
            "trie": f"{number}.trie" if rng.random() < 0.25 else None,
            "num_wanted": int(rng.choice([1, 4, 40, 400])),
        }
        if "no_timestamps_token_id" in self.given["options"]:
            self.given["trie"] = None  # the two are refused together
        self._trie = self._made_trie() if self.given["trie"] else None
        self._draw_nodes()
        self._logits = self._table()

    def _maybe(self, options: dict[str, Any], share: float) -> dict[str, Any]:
        return {n: value for n, value in options.items() if self._rng.random() < share}

    def _options(self, vocab_size: int, prompt: list[int]) -> dict[str, Any]:
        rng = self._rng
        some = lambda n: rng.integers(vocab_size, size=n).tolist()  # noqa: E731
        strategy = str(rng.choice(["beam-sample", "sample", "beam-search", "greedy", "dsbd"]))
        options: dict[str, Any] = {"strategy": strategy, "max_new_tokens": int(rng.integers(3, 9))}
        if strategy in ("beam-sample", "beam-search", "dsbd"):
            options["num_beams"] = int(rng.integers(2, 7))
        if strategy in ("beam-sample", "sample", "dsbd"):
            options["temperature"] = float(rng.choice([0.3, 0.5, 1.0, 1.0, 1.7, 2.0]))
            warps = {
                "top_k": int(rng.choice([1, 5, 50, 400])),
                "top_p": float(rng.choice([0.2, 0.9, 0.999, 1.0 - 1e-12])),
                "min_p": float(rng.choice([0.5, 0.02, 1e-6])),
                "typical_p": float(rng.choice([0.2, 0.95])),
            }
            options |= self._maybe(warps, 0.4)
        if rng.random() < 0.7:
            options["eos_token_id"] = some(rng.integers(1, 4))
        if rng.random() < 0.5:
            return options
        processors = {
            "repetition_penalty": float(rng.choice([0.8, 1.3])),
            "presence_penalty": float(rng.choice([0.7, -0.2])),
            "frequency_penalty": float(rng.choice([0.31, -0.2])),
            "no_repeat_ngram_size": int(rng.integers(1, 4)),
            "encoder_no_repeat_ngram_size": int(rng.integers(1, 3)),
            "bad_words_ids": [some(1), some(2), [prompt[-1], *some(1)]],
            "logit_bias": [[token, float(rng.normal())] for token in set(some(5))],
            "suppress_tokens": some(4),
            "begin_suppress_tokens": some(3),
            "min_new_tokens": int(rng.integers(1, 3)),
            "forced_bos_token_id": some(1)[0],
            "forced_eos_token_id": some(1)[0],
        }
        options |= self._maybe(processors, 0.25)
        if rng.random() < 0.15:
            first = int(rng.integers(3, vocab_size - 9))
            times = {
                "max_initial_timestamp_index": int(rng.integers(5)),
                "last_timestamp_token_id": first + 7,
            }
            options |= {"no_timestamps_token_id": first, **self._maybe(times, 0.5)}
        return options

    def _made_trie(self) -> TokenTrie:
        rng, eos = self._rng, self.given["options"].get("eos_token_id")
        allowed = np.setdiff1d(np.arange(self.given["vocab_size"]), eos or [])
        lengths = rng.integers(1, 5, size=rng.integers(1, 60))
        sequences = [rng.choice(allowed[:12], size=n).tolist() for n in lengths]
        trie = TokenTrie.from_sequences(sequences, end="eos" if eos and rng.integers(2) else "leaf")
        file = self._folder / self.given["trie"]
        trie.save(file)
        return TokenTrie.load(file)

    def _draw_nodes(self) -> None:
        rng, given = self._rng, self.given
        eos = given["options"].get("eos_token_id") or []
        paths: list[tuple[int, ...]] = [()]
        nodes = []
        for _ in range(rng.integers(1, 8)):
            parent = int(rng.integers(len(paths)))
            if self._trie is None:
                token = int(rng.choice([rng.integers(given["vocab_size"]), given["prompt"][0]]))
            else:
                token = self._following(paths[parent])
            path = (*paths[parent], token)
            if token in eos or path in paths or token < 0:
                continue
            paths.append(path)
            nodes.append((parent, token))
        num_nodes = len(paths)
        num_beams = int(rng.integers(1, num_nodes + 1))
        given["nodes"] = nodes
        given["num_first"] = int(rng.integers(num_nodes))
        given["beams"] = rng.permutation(num_nodes)[:num_beams].tolist()
        given["log_weights"] = (-rng.exponential(3.0, num_beams)).tolist()
        draws = rng.integers(1, 4, num_beams).tolist()
        is_search = given["options"]["strategy"] in ("beam-search", "greedy")
        given["copies"] = draws if rng.random() < 0.3 and not is_search else []
        given["tokens"] = rng.integers(given["vocab_size"], size=num_beams).tolist()

    def _following(self, path: tuple[int, ...]) -> int:
        assert self._trie is not None
        states = self._trie.start([])
        for token in path:
            states = self._trie.advance(states, np.array([token]))
        tokens = self._trie.allowed(states).tokens
        return int(self._rng.choice(tokens)) if len(tokens) else -1

    def _table(self) -> Logits:
        """Return logits of several kinds: peaked, flat, with ties, with -inf, wrong ones."""
        rng, given = self._rng, self.given
        shape = len(given["nodes"]) + 1, given["vocab_size"]
        values = rng.normal(size=shape) * rng.choice([0.01, 1.0, 4.0, 30.0]) + rng.normal() * 9.0
        if rng.random() < 0.25:
            values = np.round(values * 2.0) / 2.0
        if rng.random() < 0.2:
            values[rng.random(shape) < rng.choice([0.1, 0.9])] = -np.inf
            values[:, rng.integers(shape[1])] = 1.0
        table = values.astype(np.float32)
        row, column = int(rng.integers(shape[0])), int(rng.integers(shape[1]))
        wrong = rng.random()
        if wrong < 0.05:
            table[row, column] = rng.choice([np.nan, np.inf, -np.inf])
        if wrong < 0.01:
            table[row] = -np.inf
        if not given["num_top"]:
            return DenseLogits(table)
        with np.errstate(all="ignore"):
            top = candidates_of(table, given["num_top"])
        ids = top.top_ids.copy()
        if 0.06 < wrong < 0.07:
            ids[row, 0] = rng.choice([-1, shape[1]])
        kept = Full(table) if given["keeps_full"] else None
        return TopLogits(ids, top.top_logits, top.logsumexp, kept)

    def written(self, files: Files) -> dict[str, Any]:
        self.given["first_float"], self.given["first_id"] = files.sizes
        logits = self._logits
        if isinstance(logits, TopLogits):
            table = logits.kept.logits if isinstance(logits.kept, Full) else self._no_table()
            files.add([table, logits.top_logits, logits.logsumexp], [logits.top_ids])
        elif isinstance(logits, DenseLogits):
            files.add([logits.values], [])
        return self.given

    def _no_table(self) -> NDArray[np.float32]:
        return np.zeros((len(self._logits), self.given["vocab_size"]), np.float32)

    def expected(self) -> list[int]:
        return Outcome(self.given, self._logits, self._trie).numbers()


class Outcome:
    """The distributions that Python makes of a case."""

    def __init__(self, given: dict[str, Any], logits: Logits, trie: TokenTrie | None) -> None:
        self._given, self._logits, self._numbers = given, logits, [np.zeros(0, np.int64)]
        options = {**given["options"], "logit_bias": dict(given["options"].get("logit_bias", []))}
        config = DecodingConfig(**options, constraint=trie).settled(costs_are_known=True)
        self._config = config
        head = HeadSpec(num_top_logits=given["num_top"], keeps_full_logits=given["keeps_full"])
        self._spec = EngineSpec(vocab_size=given["vocab_size"], head=head)
        check_top_k(self._spec, config)
        self._processing, states = None, []
        prompt = given["prompt"]
        if config.processes_logits:
            self._processing = RequestProcessing(config, trie, prompt, given["vocab_size"])
            states = self._processing.path_states
        self._forest = Forest(prompt[-1], len(prompt) - 1, SEED, config.eos_ids, states)

    def numbers(self) -> list[int]:
        given, forest, config = self._given, self._forest, self._config
        for parent, token in given["nodes"]:
            none = np.zeros(1)
            one = JointDistribution(
                np.array([parent]), np.array([0]), np.array([token]), none, none, none, 0
            )
            forest.descend(one, np.array([0]))
        role, engine = ("draft", 1) if given["is_draft"] else ("target", 0)
        warp = Warp.of(config)
        if given["is_draft"]:
            # The native core has the raw log-probabilities of drafts too.
            warp = replace(warp.within(given["num_top"]), is_draft=False)
        if given["narrowed"]:
            warp = warp.narrowed()
        known = ComputedDistributions(role, self._spec, forest, warp, self._processing)
        slots = forest.slots[engine]
        nodes, half = np.arange(len(forest)), given["num_first"]
        slots[nodes] = np.where(forest.is_absorbing[nodes] == 1, 0, nodes + 1)
        if half:
            known.append(self._logits.part(slice(0, half)), nodes[:half], 1)
        known.append(self._logits.part(slice(half, len(nodes))), nodes[half:], half + 1)
        beams, weights = np.array(given["beams"]), np.array(given["log_weights"])
        joint = known.joint(beams, weights, np.array(given["copies"]) if given["copies"] else None)
        self._write_joint(joint)
        self._write(joint.aligned_to(joint))
        scores = noisy(joint.log_masses, forest.candidate_keys(joint), DEPTH)
        drawn = best_candidates(scores, given["num_wanted"])
        self._write_joint_of(joint, drawn)
        is_live = slots[beams] > 0
        self._write(known.log_probs(beams[is_live], np.array(given["tokens"])[is_live]))
        if config.row.rule == "search":
            self._write_left_out(known, joint, slots[beams])
        self._write_tops()
        kept = np.array(given["kept"])
        known.keep(kept)
        slots[kept - 1] = np.arange(1, 1 + len(kept))
        self._write_joint(known.joint(kept - 1, np.full(len(kept), -1.5), None))
        return np.concatenate(self._numbers).tolist()

    def _write_left_out(
        self, known: ComputedDistributions, joint: JointDistribution, slots: NDArray[np.int64]
    ) -> None:
        most, weights = num_searched(self._config), np.array(self._given["log_weights"])
        best = best_candidates(joint.log_weights, most)
        threshold = joint.log_weights[best[-1]] if len(best) == most else -np.inf
        found = known.left_out.read(known.known, slots, weights, threshold, most)
        self._numbers.append(np.array([LEFT_OUT.index(found)]))
        if found is LeftOut.GONE:
            self._write(known.left_out.gone)
        else:
            self._write_joint(known.joint(np.array(self._given["beams"]), weights, None))

    def _write_tops(self) -> None:
        number, num_top = min(NUM_TOPS, self._given["vocab_size"]), self._given["num_top"]
        if num_top and not self._given["keeps_full"] and num_top < number:
            return
        for tokens, logprobs in zip(*top_logprobs_of(self._logits, number), strict=True):
            self._write(tokens)
            self._write(logprobs)

    def _write_joint_of(self, joint: JointDistribution, chosen: NDArray[np.int64] | slice) -> None:
        for ids in (joint.parents, joint.tokens):
            self._write(ids[chosen])
        for each in (joint.log_weights, joint.log_masses, joint.raw_log_probs):
            self._write(each[chosen])

    def _write_joint(self, joint: JointDistribution) -> None:
        self._write_joint_of(joint, slice(None))
        if len(joint.tokens):
            self._write(joint.probabilities())
        keys = self._forest.candidate_keys(joint)
        for draw in (None, 3):
            scores = noisy(joint.log_masses, keys, DEPTH, draw)
            self._write(scores)
            self._write(best_candidates(scores, self._given["num_wanted"]))

    def _write(self, numbers: NDArray[Any]) -> None:
        bits = np.ascontiguousarray(numbers).view(np.int64)
        self._numbers += [np.array([len(bits)]), bits]


PORTABLE = {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR"}
"""With AVX-512 numpy has an exp and a log of its own for float64, which round otherwise."""


def check_portable() -> None:
    """Refuse a numpy whose exp of float64 is not the C library's, as with AVX-512."""
    numbers = np.linspace(-40.0, 0.0, 1000)
    if np.exp(numbers).tolist() != [math.exp(number) for number in numbers]:
        sys.exit("numpy has an exp of its own; set NPY_DISABLE_CPU_FEATURES for this version")


def main(folder: Path, number: int, seed: int) -> None:
    check_portable()
    files, cases, outcomes, numbers = Files(), [], [], [np.zeros(0, np.int64)]
    for index in range(number):
        rng = np.random.default_rng([seed, index])
        case = Case(rng, folder, index)
        num_nodes = len(case.given["nodes"]) + 1
        case.given["kept"] = np.sort(
            rng.permutation(num_nodes)[: max(1, num_nodes // 2)] + 1
        ).tolist()
        try:
            found = case.expected()
        except DsbdError as error:
            outcomes.append(str(error))
        else:
            outcomes.append(len(found))
            numbers.append(np.array(found, dtype=np.int64))
        cases.append(case.written(files))
    (folder / "cases.json").write_text(json.dumps(cases))
    np.concatenate([*files.floats, np.zeros(0, np.float32)]).astype("<f4").tofile(folder / "floats")
    np.concatenate([*files.ids, np.zeros(0, np.int64)]).astype("<i8").tofile(folder / "ids")
    (folder / "expected.json").write_text(json.dumps(outcomes))
    np.concatenate(numbers).tofile(folder / "expected")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
