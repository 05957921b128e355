"""Other tools beside ours, on the same checkpoints, in one run."""
