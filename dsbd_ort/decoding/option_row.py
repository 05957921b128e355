"""A row of the table of options, and the conditions and defaults that rows are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from dsbd_ort.decoding.option_values import Domain
from dsbd_ort.decoding.strategies import STRATEGIES, Strategy, named_strategy

MOST_NODES = 16_384  # of a forest, whose mask has a cell for every pair of nodes
USUAL_THRESHOLD = 0.7


class Chosen(SimpleNamespace):
    """The values of all options: resolved as far as the table was read, below that as given.

    And ``is_cold``: whether temperature 0 is given; ``has_draft``, ``costs_are_known``: whether
    there is a draft model, whether the costs of engine calls will be known; None: not known yet.
    """

    @property
    def row(self) -> Strategy:
        return STRATEGIES[self.strategy]


@dataclass(frozen=True)
class Condition:
    """A condition without which an option means nothing.

    option: which decides. remedy: its value to use instead, for a message.
    among: the values with which it is met. unless: those with which it is not, if ``among`` is
        None.
    """

    option: str
    remedy: str
    among: tuple[Any, ...] | None = None
    unless: tuple[Any, ...] = ()

    def is_met(self, options: Any) -> bool:
        value = getattr(options, self.option)
        return value not in self.unless if self.among is None else value in self.among


@dataclass(frozen=True)
class OptionRow:
    """The row of one option.

    default: its value if it is left out, or a function that returns it; with a function, or if it
        is None, None may also be given.
    needs: conditions, all of which must be met for it to mean something.
    neutral: the values that it may have if it means nothing, or a function that returns them; the
        first is stored. None: the default alone.
    is_redundant: whether any value may be given if it means nothing.
    is_processor: whether other values than the default change which tokens may follow.
    of_model: whose generation_config.json may set it: of any model, of an encoder-decoder, or of
        any model for searches with several beams (their number: of an encoder-decoder alone).
    http: names that its HTTP field has in addition to its own; None: it has no HTTP field.
    """

    domain: Domain  # its values
    default: Any
    help: str  # its text in the help of the commands
    needs: tuple[Condition, ...] = ()
    neutral: tuple[Any, ...] | Callable[[Chosen], tuple[Any, ...]] | None = None
    is_redundant: Callable[[Chosen], bool] = lambda _: False
    is_processor: bool = False
    of_model: Literal["any", "encoder-decoder", "search"] | None = None
    http: tuple[str, ...] | None = ()
    is_usual: bool = False  # whether a short help shows it
    is_set_by_server: bool = True  # whether a server may have a default of its own

    @property
    def takes_none(self) -> bool:
        return self.default is None or callable(self.default)

    def unmet(self, options: Any) -> Condition | None:
        """Return the first condition that is not met, None if the option means something."""
        return next((need for need in self.needs if not need.is_met(options)), None)

    def default_of(self, options: Chosen) -> Any:
        return self.default(options) if callable(self.default) else self.default

    def neutral_of(self, options: Chosen) -> tuple[Any, ...]:
        """Return the values that it may have if it means nothing."""
        if self.neutral is None:
            return (self.default_of(options),)
        return self.neutral(options) if callable(self.neutral) else self.neutral


def _of_strategies(is_met: Callable[[Strategy], bool], remedy: str) -> Condition:
    among = tuple(name for name, strategy in STRATEGIES.items() if is_met(strategy))
    return Condition("strategy", remedy, among)


_WITH_BEAMS, _THAT_SAMPLES = "one with beams such as dsbd", "one that samples such as dsbd"
HAS_BEAMS = _of_strategies(lambda row: row.has_beams, _WITH_BEAMS)
HAS_DRAFT = _of_strategies(lambda row: row.has_draft, "one with a draft such as dsbd")
HAS_DRAFT_TREE = _of_strategies(
    lambda row: row.has_draft_tree, "one that drafts a tree such as tree-speculative"
)
SAMPLES = _of_strategies(lambda row: row.rule == "sample", _THAT_SAMPLES)
SEVERAL_DRAWS = _of_strategies(lambda row: row.has_beams or row.has_draft_tree, _WITH_BEAMS)
NO_SEARCH = _of_strategies(lambda row: row.rule != "search", _THAT_SAMPLES)
MJSD = _of_strategies(lambda row: row.rule == "joint", "mjsd")
MJGD = _of_strategies(lambda row: row.rule == "joint-greedy", "mjgd")
DSBD = _of_strategies(lambda row: row.rule == "sample" and row.has_draft and row.has_beams, "dsbd")
FREE_OF_THE_DRAFT = _of_strategies(
    lambda row: row.has_draft and row.rule in ("sample", "search"),
    "one whose output need not depend on its draft, such as dsbd",
)
DRAFTING = Condition("drafter", "'model' or 'ngram'", unless=("none",))
DRAFTED_BY_MODEL = Condition(
    "drafter", "'model' or 'model+ngram'", among=(None, "model", "model+ngram")
)
BY_NGRAMS = Condition("drafter", "'ngram' or 'model+ngram'", among=(None, "ngram", "model+ngram"))
DRAFTED_LAYERS = Condition("draft_length", "at least 1", unless=(0,))
THRESHOLD = Condition("width_policy", "'threshold'", among=("threshold",))
DYNAMIC_WIDTH = (DSBD, THRESHOLD, DRAFTED_LAYERS)
EVERY_BEAM = Condition("memory", "'forest'", among=("forest",))
HAS_TIMES = Condition(
    "no_timestamps_token_id", "the token before the times of a speech model", unless=(None,)
)


def is_cold(options: Chosen) -> bool:
    """Return whether temperature 0 is given: nothing is drawn."""
    return bool(options.is_cold)


def is_predicted(options: Chosen) -> bool:
    """Return whether a predicted text is given, as text or as token ids."""
    return bool(options.predicted_text or options.predicted_token_ids)


def usual_strategy(options: Chosen) -> str:
    """Return "dsbd", or its counterpart at temperature 0."""
    return named_strategy("dsbd", is_cold=options.is_cold)


def usual_drafter(options: Chosen) -> str | None:
    """Return "ngram" without a draft model, "model+ngram" with a predicted text, else "model".

    None as long as it is not known whether there is a draft model.
    """
    if options.has_draft is None:
        return None
    if not options.has_draft:
        return "ngram"
    return "model+ngram" if is_predicted(options) else "model"


def undrafted(options: Chosen) -> tuple[str]:
    """Return the value of ``drafter`` for a strategy in which it cannot be chosen."""
    return ("model" if options.row.has_draft else "none",)


def half_width(options: Chosen) -> int:
    """Return half of num_beams, the default of min_beams."""
    return max(1, int(options.num_beams) // 2)


def fixed_width(options: Chosen) -> tuple[int | None, ...]:
    """Return the values of min_beams if the width does not change."""
    return None, options.num_beams, half_width(options)


def usual_width_policy(options: Chosen) -> str:
    """Return "threshold" if one of its options is given and it is possible, else "fixed"."""
    is_given = options.min_beams is not None or options.accept_threshold != USUAL_THRESHOLD
    is_possible = options.draft_length != 0 and options.draft_policy != "throughput"
    return "threshold" if is_given and is_possible else "fixed"


def depends_on_draft(options: Any) -> bool:
    """Return whether the output of a strategy that is free of its draft depends on it."""
    is_coupled = options.coupling == "rejection" or options.width_policy == "threshold"
    return bool(is_coupled or options.memory == "single" or options.replacement)


def usual_draft_policy(options: Chosen) -> str | None:
    """Return "fixed" if a shape is given or the output depends on the draft."""
    has_shape = options.draft_length is not None or options.draft_beams is not None
    if has_shape or depends_on_draft(options):
        return "fixed"
    return {True: "throughput", False: "fixed", None: None}[options.costs_are_known]


def usual_draft_length(options: Chosen) -> int | None:
    """Return the layers of a drafted forest, or their limit; None as long as that is open."""
    if options.draft_policy is None:
        return None
    return 4 if options.draft_policy == "fixed" else 16 if is_predicted(options) else 8


def usual_draft_beams(options: Chosen) -> int | None:
    """Return the candidates of a layer, or their limit; None as long as that is open."""
    usual: int = options.num_beams if options.row.has_beams else 4
    if options.draft_policy == "throughput":
        return max(usual, min(4 * usual, MOST_NODES // max(options.draft_length or 0, 1)))
    return usual if options.draft_policy == "fixed" else None


def one_path(options: Chosen) -> tuple[Any, ...]:
    """Return the values of draft_beams if there is no tree to draft."""
    if options.draft_length is None:
        return (None, 1)
    layers = (1,) * options.draft_length
    return (layers, 1) if layers else (layers,)
