"""Distributions of a request with processors or a constraint (docs/algorithm.md 3.8).

In every position: raw scores, processors, constraint, then the warping. Only tokens that may be
drawn are kept, so that a node under a tight constraint costs a few entries and not a vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import Logits
from dsbd_forward.rows import largest_columns
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.distribution import ListedDistributions
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.logits_processing.allowed_after import (
    AllowedAfter,
    AllowedMass,
    ForbiddenTokens,
)
from dsbd_ort.decoding.logits_processing.candidates import Candidates, Scores
from dsbd_ort.decoding.logits_processing.constraint import Constraint
from dsbd_ort.decoding.logits_processing.path_states import (
    ConstraintStates,
    Nodes,
    PathStates,
    PathTokens,
    Tokens,
)
from dsbd_ort.decoding.logits_processing.processors import processors_of
from dsbd_ort.decoding.logits_processing.scorer import ScorerStates
from dsbd_ort.decoding.option_values import shown
from dsbd_ort.decoding.warp import Warp

Rows = NDArray[np.int64]


class RequestProcessing:
    """The processors and the constraint of a request, as both engines apply them.

    forbidden, mass: note what constraint and processors leave out of the target's distributions.
    """

    def __init__(
        self,
        config: DecodingConfig,
        constraint: Constraint | None,
        prompt_ids: Sequence[int],
        vocab_size: int,
        forbidden: ForbiddenTokens | None = None,
        source: Sequence[int] | None = None,
        mass: AllowedMass | None = None,
    ) -> None:
        """Begin a request that ``processes_logits``; ``source``: its tokens, if it has one."""
        self._warp = Warp.of(config)
        self._processes_log_probs = self._warp.is_raw and config.num_beams > 1
        read = prompt_ids if source is None else source
        eos = np.array(sorted(config.eos_ids), int)
        self._scorers = [ScorerStates(scorer, prompt_ids, eos) for scorer in config.scorers]
        self.processors = [
            *processors_of(config, len(prompt_ids), vocab_size, read),
            *self._scorers,
        ]
        self.paths = PathTokens(prompt_ids, vocab_size)
        self.constraint: ConstraintStates | None = None
        if constraint is not None:
            self.constraint = ConstraintStates(constraint, prompt_ids, eos)
        self.forbidden, self.mass = forbidden, mass

    @property
    def path_states(self) -> list[PathStates]:
        return [self.paths, *([self.constraint] if self.constraint else []), *self._scorers]

    def distributions(self, logits: Logits, nodes: Nodes, *, is_draft: bool) -> ListedDistributions:
        """Return the distributions after nodes; ``logits``: of these, one row each.

        is_draft: whether tokens that a top-k head left out, and that cannot be read, may stay out.
        """
        allowed = self.allowed_after(nodes)
        if self.forbidden is not None and not is_draft:
            self.forbidden.note(logits, nodes, allowed)
        if (rows := logits.whole) is not None:
            return self._of_all(rows, logits.log_normalizers, nodes, allowed, is_draft)
        listed = allowed.listed()
        if listed is not None and (full := logits.full) is not None:
            is_token, scores = listed >= 0, np.full(listed.shape, -np.inf)
            scores[is_token] = full.read_tokens(is_token.nonzero()[0], listed[is_token])
            candidates = Candidates(self.paths, nodes, listed, self.vocab_size)
            processed = self._processed(scores, logits.log_normalizers, candidates, is_draft)
            return self._listed(candidates, *processed)
        distributions, is_complete = self._of_top(logits, nodes, allowed, is_draft)
        incomplete = np.logical_not(is_complete).nonzero()[0]
        if not len(incomplete) or logits.full is None:
            return distributions
        rows, normalizers = logits.read(incomplete)
        part = nodes[incomplete], allowed.part(incomplete)
        return distributions.replaced(incomplete, self._of_all(rows, normalizers, *part, is_draft))

    @property
    def vocab_size(self) -> int:
        return len(self.paths.shared_counts)

    def allowed_after(self, nodes: Nodes) -> AllowedAfter:
        """Return what the constraint allows; ConstraintError: a token outside the vocabulary."""
        allowed, vocab_size = AllowedAfter.after(nodes, self.constraint), self.vocab_size
        tokens = allowed.listed_tokens
        if tokens.max(initial=0) >= vocab_size or tokens.min(initial=0) < 0:
            assert self.constraint is not None  # which has listed them
            raise ConstraintError(
                f"{self.constraint.constraint.name} allows token ids from {tokens.min()} to "
                f"{tokens.max()}; expected 0 to {vocab_size - 1}, the target's vocabulary"
            )
        return allowed

    def ends_next(self, nodes: Nodes, allowed: AllowedAfter) -> NDArray[np.bool_]:
        """Return whether each path surely ends with its next token, (num_nodes,) bool."""
        is_last: NDArray[np.bool_] = allowed.num_listed == 0
        if self.constraint is not None and hasattr(self.constraint.constraint, "ends_next"):
            is_last |= self.constraint.constraint.ends_next(self.constraint.states[nodes])
        return is_last

    def processed(
        self, nodes: Nodes, rows: Rows, tokens: Tokens, log_probs: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return log-probabilities of a draft without a model, -inf if a token is forbidden.

        nodes: (num_rows,) int64. rows: (n,) int64 increasing, after which of the nodes each token
        comes. tokens, log_probs: (n,).
        """
        counts = np.bincount(rows, minlength=len(nodes))
        is_token = np.arange(counts.max()) < counts[:, None]
        table, scores = np.full(is_token.shape, -1), np.full(is_token.shape, -np.inf)
        table[is_token], scores[is_token] = tokens, log_probs
        candidates = Candidates(self.paths, nodes, table, self.vocab_size)
        for processor in self.processors:
            scores = processor.process(scores, candidates)
        scores[~self.allowed_after(nodes).are_allowed(table)] = -np.inf
        return scores[is_token]

    def check_continues(self, nodes: Nodes, num_candidates: int) -> None:
        """Raise ConstraintError if nothing may follow one of ``nodes``, or any beam."""
        if self.constraint is not None and len(nodes):
            num_allowed = AllowedAfter.after(nodes, self.constraint).num_tokens
            if not num_allowed.all():
                node = int(nodes[int((num_allowed == 0).argmax())])
                raise ConstraintError(
                    f"{self.constraint.constraint.name} neither accepts nor continues the new "
                    f"tokens {self._new_tokens(node)}; expected a token that may follow, or an "
                    "end-of-sequence id where it accepts: change one of them"
                )
        if not num_candidates:
            raise ConstraintError(
                "processors and constraint leave no token to any beam, such as the one of the new "
                f"tokens {self._new_tokens(int(nodes[0]))}; expected at least one: relax them"
            )

    def _new_tokens(self, node: int) -> str:
        return shown(self.paths.path(node)[self.paths.num_prompt :].tolist())

    def _of_all(
        self,
        logits: NDArray[np.float32],
        normalizers: Scores,
        nodes: Nodes,
        allowed: AllowedAfter,
        is_draft: bool,
    ) -> ListedDistributions:
        """Return distributions of rows of all logits, and their log-normalizers, (num_rows, 1)."""
        vocab_size = logits.shape[1]
        tokens = allowed.listed()
        if tokens is None:
            scores = logits.astype(np.float64)
        else:
            scores = np.take_along_axis(logits, np.maximum(tokens, 0), axis=1).astype(np.float64)
            scores[tokens < 0] = -np.inf
        candidates = Candidates(self.paths, nodes, tokens, vocab_size)
        processed, raw = self._processed(scores, normalizers, candidates, is_draft)
        if tokens is None and self.constraint is not None:
            processed[~allowed.mask(vocab_size)] = -np.inf
        return self._listed(candidates, processed, raw)

    def _of_top(
        self, logits: Logits, nodes: Nodes, allowed: AllowedAfter, is_draft: bool
    ) -> tuple[ListedDistributions, NDArray[np.bool_]]:
        """Return distributions of rows of a top-k head, by id, and for which they are right."""
        tokens, scores = logits.most_probable(0)
        by_id = tokens.argsort(axis=1)
        tokens = np.take_along_axis(tokens, by_id, axis=1)
        scores = np.take_along_axis(scores, by_id, axis=1)
        listed = allowed.listed()
        if is_draft and listed is not None:  # what was left out counts as the last that was not
            scores = _looked_up(tokens, scores, listed)
            tokens = listed
        candidates = Candidates(self.paths, nodes, tokens, self.vocab_size)
        processed, raw = self._processed(scores, logits.log_normalizers, candidates, is_draft)
        is_allowed = allowed.are_allowed(tokens)
        is_complete = np.ones(len(nodes), dtype=np.bool_)
        if not is_draft:
            num_allowed = np.count_nonzero(is_allowed, axis=1)
            before = raw if self._warp.is_raw else scores
            is_complete = self._are_right(before, processed, is_allowed, candidates)
            is_complete |= num_allowed == allowed.num_of(self.vocab_size)
        processed[~(is_allowed & is_complete[:, None])] = -np.inf
        return self._listed(candidates, processed, raw), is_complete

    def _are_right(
        self,
        before: Scores,
        processed: Scores,
        is_allowed: NDArray[np.bool_],
        candidates: Candidates,
    ) -> NDArray[np.bool_]:
        """Return for each row whether all of its best tokens are among those of the top-k head."""
        may_raise = np.zeros(len(before), dtype=np.bool_)
        for processor in self.processors:
            may_raise |= processor.may_raise(candidates)
        least = before.min(axis=1, keepdims=True)
        surely_best = (processed > least) | ((processed == least) & (before == least))
        num_sure = np.count_nonzero(surely_best & is_allowed, axis=1)
        are_right: NDArray[np.bool_] = num_sure >= (self._warp.top_k or self.vocab_size)
        return are_right & ~may_raise

    def _processed(
        self,
        scores: Scores,
        normalizers: NDArray[np.floating],
        candidates: Candidates,
        is_draft: bool,
    ) -> tuple[Scores, Scores]:
        """Return processed scores (log-probabilities in a beam search), and raw ones."""
        raw = scores - normalizers
        processed = raw.copy() if self._processes_log_probs else scores.copy()
        for processor in self.processors:
            processed = processor.process(processed, candidates)
        if self._warp.is_raw and not self._processes_log_probs:
            processed -= normalizers
        if self.mass is not None and not is_draft:
            log_probs = processed if self._warp.is_raw else processed - normalizers
            self.mass.note(self.paths, candidates.nodes, log_probs)
        return processed, raw

    def _listed(
        self, candidates: Candidates, processed: Scores, raw: Scores
    ) -> ListedDistributions:
        """Return the warped distributions over the candidates that can be drawn."""
        tokens = candidates.tokens
        if tokens is None:
            tokens = np.broadcast_to(np.arange(processed.shape[1]), processed.shape)
        if self._warp.top_k:
            best = largest_columns(processed, min(self._warp.top_k, processed.shape[1]))
            order = np.argsort(-np.take_along_axis(processed, best, axis=1), axis=1, kind="stable")
            order = np.take_along_axis(best, order, axis=1)
            tokens = np.take_along_axis(tokens, order, axis=1)
            processed = np.take_along_axis(processed, order, axis=1)
            raw = np.take_along_axis(raw, order, axis=1)
        log_probs = processed
        if not self._warp.is_raw:
            log_probs = np.full_like(processed, -np.inf)
            alive = np.flatnonzero(np.isfinite(processed).any(axis=1))
            if len(alive):
                scores = processed[alive]
                log_probs[alive] = self._warp.warped(scores - scores.max(axis=1, keepdims=True))
        return ListedDistributions.of(tokens, log_probs, raw)


def _looked_up(tokens: Tokens, scores: Scores, listed: Tokens) -> Scores:
    """Return the scores of the listed tokens, (num_rows, n); of one not there the least."""
    stride = max(int(tokens.max(initial=0)), int(listed.max(initial=0))) + 1
    first = np.arange(len(tokens))[:, None] * stride
    keys = (first + tokens).ravel()
    order = keys.argsort()
    wanted = first + listed
    place = order.take(keys.searchsorted(wanted, sorter=order), mode="clip")
    least = scores.min(axis=1, keepdims=True)
    listed_scores = np.where(keys[place] == wanted, scores.ravel()[place], least)
    listed_scores[listed < 0] = -np.inf
    return listed_scores
