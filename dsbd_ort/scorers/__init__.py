"""Scorers: log-scores of another source, added to the beams of a request while they live."""

from dsbd_ort.decoding.logits_processing.scorer import Scorer, added_score
from dsbd_ort.scorers.language_model import LanguageModel

__all__ = ["LanguageModel", "Scorer", "added_score"]
