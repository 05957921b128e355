"""Session: the interface of CausalLM to an inference engine, implemented once per backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.engine.providers import Placement
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.parts.attention.attention_rows import Rows
from dsbd_runtime.parts.part import Call, NewRows, Part


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One engine to open.

    role: "target" or "draft".
    target: for a draft that is opened with its target: the target's session, whose parts it may
        share. None: the engine is opened alone.
    new_rows: makes new rows of caches on the host. Usually zeros; the parity gate uses noise, to
        show that engines do not read masked rows.
    adapt: changes options of ONNX Runtime, for the parity gate; None: no change.
    """

    bundle: Bundle
    role: str
    placement: Placement
    settings: EngineSettings = EngineSettings()
    target: Session | None = None
    new_rows: NewRows = np.zeros
    adapt: Callable[[Any], None] | None = None

    @property
    def records_calls(self) -> bool:
        provider = self.placement.provider
        if self.settings.cuda_graphs is None:
            return provider.uses_cuda_graphs
        return self.settings.cuda_graphs and provider.has_device_caches


class Session(Protocol):
    """One engine together with its parts."""

    @property
    def parts(self) -> Sequence[Part]:
        """Its kinds of state, in the order in which a call binds them."""

    @property
    def rows(self) -> Rows:
        """The attention rows, which every engine has."""

    @property
    def grows_at_a_cost(self) -> bool:
        """Whether growing the caches also drops calls recorded for their addresses."""

    def run(self, call: Call) -> None:
        """Append S rows at ``first_row``; the parts add their results to the call's ``returned``.

        The next call does not change the returned arrays, except ``Logits.full``.
        """

    def close(self) -> None:
        """Release the engine and its parts; calling it again does nothing."""
