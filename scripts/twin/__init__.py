"""The parts of scripts/make_twin: a small trained target made as costly as a large one."""
