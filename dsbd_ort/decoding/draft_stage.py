"""The draft stage of a request: whether an iteration drafts, and who does."""

from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.drafting.draft import Drafter, DraftLayer, DraftPolicy, draft_forest
from dsbd_ort.decoding.engine_call import EngineCalls
from dsbd_ort.decoding.forest_runner import ForestRunner, LateRunner
from dsbd_ort.decoding.row_bounds import most_descendants
from dsbd_ort.decoding.rule import SelectionRule


class DraftStage:
    """Asks the draft policy in every iteration; None as the drafter: nothing is ever drafted.

    With one beam nothing is kept for a draft model that reads late during a long rest of the
    policy: it then reads the tokens that it missed as it reads a prompt.

    most_descendants: nodes below the beams that pruning leaves at most.
    """

    def __init__(
        self,
        config: DecodingConfig,
        rule: SelectionRule,
        policy: DraftPolicy,
        drafter: Drafter | None,
        target: ForestRunner,
        late: LateRunner | None,
    ) -> None:
        self._config, self._rule, self._policy = config, rule, policy
        self.drafter, self._target, self._late = drafter, target, late
        keeps = drafter is not None and rule.keeps_descendants
        self.most_descendants = most_descendants(config) if keeps else 0

    def draft(self, beams: Beams, depth: int) -> EngineCalls[list[DraftLayer]]:
        """Return a computation that adds the layers drafted below ``beams`` to the forest."""
        num_to_rest, late = self._policy.rest(), self._late
        if late is not None and self._config.num_beams == 1:
            late.rest(num_to_rest, beams)
        if self.drafter is None or num_to_rest:
            return _no_layers()
        if late is not None and not late.can_draft(beams):
            return _no_layers()
        most_layers = self._config.max_new_tokens - depth - 1
        num_pending = len((self._target.slots[beams.nodes] < 0).nonzero()[0])
        self._policy.begin(num_pending, most_layers)
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
    yield from ()
    return []
