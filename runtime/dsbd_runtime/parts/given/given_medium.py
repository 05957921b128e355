"""Media that an encoder reads into a prompt: manifest entries, and the cutting into pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.parts.given.given_prompt import GivenPiece
from dsbd_runtime.parts.part import Tensors

CTC_LOGITS = "ctc_logits"
"""An output of encoders that also return the spoken text as CTC labels."""


@dataclass(frozen=True, kw_only=True)
class MediumEntry:
    """Manifest entry of a medium and its front end; each kind is a class."""

    @property
    def kind(self) -> str:
        """The name of the kind, a field of each class; a manifest selects the class by it."""
        raise NotImplementedError

    @property
    def encoder_inputs(self) -> Tensors:
        """The inputs of the encoder's graph for one piece."""
        raise NotImplementedError

    @property
    def encoder_outputs(self) -> Tensors:
        """The outputs of the encoder's graph in addition to the rows."""
        return {}

    def spelled(self, labels: NDArray[np.int64]) -> str:
        """Return the text of the most probable CTC labels, (T,); "" if there is no such output."""
        return ""

    def pieces(self, features: NDArray[Any]) -> list[GivenPiece]:
        """Return the runs of the encoder for one medium; InputError: features of another shape."""
        raise NotImplementedError

    def check(self, where: str) -> None:
        """Raise BundleError unless the values are consistent and within their limits."""
        raise NotImplementedError
