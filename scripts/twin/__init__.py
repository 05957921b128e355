"""The parts of scripts/make_twin: a small trained target, padded to the cost of a large one."""
