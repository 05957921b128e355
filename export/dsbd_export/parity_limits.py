"""How far an export may be from the checkpoint in fp32, by precision."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_export.config import ExportConfig

MAX_ABS_ERROR = "max_abs_error"
MEAN_KL = "mean_kl"

_EXACT_LIMIT = 1e-4  # rounding in fp32 stays below 2e-5 on the demo pair

# By (dtype, quantize): mean KL divergence of the text in nats. Behind each limit what was measured
# on it: the demo pair (the larger of target and draft), and the worst of the tiny random mixtures
# of experts, whose routers amplify rounding more than any other model that was tried.
_KL_LIMITS = {
    ("fp16", "none"): 2e-3,  # 1.2e-6, 5.6e-4
    ("bf16", "none"): 1e-2,  # 5.7e-5, 3.6e-3; weights alone: see fp32_twin
    ("fp32", "int8-dynamic"): 5e-2,  # 1.3e-3, 2.0e-2
    ("fp32", "int8"): 2e-2,  # 7.0e-4
    ("fp16", "int8"): 2e-2,
    ("fp32", "int4"): 3e-1,  # 6.3e-2, 2.4e-1
    ("fp16", "int4"): 3e-1,  # 6.4e-2
}
# Random tokens show larger divergences than text, up to 6 times on the demo pair, and a case of
# one row is no mean. Their limit is for mistakes of structure, as a wrong mask or position.
_FOREST_FACTOR = 10
_HIGHEST_FOREST_LIMIT = 1.0


@dataclass(frozen=True)
class ParityLimit:
    """The limit that the cases have to meet.

    Attributes:
        measure: ``MAX_ABS_ERROR`` of the logits, or ``MEAN_KL``.
        value: the largest that passes, on the text or, of ``MAX_ABS_ERROR``, on any case.
    """

    measure: str
    value: float

    @property
    def forest_value(self) -> float:
        """Return the largest that passes on a forest of random tokens."""
        if self.measure == MAX_ABS_ERROR:
            return self.value
        return min(self.value * _FOREST_FACTOR, max(self.value, _HIGHEST_FOREST_LIMIT))

    @property
    def option(self) -> str:
        """Return the option of ExportConfig that loosens it."""
        return "atol" if self.measure == MAX_ABS_ERROR else "max_kl"


def parity_limit(config: ExportConfig) -> ParityLimit:
    """Return the limit that was asked for, or that of the precision."""
    if config.is_exact:
        return ParityLimit(MAX_ABS_ERROR, _EXACT_LIMIT if config.atol is None else config.atol)
    limit = _KL_LIMITS[config.dtype, config.quantize]
    return ParityLimit(MEAN_KL, limit if config.max_kl is None else config.max_kl)
