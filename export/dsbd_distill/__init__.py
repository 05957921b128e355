"""Training of a draft for a target: draft_run is the distillation, top to bottom."""
