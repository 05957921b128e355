"""Options of a distillation, checked before anything is read."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from dsbd_export.config import LEAST_DRAFT_VOCAB, check_num_threads
from dsbd_export.errors import ExportError

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([KMB]?)", re.IGNORECASE)
MODEL, FEATURE = KINDS = ("model", "feature")
_MOST_MINUTES = 60 * 24 * 365
_MOST_COVERAGE = 16  # lessons have the 32 most probable tokens of the target


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Options of a distillation."""

    target: str  # folder or Hugging Face hub id of the target checkpoint
    data: tuple[str, ...]  # files, folders or patterns of data, see ``texts``
    output: Path  # folder of the draft, which must not exist; work in progress is next to it
    exclude: tuple[str, ...] = ()  # patterns of files that ``data`` would otherwise include
    # "model" for a separate small model, "feature" for one transformer layer over the target's
    # hidden states (EAGLE-3)
    kind: str = MODEL
    params: str | None = (
        None  # maximum number of parameters, such as "30M"; None: a tenth of the target's
    )
    # instead of ``params``: the draft begins as this many transformer layers of the target, with
    # its width. Drafts for encoder-decoders always begin with layers of the decoder (None: 1)
    target_layers: int | None = None
    # checkpoint from which these layers are taken, such as the target's small sibling; None: the
    # target
    layers_of: str | None = None
    # number of tokens that the draft proposes, the most frequent of the texts and of the target's
    # answers; None: all of the target's
    draft_vocab: int | None = None
    # number of beams whose candidates the draft must propose, see ``loss.Coverage``; None: the loss
    # considers the next token alone
    coverage: int | None = None
    language: str | None = None  # code of the language of all audio; None: detected
    task: str | None = (
        None  # "transcribe" or "translate", if the target does both; None: "transcribe"
    )
    learn_answers: bool = False  # learn the answers in chats as well, as texts
    minutes: float = 60.0  # time of training, including samples of the target
    steps: int | None = (
        None  # replaces minutes, so that the draft does not depend on the machine's speed
    )
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False
    num_threads: int | None = None  # threads of torch; may differ when a command resumes

    def __post_init__(self) -> None:
        check_num_threads(self.num_threads)
        if not self.data:
            raise ExportError("data is missing; give files or folders of texts")
        if self.kind not in KINDS:
            raise ExportError(f"kind={self.kind!r} is not known; use one of {', '.join(KINDS)}")
        if self.kind == FEATURE and self.target_layers is not None:
            raise ExportError(
                f"target_layers={self.target_layers} has no meaning for kind={FEATURE!r}, a single "
                "transformer layer of its own; use params, or leave target_layers out"
            )
        if self.params is not None and self.target_layers is not None:
            raise ExportError(
                "params and target_layers both choose the draft's shape; leave one of them out"
            )
        if self.layers_of is not None and self.target_layers is None:
            raise ExportError(
                f"layers_of={self.layers_of!r} has no meaning without target_layers; say how many "
                "of its layers the draft begins with"
            )
        _ = self.num_params  # checked now
        if not (0 < self.minutes <= _MOST_MINUTES):
            raise ExportError(
                f"minutes={self.minutes} is out of range; use a number above 0, such as 60"
            )
        if self.coverage is not None and not 2 <= self.coverage <= _MOST_COVERAGE:
            raise ExportError(
                f"coverage={self.coverage} is out of range; use the number of beams, 2 to "
                f"{_MOST_COVERAGE}, or leave it out"
            )
        least_of = {"steps": 1, "target_layers": 1, "seed": 0, "draft_vocab": LEAST_DRAFT_VOCAB}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and not least <= value < 2**31:
                raise ExportError(f"{name}={value} is out of range; use {least} or more")

    @property
    def num_params(self) -> int | None:
        if self.params is None:
            return None
        match = _NUMBER.fullmatch(self.params.strip())
        count = float(match[1]) * _SUFFIXES[match[2].upper()] if match else 0.0
        if not 1 <= count <= 10**12 or not math.isfinite(count):
            raise ExportError(
                f"params={self.params!r} is not a number of parameters; use one such as 30M or 1.5M"
            )
        return int(count)
