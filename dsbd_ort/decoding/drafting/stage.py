"""The draft stage of an iteration: whether and how much is drafted, and by which rows."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.drafting.draft import Drafter, DraftLayer, DraftPolicy, draft_forest
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from dsbd_ort.decoding.engine_call import EngineCalls
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.forest_runner import ForestRunner
from dsbd_ort.decoding.late_runner import LateRunner
from dsbd_ort.decoding.request import DecodingRequest
from dsbd_ort.decoding.row_bounds import most_descendants
from dsbd_ort.decoding.rule import SelectionRule


class DraftStage:
    """The draft stage of a request that drafts nothing.

    Attributes:
        most_descendants: nodes below the beams that pruning leaves at most.
        lockstep: runners that compute the prompt part by part, as the target does.
    """

    most_descendants = 0
    lockstep: Sequence[ForestRunner] = ()

    def draft(self, beams: Beams, depth: int) -> EngineCalls[list[DraftLayer]]:
        """Return a computation that adds the layers drafted below ``beams`` to the forest.

        depth: of the beams, counted from the prompt.
        """
        return _no_layers()


class PolicyDraftStage(DraftStage):
    """The draft stage of a request with a drafter; its draft policy decides.

    Attributes:
        drafter: gives the distributions.
    """

    def __init__(
        self,
        request: DecodingRequest,
        rule: SelectionRule,
        policy: DraftPolicy,
        drafter: Drafter,
        forest: Forest,
        target: ForestRunner,
        draft: Sequence[ForestRunner],
    ) -> None:
        """Take the parts of a request; ``draft``: the draft model's side, if it has one."""
        self._config = request.config
        self._rule = rule
        self._policy = policy
        self.drafter = drafter
        self._forest = forest
        self._target = target
        self.lockstep = [runner for runner in draft if not isinstance(runner, LateRunner)]
        self.most_descendants = most_descendants(request.config) if rule.keeps_descendants else 0

    def draft(self, beams: Beams, depth: int) -> EngineCalls[list[DraftLayer]]:
        """See DraftStage.draft."""
        most_layers = self._config.max_new_tokens - depth - 1
        self._policy.begin(self._target.num_missing(beams.nodes), most_layers)
        return draft_forest(
            self._forest,
            self.drafter,
            beams,
            self._policy,
            depth,
            keeps_distributions=self._rule.reads_draft_distributions,
            repeats=self._config.replacement,
        )


class RestingDraftStage(DraftStage):
    """A draft stage that is skipped while its policy rests.

    With one beam nothing is kept for the draft model during a long rest: it then reads the tokens
    that it missed as it reads a prompt.
    """

    def __init__(
        self, stage: DraftStage, policy: ThroughputDraftPolicy, late: LateRunner | None
    ) -> None:
        """Wrap a stage; ``late``: the draft model's side, if it can be put off."""
        self._stage, self._policy, self._late = stage, policy, late
        self.lockstep, self.most_descendants = stage.lockstep, stage.most_descendants

    def draft(self, beams: Beams, depth: int) -> EngineCalls[list[DraftLayer]]:
        """See DraftStage.draft."""
        num_to_rest = self._policy.rest()
        if self._late is not None:
            self._late.rest(num_to_rest, beams)
        return _no_layers() if num_to_rest else self._stage.draft(beams, depth)


def _no_layers() -> EngineCalls[list[DraftLayer]]:
    """Draft nothing, without an engine call."""
    yield from ()
    return []
