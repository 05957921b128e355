"""Scorers: log-scores from another source, added to the scores of a request's beams."""

from dsbd_ort.decoding.logits_processing.scorer import Scorer, added_score
from dsbd_ort.scorers.language_model import LanguageModel

__all__ = ["LanguageModel", "Scorer", "added_score"]
