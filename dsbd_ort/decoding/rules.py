"""The rule of a request: one row per name in the strategy table."""

from __future__ import annotations

from collections.abc import Callable

from dsbd_ort.decoding.chance import Chance
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.gumbel_coupling import GumbelCoupling
from dsbd_ort.decoding.joint_rule import JointGreedyRule, JointSpeculativeRule
from dsbd_ort.decoding.rejection_coupling import RejectionCoupling
from dsbd_ort.decoding.rule import SelectionRule
from dsbd_ort.decoding.sample_rule import SampleRule
from dsbd_ort.decoding.search_rule import SearchRule


def _sample_rule(config: DecodingConfig, forest: Forest, chance: Chance) -> SelectionRule:
    if config.coupling == "gumbel":
        return SampleRule(config, forest, GumbelCoupling(forest, config.replacement))
    return SampleRule(config, forest, RejectionCoupling(chance, config.replacement))


_RULES: dict[str, Callable[[DecodingConfig, Forest, Chance], SelectionRule]] = {
    "sample": _sample_rule,
    "search": lambda config, forest, _: SearchRule(config, forest),
    "joint": lambda config, forest, _: JointSpeculativeRule(config, forest),
    "joint-greedy": lambda config, forest, _: JointGreedyRule(config, forest),
}


def rule_of(config: DecodingConfig, forest: Forest, chance: Chance) -> SelectionRule:
    """Return the strategy's rule, with the state of one request."""
    return _RULES[config.row.rule](config, forest, chance)
