"""Distillation of a draft for a target: dsbd-distill; ``draft_run`` is the page to read first."""
