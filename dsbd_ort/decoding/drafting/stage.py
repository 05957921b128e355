"""The draft stage of an iteration: whether and how much is drafted, and by which rows."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.drafting.draft import Drafter, DraftLayer, DraftPolicy, draft_forest
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from dsbd_ort.decoding.engine_call import EngineCalls
from dsbd_ort.decoding.forest_runner import ForestRunner, LateRunner
from dsbd_ort.decoding.request import DecodingRequest
from dsbd_ort.decoding.row_bounds import most_descendants
from dsbd_ort.decoding.rule import SelectionRule


class DraftStage:
    """The draft stage of a request; its draft policy decides.

    With one beam nothing is kept for the draft model during a long rest of a throughput policy: it
    then reads the tokens that it missed as it reads a prompt.

    Attributes:
        most_descendants: nodes below the beams that pruning leaves at most.
        lockstep: runners that compute the prompt part by part, as the target does.
    """

    def __init__(
        self,
        request: DecodingRequest,
        rule: SelectionRule,
        policy: DraftPolicy,
        drafters: Sequence[Drafter],
        target: ForestRunner,
        draft: Sequence[ForestRunner],
    ) -> None:
        """Take the parts of a request.

        drafters: the one to use, if it drafts. draft: the draft model's side, if it has one.
        """
        self._config, self._rule, self._policy = request.config, rule, policy
        self.drafter = drafters[0] if drafters else None
        self._target = target
        self.lockstep = [runner for runner in draft if not isinstance(runner, LateRunner)]
        keeps = self.drafter is not None and rule.keeps_descendants
        self.most_descendants = most_descendants(request.config) if keeps else 0
        self._resting = policy if isinstance(policy, ThroughputDraftPolicy) else None
        is_single = request.config.num_beams == 1
        late = [runner for runner in draft if isinstance(runner, LateRunner) and is_single]
        self._put_off = late if self._resting is not None else []

    def draft(self, beams: Beams, depth: int) -> EngineCalls[list[DraftLayer]]:
        """Return a computation that adds the layers drafted below ``beams`` to the forest.

        depth: of the beams, counted from the prompt.
        """
        num_to_rest = 0 if self._resting is None else self._resting.rest()
        for runner in self._put_off:
            runner.rest(num_to_rest, beams)
        if self.drafter is None or num_to_rest:
            return _no_layers()
        most_layers = self._config.max_new_tokens - depth - 1
        self._policy.begin(self._target.num_missing(beams.nodes), most_layers)
        return draft_forest(
            self._target.forest,
            self.drafter,
            beams,
            self._policy,
            depth,
            keeps_distributions=self._rule.reads_draft_distributions,
            repeats=self._config.replacement,
        )


def _no_layers() -> EngineCalls[list[DraftLayer]]:
    """Draft nothing, without an engine call."""
    yield from ()
    return []
