"""The parts of scripts/compare_peers: other tools on the same checkpoints, in one run."""
