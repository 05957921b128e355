"""Media that an encoder reads into a prompt: manifest entries, and how each is cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.parts.given.given_prompt import GivenPiece
from dsbd_runtime.parts.part import Tensors

CTC_LOGITS = "ctc_logits"
"""An output of encoders that also spell what they hear."""


@dataclass(frozen=True, kw_only=True)
class MediumEntry:
    """Manifest entry of a medium and its front end; each kind is a class."""

    @property
    def kind(self) -> str:
        """The name of the kind, by which a manifest finds the class: a field of each class."""
        raise NotImplementedError

    @property
    def encoder_inputs(self) -> Tensors:
        """The inputs of the encoder's graph for one piece."""
        raise NotImplementedError

    @property
    def encoder_outputs(self) -> Tensors:
        """The outputs of that graph in addition to the rows."""
        return {}

    def spelled(self, labels: NDArray[np.int64]) -> str:
        """Return the text of the most probable CTC labels, (T,), "" without such an output."""
        return ""

    def pieces(self, features: NDArray[Any]) -> list[GivenPiece]:
        """Return the runs of the encoder for one medium; InputError: features of another shape."""
        raise NotImplementedError

    def check(self, where: str) -> None:
        """Raise BundleError unless the values are consistent and a request can pay for them."""
        raise NotImplementedError
